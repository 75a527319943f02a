"""What a gallery asks of an engine, and what it makes of any answer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from engine_helpers import add, clusters, remove, truth, writing

from hnclip.search.engines import Candidates, gallery
from hnclip.search.engines.gallery import Gallery
from hnclip.search.engines.made import read_made
from hnclip.search.engines.open import make_engine
from hnclip.search.index.reader import Index
from hnclip.search.index.vectors import from_bf16, to_bf16

COUNT = 400


class Told(Candidates):
    """Proposes what it is told to, and remembers what it was asked for."""

    def __init__(self, rows: np.ndarray, covered: int = COUNT) -> None:
        self.rows, self.covered = rows, covered
        self.asked: list[tuple[int, int]] = []

    def propose(self, queries: np.ndarray, count: int) -> np.ndarray:
        self.asked.append((len(queries), count))
        rows = np.full((len(queries), count), -1, np.int64)
        some = self.rows[:count]
        rows[:, : len(some)] = some
        return rows


@pytest.fixture(scope="module")
def rows() -> np.ndarray:
    """As they are stored."""
    return from_bf16(to_bf16(clusters(COUNT, seed=4)))


@pytest.fixture(scope="module")
def path(rows: np.ndarray, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("index") / "photos.hnc"
    with writing(place) as writer:
        add(writer, rows)
        remove(writer, range(0, 300))
    return place


def whole_scans(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many queries are searched exactly, in all rows."""
    scanned: list[int] = []
    honest = gallery.exact_nearest

    def counted(vectors: object, queries: np.ndarray, k: int, *, first: int = 0, dead: object = None) -> object:
        scanned.extend([len(queries)] * (first == 0))
        return honest(vectors, queries, k, first=first, dead=dead)  # type: ignore[arg-type]

    monkeypatch.setattr(gallery, "exact_nearest", counted)
    return scanned


def test_what_is_proposed_is_ordered_and_no_more_is_looked_at(
    path: Path, rows: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that comes twice counts once; rows that are none, dead, or of a later version do not count."""
    scanned = whole_scans(monkeypatch)
    engine = Told(np.array([390, 310, 310, 5, 320, -1, 390, 330, 4000]))
    with Index(path) as index:
        (near,) = Gallery(index, "images", engine).nearest(rows[310:311], 4)
        order = truth(rows, rows[310], COUNT).tolist()
        assert near.rows.tolist() == sorted([390, 310, 320, 330], key=order.index)
        assert engine.asked == [(1, 64)]
        assert scanned == []
        Gallery(index, "images", engine).nearest(rows[310:311], 20)
        assert engine.asked[1] == (1, 80)


def test_dead_rows_make_it_ask_for_more_and_then_look_at_all(
    path: Path, rows: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    scanned = whole_scans(monkeypatch)
    monkeypatch.setattr(gallery, "FURTHER", 3)
    with Index(path) as index:
        later = Told(np.r_[0:100, 300:320])  # living ones come behind
        found = Gallery(index, "images", later).nearest(rows[300:303], 5)
        assert later.asked == [(3, 64), (3, 192)]
        assert all(set(near.rows) <= set(range(300, 320)) for near in found)
        assert scanned == []
        none = Told(np.arange(300))
        (near, _) = Gallery(index, "images", none).nearest(rows[300:302], 5)
        assert none.asked == [(2, 64), (2, 192)]
        assert scanned == [2]
        assert near.rows.tolist() == truth(rows, rows[300], 5, range(300)).tolist()


def test_an_engine_of_dead_rows_alone_is_not_asked(path: Path, rows: np.ndarray) -> None:
    with Index(path) as index:
        dead, nothing = Told(np.arange(300), covered=300), Told(np.zeros(0, np.int64), covered=0)
        for engine in (dead, nothing):
            (near,) = Gallery(index, "images", engine).nearest(rows[310:311], 6)
            assert near.rows.tolist() == truth(rows, rows[310], 6, range(300)).tolist()
            assert engine.asked == []
        mostly = Told(np.arange(302), covered=302)
        Gallery(index, "images", mostly).nearest(rows[310:311], 40)
        assert mostly.asked == [(1, 64), (1, 302)]  # two rows live, so many are wanted


def test_nothing_to_find(path: Path, rows: np.ndarray) -> None:
    with Index(path) as index:
        assert len(Gallery(index, "captions")) == 0
        assert [len(near.rows) for near in Gallery(index, "captions").nearest(rows[:2], 3)] == [0, 0]
        assert Gallery(index, "images").nearest(rows[:1], 0)[0].scores.dtype == np.float32


def test_so_many_rows_are_enough_for_an_engine(
    rows: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("hnclip.search.engines.open.FEW", 120)
    caplog.set_level("INFO", logger="hnclip")
    with writing(tmp_path / "photos.hnc", "faiss-ivf") as writer:
        for count, made in ((119, False), (1, True)):
            add(writer, rows[:count])
            make_engine(writer, "faiss-ivf", None)
            assert (read_made(writer, "images", "faiss-ivf") is not None) is made
    assert caplog.messages[0].startswith("119 images are few enough to be scanned")
