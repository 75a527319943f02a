"""One contract for all engines: exact search in both storages, Faiss, Milvus in a file and Milvus as a server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from engine_helpers import WIDTH, add, asked, clusters, gallery, milvus_server, recall, remove, truth, unit, writing

from hnclip.search.engines import gallery as gallery_module
from hnclip.search.engines.made import read_made
from hnclip.search.engines.open import make_engine, open_candidates
from hnclip.search.index.compact import compact
from hnclip.search.index.layout import Storage
from hnclip.search.index.reader import Index

COUNT = 1500


@dataclass(frozen=True)
class Way:
    """An engine as a test uses it."""

    engine: str
    storage: Storage = "bf16"
    uri: str | None = None


@pytest.fixture(scope="module")
def milvus_uri(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with milvus_server(tmp_path_factory.mktemp("server")) as (uri, _):
        yield uri


@pytest.fixture(scope="module", params=["exact-bf16", "exact-int8", "faiss-ivf", "faiss-hnsw", "milvus"])
def way(request: pytest.FixtureRequest) -> Way:
    name = request.param
    if name.startswith("exact"):
        return Way("exact", name.partition("-")[2])
    if name == "milvus-server":
        return Way("milvus", uri=request.getfixturevalue("milvus_uri"))
    return Way(name)


@pytest.fixture(scope="module")
def path(way: Way, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index of COUNT rows, of which some are dead, with its engine; only read."""
    place = tmp_path_factory.mktemp("index") / "photos.hnc"
    with writing(place, way.engine, way.storage) as writer:
        add(writer, clusters(COUNT))
        make_engine(writer, way.engine, way.uri)
        remove(writer, range(0, COUNT, 7))
    return place


DEAD = range(0, COUNT, 7)


@pytest.mark.parametrize("k", [1, 10, 300])
def test_results_are_those_of_the_stored_vectors(way: Way, path: Path, k: int) -> None:
    """Sorted, equal ones by row, none dead, none twice, and nearly all that there are; scores are exact search's."""
    k = min(k, 60) if way.engine == "milvus" else k  # to find many takes it long
    with gallery(path, way.engine) as some, gallery(path, "exact") as exact:
        stored = some.vectors.rows(slice(0, None))
        queries = asked(stored, 30)
        found, right = some.nearest(queries, k), exact.nearest(queries, k)
    scores = {(number, row): score for number, near in enumerate(right) for row, score in zip(near.rows, near.scores)}
    for number, near in enumerate(found):
        assert len(near.rows) == len(near.scores) == k
        assert len(set(near.rows)) == k
        assert not set(near.rows) & set(DEAD)
        order = sorted(zip(-near.scores, near.rows))
        assert near.rows.tolist() == [row for _, row in order]
        both = [(row, score) for row, score in zip(near.rows, near.scores) if (number, row) in scores]
        assert len(both) > 0.7 * k
        assert all(score == scores[number, row] for row, score in both)  # to the last bit
    assert recall(found, stored, queries, k, DEAD) >= (1 if way.engine == "exact" else 0.97)


def test_all_rows_and_more(way: Way, path: Path) -> None:
    with gallery(path, way.engine) as some:
        (near,) = some.nearest(asked(clusters(COUNT), 1), 10 * COUNT)
        assert len(near.rows) == len(some) == COUNT - len(DEAD)
        assert not set(near.rows) & set(DEAD)
        assert some.nearest(np.zeros((0, WIDTH), np.float32), 5) == []


def test_a_query_alone_and_among_others(way: Way, path: Path) -> None:
    with gallery(path, way.engine) as some:
        queries = asked(clusters(COUNT), 9, seed=2)
        for query, together in zip(queries, some.nearest(queries, 12)):
            (alone,) = some.nearest(query[None], 12)
            assert alone.rows.tolist() == together.rows.tolist()
            assert alone.scores.tobytes() == together.scores.tobytes()


def test_threads_share_a_gallery(way: Way, path: Path) -> None:
    queries = asked(clusters(COUNT), 12, seed=3)
    with gallery(path, way.engine) as some:
        expected = [near.rows.tolist() for near in some.nearest(queries, 5)]
        answers: list[tuple[int, list[int]]] = []

        def ask(number: int) -> None:
            for _ in range(3):
                answers.append((number, some.nearest(queries[number][None], 5)[0].rows.tolist()))

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(queries))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(answers) == 3 * len(queries)
    assert all(rows == expected[number] for number, rows in answers)


