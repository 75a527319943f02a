"""The Python API of search: what is found, by whom, and with which model."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from small_index import bundled, small_index

from hnclip.core import Record
from hnclip.data.image_sources import FileImage
from hnclip.data.scenes import scene_records
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.load import load
from hnclip.search.engines import Candidates
from hnclip.search.engines.open import make_engine
from hnclip.search.find import Finder, open_finder
from hnclip.search.index.opening import open_writer
from hnclip.search.index.reader import Index

RECORDS = scene_records("park", "test", families=3)


@pytest.fixture(scope="module")
def model() -> DualEncoder:
    return bundled()


@pytest.fixture(scope="module")
def path(model: DualEncoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("find") / "a.hnc"
    small_index(path, model, RECORDS)
    return path


def test_pictures_and_captions_are_found_by_either(path: Path) -> None:
    with open_finder(path) as finder:
        texts = finder.text_vectors([record.captions[0] for record in RECORDS])  # [12, D]
        pictures = finder.picture_vectors([record.image.load() for record in RECORDS])
        for queries in (texts, pictures):
            for query, hits in zip(queries, finder.images(queries, 12), strict=True):
                expected = pictures @ query
                assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
                for hit in hits:
                    place = [record.id for record in RECORDS].index(hit.item.name)
                    assert hit.score == pytest.approx(expected[place], abs=0.01)
                    assert hit.item.captions == RECORDS[place].captions
                assert len({hit.item.id for hit in hits}) == 12
            for query, found in zip(queries, finder.captions(queries, 5), strict=True):
                assert len(found) == 5
                best = int((texts @ query).argmax())
                assert (texts @ query)[best] == pytest.approx(found[0].score, abs=0.01)
                assert all(hit.caption.text in hit.caption.items[0].captions for hit in found)
        own = finder.images(pictures, 1)
        families = [record.id.rpartition("/")[0] for record in RECORDS]  # members may be the same to bf16
        assert [hits[0].item.name.rpartition("/")[0] for hits in own] == families


def test_items_of_the_same_content_come_together_with_one_score(model: DualEncoder, tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    records = []
    for name, scene in (("a", 0), ("b", 1), ("c", 0), ("d", 4), ("e", 0)):
        RECORDS[scene].image.load().save(tmp_path / "files" / f"{name}.png")
        records.append(Record(name, FileImage(tmp_path / "files" / f"{name}.png"), (), None))
    small_index(tmp_path / "a.hnc", model, records)
    with open_finder(tmp_path / "a.hnc") as finder:
        query = finder.picture_vectors([RECORDS[0].image.load()])
        hits = finder.images(query, 9)[0]
        assert [hit.item.name for hit in hits[:3]] == ["a", "c", "e"]
        assert len({hit.score for hit in hits[:3]}) == 1
        assert len(hits) == 5
        assert [hit.item.name for hit in finder.images(query, 2)[0]] == ["a", "c"]


def test_threads_find_what_one_finds(path: Path) -> None:
    texts = [record.captions[0] for record in RECORDS[::2]]
    with open_finder(path) as finder, ThreadPoolExecutor(4) as pool:

        def names(text: str) -> list[tuple[str, float]]:
            return [(hit.item.name, hit.score) for hit in finder.images(finder.text_vectors([text]), 7)[0]]

        expected = list(map(names, texts))
        assert list(pool.map(names, texts)) == expected


def test_a_text_beyond_the_context_is_cut(path: Path) -> None:
    with open_finder(path) as finder:
        long = "tree " * (finder.model.context - 2)
        np.testing.assert_allclose(*finder.text_vectors([long, long + "house " * 50]), atol=1e-6)


def test_another_model_is_refused(model_directory: Path, path: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="is another model now: give the one it was made with by --model"),
        open_finder(path, model=str(model_directory)),
    ):
        pass
    small_index(tmp_path / "a.hnc", load(model_directory), RECORDS[:2], name=str(tmp_path / "moved"))
    with open_finder(tmp_path / "a.hnc", model=str(model_directory)) as finder:
        assert len(finder.images(finder.text_vectors(["a tree"]), 5)[0]) == 2
    said = r"a\.hnc was made with .*, which cannot be opened: .*\nIf it has moved, say where it lies now by --model"
    with pytest.raises(ValueError, match=said), open_finder(tmp_path / "a.hnc"):
        pass


class Closing(Candidates):
    """Says when it is closed, and fails if it is told to."""

    covered = 0

    def __init__(self, name: str, closed: list[str], *, fails: bool = False) -> None:
        self.name, self.closed, self.fails = name, closed, fails

    def propose(self, queries: np.ndarray, count: int) -> np.ndarray:
        raise NotImplementedError

    def close(self) -> None:
        self.closed.append(self.name)
        if self.fails:
            raise OSError(f"{self.name} does not close")


def test_an_engine_is_closed_if_the_other_cannot_be_opened(
    path: Path, model: DualEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []

    def opened(index: Index, kind: str, engine: str) -> Candidates:
        if kind == "captions":
            raise OSError("no such server")
        return Closing(kind, closed)

    monkeypatch.setattr("hnclip.search.find.open_candidates", opened)
    with Index(path) as index, pytest.raises(OSError, match="no such server"):
        Finder(index, model)
    assert closed == ["images"]


@pytest.mark.parametrize("fails", ["images", "captions"])
def test_both_engines_are_closed_if_one_fails(
    path: Path, model: DualEncoder, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []
    monkeypatch.setattr(
        "hnclip.search.find.open_candidates", lambda _, kind, __: Closing(kind, closed, fails=kind == fails)
    )
    with Index(path) as index:
        finder = Finder(index, model)
        with pytest.raises(OSError, match=f"{fails} does not close"):
            finder.close()
    assert sorted(closed) == ["captions", "images"]


def test_the_engine_that_searches_is_named(model: DualEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.hnc"
    bare = [Record(record.id, record.image, (), None) for record in RECORDS[:3]]
    small_index(path, model, [*bare, *RECORDS[3:]], engine="faiss-hnsw")
    with open_finder(path) as finder:
        assert finder.engine == "faiss-hnsw"
        assert (finder.engine_of("images"), finder.engine_of("captions")) == ("exact", "exact")
    monkeypatch.setattr("hnclip.search.engines.open.FEW", 10)  # 12 pictures, but 9 captions
    with open_writer(path, None) as writer:
        make_engine(writer, "faiss-hnsw")
    with open_finder(path) as finder:
        assert (finder.engine_of("images"), finder.engine_of("captions")) == ("faiss-hnsw", "exact")
    with open_finder(path, engine="exact") as finder:
        assert finder.engine_of("images") == "exact"


def test_an_unknown_engine_or_no_index(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="engine must be one of"), open_finder(path, engine="fast"):
        pass
    with (
        pytest.raises(ValueError, match="does not exist: make it with hnclip index"),
        open_finder(tmp_path / "none.hnc"),
    ):
        pass
