"""Files of Faiss: what is in them, when they are added to and when they are made anew, and what breaks them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
from engine_helpers import WIDTH, add, clusters, gallery, writing

from hnclip.search.engines import faiss_engine
from hnclip.search.engines.faiss_engine import open_faiss
from hnclip.search.engines.made import Made, made_file, read_made, row_blocks
from hnclip.search.engines.open import make_engine, open_candidates
from hnclip.search.index.reader import Index
from hnclip.search.index.vectors import StoredVectors, row_files
from hnclip.search.index.writer import IndexWriter

ENGINES = ["faiss-ivf", "faiss-hnsw"]


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hnclip.search.engines.open.FEW", 100)


def known(writer: IndexWriter, engine: str) -> Made:
    found = read_made(writer, "images", engine)
    assert found is not None
    return found


def engine_files(writer: IndexWriter) -> set[str]:
    return {file.name for file in (writer.directory / "engines").iterdir()}


@pytest.mark.parametrize("engine", ENGINES)
def test_rows_are_added_until_there_are_twice_as_many(engine: str, tmp_path: Path) -> None:
    rows = clusters(500)
    with writing(tmp_path / "photos.hnc", engine) as writer:
        add(writer, rows[:200])
        make_engine(writer, engine)
        first = known(writer, engine)
        assert (first.rows, first.trained, first.width, first.generation) == (200, 200, WIDTH, 1)
        assert first.details["parameters"] == {"faiss-ivf": "IVF5,SQ8", "faiss-hnsw": "HNSW32_SQ8"}[engine]
        assert first.details["faiss"] == faiss.__version__
        before = (writer.directory / "engines" / first.details["file"]).read_bytes()
        make_engine(writer, engine)
        assert known(writer, engine) == first  # nothing to do
        add(writer, rows[200:400])
        make_engine(writer, engine)
        added = known(writer, engine)
        assert (added.rows, added.trained) == (400, 200)
        assert engine_files(writer) == {f"images.{engine}.json", added.details["file"]}
        add(writer, rows[400:401])
        make_engine(writer, engine)
        assert (known(writer, engine).rows, known(writer, engine).trained) == (401, 401)
        opened = faiss.read_index(str(writer.directory / "engines" / known(writer, engine).details["file"]))
        assert (opened.ntotal, opened.metric_type) == (401, faiss.METRIC_INNER_PRODUCT)
    assert len(before) == first.details["bytes"]


def test_lists_grow_with_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four times the root of the rows, but enough rows for each; they are learned from a sample."""
    learned: list[np.ndarray] = []

    class Learner:
        def __init__(self, name: str) -> None:
            self.name, self.cp, self.hnsw = name, self, self

        def train(self, rows: np.ndarray) -> None:
            learned.append(rows)

    class Many:
        """Rows that are their own numbers."""

        def __init__(self, count: int) -> None:
            self.shape = (count, 2)

        def rows(self, chosen: np.ndarray) -> np.ndarray:
            return chosen

    class Faiss:
        METRIC_INNER_PRODUCT = 0

        def index_factory(self, width: int, name: str, metric: int) -> Learner:
            return Learner(name)

    for count, lists, size in ((1_000, 25, 1_000), (90_000, 1_200, 76_800), (1_000_000, 4_000, 256_000)):
        index, name = faiss_engine._learned(Faiss(), Many(count), "faiss-ivf")  # type: ignore[arg-type]
        assert (index.name, name) == (f"IVF{lists},SQ8",) * 2
        assert len(learned[-1]) == len(set(learned[-1])) == size
        assert learned[-1][0] == 0
        assert learned[-1][-1] >= count - count // size - 1  # from everywhere
    assert faiss_engine._learned(Faiss(), Many(10**9), "faiss-ivf")[1] == "IVF65536,SQ8"  # type: ignore[arg-type]
    assert len(learned[-1]) == 500_000


@pytest.mark.parametrize("engine", ENGINES)
def test_a_file_is_mapped_and_outlives_its_name(engine: str, tmp_path: Path) -> None:
    """What is looked at is read, no more; and a reader goes on with what it has opened."""
    path, rows = tmp_path / "photos.hnc", clusters(300)
    with writing(path, engine) as writer:
        add(writer, rows)
        make_engine(writer, engine)
        file = writer.directory / "engines" / known(writer, engine).details["file"]
    with gallery(path, engine) as some:
        assert str(file) in Path("/proc/self/maps").read_text()
        before = some.nearest(rows[:20], 5)
        shutil.rmtree(file.parent)
        for old, new in zip(before, some.nearest(rows[:20], 5)):
            assert old.rows.tolist() == new.rows.tolist()
    del some
    assert str(file) not in Path("/proc/self/maps").read_text()