@pytest.mark.parametrize(
    "way", ["exact-bf16", "exact-int8", "faiss-ivf", "faiss-hnsw", "milvus", "milvus-server"], indirect=True
)
def test_an_index_lives_on(
    way: Way, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows that come later are found before and after the engine learns of them; dead ones never, whatever happens."""
    monkeypatch.setattr("hnclip.search.engines.open.FEW", 100)
    place, rows = tmp_path / "photos.hnc", clusters(600, seed=7)
    caplog.set_level("INFO", logger="hnclip")

    step = 25 if way.engine == "milvus" else 5  # each query takes it long

    def check(dead: list[int], covered: int) -> None:
        with gallery(place, way.engine) as some:
            assert (some.candidates.covered if some.candidates is not None else 0) == covered
            stored = some.vectors.rows(slice(0, None))
            found = some.nearest(stored[::step], 3)  # every row is its own nearest, or one that is equal is
            for near, row in zip(found, range(0, len(stored), step)):
                assert not set(near.rows.tolist()) & set(dead)
                if row not in dead:
                    assert near.scores[0] >= stored[row] @ stored[row] - 1e-6
            assert recall(found, stored, stored[::step], 3, dead) > 0.97

    def covers(count: int) -> int:
        return 0 if way.engine == "exact" else count

    with writing(place, way.engine, way.storage) as writer:
        add(writer, rows[:60])
        make_engine(writer, way.engine, way.uri)  # of too few
        check([], 0)
        add(writer, rows[60:300])
        check([], 0)  # its engine is not made yet
        make_engine(writer, way.engine, way.uri)
        add(writer, rows[300:400])
        remove(writer, dead := [*range(5, 45), 310])
        check(dead, covers(300))
        make_engine(writer, way.engine, way.uri)
        make_engine(writer, way.engine, way.uri)  # nothing is left to do
        check(dead, covers(400))
        compact(writer)  # a generation in which every row has another number
        check([], 0)
        make_engine(writer, way.engine, way.uri)
        add(writer, rows[400:])
        check([], covers(400 - len(dead)))
    if way.engine == "exact":
        assert caplog.messages == []
    else:
        assert (
            caplog.messages[0] == f"60 images are few enough to be scanned: {way.engine} is not made of less than 100"
        )
        assert [line.split(" at ")[0] for line in caplog.messages[1:]] == [
            f"making {way.engine} of 300 images",
            f"making {way.engine} of 359 images",
        ]


@pytest.mark.parametrize("way", ["exact-bf16", "exact-int8", "faiss-ivf", "faiss-hnsw"], indirect=True)
def test_many_dead_rows_are_no_wall(way: Way, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that lies near the query is dead: the engine is asked for more, and then every row is looked at."""
    monkeypatch.setattr("hnclip.search.engines.open.FEW", 100)
    monkeypatch.setattr(gallery_module, "LEAST", 8)
    monkeypatch.setattr(gallery_module, "FURTHER", 2)
    place, rows = tmp_path / "photos.hnc", clusters(400, seed=8)
    query = unit(rows[:1] + 0.1)
    with writing(place, way.engine, way.storage) as writer:
        add(writer, rows)
        make_engine(writer, way.engine, way.uri)
        with gallery(place, way.engine) as some:
            near = truth(some.vectors.rows(slice(0, None)), query[0], 400)
        remove(writer, near[:8].tolist())  # all of the first answer, but not of the second
        with gallery(place, way.engine) as some:
            assert set(some.nearest(query, 2)[0].rows) <= set(near[8:12])
        remove(writer, near[8:100].tolist())
    with gallery(place, way.engine) as some:
        assert set(some.nearest(query, 2)[0].rows) <= set(near[100:104])


def test_captions_and_images_are_apart(way: Way, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hnclip.search.engines.open.FEW", 100)
    place, images, captions = tmp_path / "photos.hnc", clusters(150, seed=1), clusters(120, seed=2)
    with writing(place, way.engine, way.storage) as writer:
        add(writer, images, captions)
        make_engine(writer, way.engine, way.uri)
    with gallery(place, way.engine, "captions") as some, gallery(place, way.engine) as others:
        assert (some.candidates is None) == (others.candidates is None) == (way.engine == "exact")
        for where, own, far in ((some, captions, images), (others, images, captions)):
            assert min(float(near.scores[0]) for near in where.nearest(own[::10], 1)) > 0.99
            assert max(float(near.scores[0]) for near in where.nearest(far[::10], 1)) < 0.99


MAKER = """
import time
from pathlib import Path
import hnclip.search.engines.{module} as module
from hnclip.search.engines import open
from hnclip.search.index.opening import open_writer
open.FEW = 100
blocks = module.row_blocks

def slowly(vectors, first, *rest, size=0):
    for found in blocks(vectors, first, *rest, size=4 * 32 * 50):  # 50 rows at a time
        yield found
        print("a block", flush=True)
        if found[0] > first:
            time.sleep(600)

module.row_blocks = slowly
with open_writer(Path({path!r}), None) as writer:
    open.make_engine(writer, {engine!r})
"""


@pytest.mark.parametrize(("engine", "covered"), [("faiss-hnsw", 200), ("milvus", 200)])
def test_a_kill_while_the_engine_is_made(
    engine: str, covered: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was there before is searched as before, what was not is scanned, and the next run makes all of it."""
    monkeypatch.setattr("hnclip.search.engines.open.FEW", 100)
    place, rows = tmp_path / "photos.hnc", clusters(350, seed=9)
    with writing(place, engine) as writer:
        add(writer, rows[: covered or 350])
        if covered:
            make_engine(writer, engine)
            add(writer, rows[covered:])
    module = "milvus_engine" if engine == "milvus" else "faiss_engine"
    code = MAKER.format(module=module, path=str(place), engine=engine)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout is not None
        assert [maker.stdout.readline() for _ in range(2)] == ["a block\n"] * 2
        os.kill(maker.pid, signal.SIGKILL)

    def check(expected: int) -> None:
        with gallery(place, engine) as some, gallery(place, "exact") as exact:
            assert (some.candidates.covered if some.candidates is not None else 0) == expected
            found, right = some.nearest(rows[::9], 4), exact.nearest(rows[::9], 4)
            assert np.mean([len(set(a.rows) & set(b.rows)) / 4 for a, b in zip(found, right)]) > 0.97

    check(covered)
    with writing(place, engine) as writer:
        make_engine(writer, engine)
        assert read_made(writer, "images", engine).rows == 350  # type: ignore[union-attr]
    check(350)
    left = {file.name.split(".")[0] for file in next(place.glob("0*/engines")).iterdir()}
    assert left <= {"images", "milvus"}


def test_engines_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hnclip.search.engines.open.FEW", 100)
    place = tmp_path / "photos.hnc"
    with writing(place) as writer:
        add(writer, clusters(120), clusters(20))
        with pytest.raises(ValueError, match="engine must be one of exact, faiss-ivf, faiss-hnsw, milvus; got 'annoy'"):
            make_engine(writer, "annoy")
    with Index(place) as index:
        for engine in ("faiss-ivf", "faiss-hnsw", "milvus"):
            again = f"hnclip index 'made up' --out {place} --model none --engine {engine}"
            with pytest.raises(ValueError, match=f"has no {engine} yet: make it with\n  {again}"):
                open_candidates(index, "images", engine)
            assert open_candidates(index, "captions", engine) is None  # too few for any engine
        with pytest.raises(ValueError, match="got 'annoy'"):
            open_candidates(index, "images", "annoy")


@pytest.mark.parametrize(("engine", "package"), [("faiss-ivf", "faiss"), ("milvus", "pymilvus")])
def test_without_the_package(engine: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hnclip.search.engines.open.FEW", 100)
    monkeypatch.setitem(sys.modules, package, None)
    extra = {"faiss": "faiss", "pymilvus": "milvus"}[package]
    with writing(tmp_path / "photos.hnc") as writer:
        add(writer, clusters(120))
        with pytest.raises(ValueError, match=rf"needs \w+ \(.*\): pip install 'hnclip\[{extra}\]'"):
            make_engine(writer, engine)


def test_engines_are_opened_without_torch_and_only_when_needed() -> None:
    code = (
        "import sys; from hnclip.search.engines import faiss_engine, milvus_engine, open;"
        "print(sorted({'torch', 'faiss', 'pymilvus', 'milvus_lite', 'grpc'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
