"""The Python API of search: what is found, by whom, and with which model."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from small_index import small_index

from hnclip.data.pictures import FileImage
from hnclip.data.records import Record
from hnclip.data.scenes import scene_records
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.load import load
from hnclip.search.find import open_finder

RECORDS = scene_records("park", "test", families=3)


@pytest.fixture(scope="module")
def model() -> DualEncoder:
    return load().eval()


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
    with pytest.raises((ValueError, OSError), match="moved"), open_finder(tmp_path / "a.hnc"):
        pass


def test_an_unknown_engine_or_no_index(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="engine must be one of"), open_finder(path, engine="fast"):
        pass
    with (
        pytest.raises(ValueError, match="does not exist: make it with hnclip index"),
        open_finder(tmp_path / "none.hnc"),
    ):
        pass