def damage(file: Path, what: str) -> None:
    if what == "cut":
        file.write_bytes(file.read_bytes()[:-50])
    elif what == "gone":
        file.unlink()
    else:
        file.write_bytes(b"x" * file.stat().st_size)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("cut", "is cut short: remove it, and "),
        ("gone", "is missing: "),
        ("other", r"cannot be read \((.|\n)*\): remove it, and "),
    ],
)
def test_a_damaged_file_is_said_and_made_anew(what: str, said: str, tmp_path: Path) -> None:
    path, engine = tmp_path / "photos.hnc", "faiss-hnsw"
    with writing(path, engine) as writer:
        add(writer, clusters(150))
        make_engine(writer, engine)
        name = known(writer, engine).details["file"]
        damage(writer.directory / "engines" / name, what)
        again = f"make it with\n  hnclip index 'made up' --out {path} --model none --engine faiss-hnsw"
        with Index(path) as index, pytest.raises(ValueError, match=rf"engines/{name} of .* {said}{again}$"):
            open_candidates(index, "images", engine)
        make_engine(writer, engine)
        assert known(writer, engine).details["file"] != name
    with gallery(path, engine) as some:
        assert some.candidates is not None


@pytest.mark.parametrize(
    "change",
    [
        *({"generation": 2}, {"width": 7}, {"kind": "captions"}, {"engine": "x"}, {"rows": 149}),
        *({"details": {}}, {"details": {"file": "x"}}, {"details": "file, bytes"}),
    ],
)
def test_what_was_made_of_other_rows_is_not_used(change: dict[str, Any], tmp_path: Path) -> None:
    path, engine = tmp_path / "photos.hnc", "faiss-ivf"
    with writing(path, engine) as writer:
        add(writer, clusters(150))
        make_engine(writer, engine)
        file = made_file(writer, "images", engine)
        file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
        with Index(path) as index:
            if "rows" in change:
                with pytest.raises(ValueError, match="it holds 150 rows, not 149"):
                    open_faiss(index, "images", engine)
            else:
                assert open_faiss(index, "images", engine) is None
        make_engine(writer, engine)
        assert known(writer, engine).rows == 150
    with gallery(path, engine) as some:
        assert some.candidates is not None
        assert some.candidates.covered == 150


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"engine": "faiss-ivf"}'])
def test_a_sidecar_that_is_none_counts_as_missing(text: str, tmp_path: Path) -> None:
    with writing(tmp_path / "photos.hnc", "faiss-ivf") as writer:
        file = made_file(writer, "images", "faiss-ivf")
        file.parent.mkdir()
        file.write_text(text)
        assert read_made(writer, "images", "faiss-ivf") is None


def test_a_file_that_is_replaced_while_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader has read which file it is, and then the writer is done with the next one."""
    path, engine, rows = tmp_path / "photos.hnc", "faiss-ivf", clusters(250)
    with writing(path, engine) as writer:
        add(writer, rows[:200])
        make_engine(writer, engine)
        honest, calls = read_made, []

        def late(*arguments: Any) -> Made | None:
            found = honest(*arguments)
            calls.append(found)
            if len(calls) == 1:
                add(writer, rows[200:])
                with pytest.MonkeyPatch.context() as undo:
                    undo.setattr(faiss_engine, "read_made", honest)
                    make_engine(writer, engine)
            return found

        monkeypatch.setattr(faiss_engine, "read_made", late)
        with gallery(path, engine) as some:  # of the version before
            assert some.candidates is not None
            assert (some.candidates.covered, len(some)) == (250, 200)
            assert all(near.rows.max() < 200 for near in some.nearest(rows[200:], 3))


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, engine = tmp_path / "photos.hnc", "faiss-ivf"
    with writing(path, engine) as writer:
        add(writer, clusters(150))
        make_engine(writer, engine)
        before = known(writer, engine)
        add(writer, clusters(20, seed=2))

        def full(index: Any, file: str) -> None:
            Path(file).write_bytes(b"half")
            raise RuntimeError("Error: write error")

        monkeypatch.setattr(faiss, "write_index", full)
        with pytest.raises(OSError, match="cannot be written, is the disk full"):
            make_engine(writer, engine)
        assert known(writer, engine) == before
        assert engine_files(writer) == {f"images.{engine}.json", before.details["file"]}
    with gallery(path, engine) as some:
        assert some.candidates is not None
        assert (some.candidates.covered, len(some)) == (150, 170)


def test_rows_come_in_blocks_and_progress_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rows = clusters(100)
    with writing(tmp_path / "photos.hnc") as writer:
        add(writer, rows)
        files = row_files(writer.directory, "images", WIDTH, "bf16")
        vectors = StoredVectors(files, 100, WIDTH, 0.0)
    monkeypatch.setattr("hnclip.util.console.INTERVAL", 0.0)
    caplog.set_level("INFO", logger="hnclip")
    blocks = list(row_blocks(vectors, 10, "it", size=4 * WIDTH * 40))
    assert [(start, len(block)) for start, block in blocks] == [(10, 40), (50, 40), (90, 10)]
    assert np.array_equal(np.concatenate([block for _, block in blocks]), vectors.rows(slice(10, 100)))
    assert [line.split(",")[0] for line in caplog.messages] == [f"it: {rows} of 100" for rows in (50, 90, 100)]
    assert list(row_blocks(vectors, 100, "it")) == []
