"""Milvus: URIs, who may have a file open, what is kept and what is dropped, and what its errors say."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from engine_helpers import WIDTH, add, clusters, gallery, unit, writing
from milvus_lite.server_manager import server_manager_instance
from pymilvus.exceptions import MilvusException

from hnclip.search.engines import milvus_engine
from hnclip.search.engines.made import made_file, read_made
from hnclip.search.engines.milvus_server import Connection, InUse, explained, plain_uri
from hnclip.search.engines.open import make_engine, open_candidates
from hnclip.search.index.compact import compact
from hnclip.search.index.reader import Index
from hnclip.search.index.writer import IndexWriter


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hnclip.search.engines.open.FEW", 100)


def apart(count: int) -> np.ndarray:
    """Vectors that are each their own nearest."""
    return unit(np.random.default_rng(0).standard_normal((count, WIDTH)))


def names(uri: str) -> set[str]:
    with Connection(uri) as connection:
        return set(connection.names())


def collection(writer: IndexWriter) -> str:
    made = read_made(writer, "images", "milvus")
    assert made is not None
    return made.details["collection"]


@contextmanager
def other_process(uri: str) -> Iterator[None]:
    """A process that has a file of Milvus open."""
    code = (
        "import sys, time; from hnclip.search.engines.milvus_server import Connection;"
        "Connection(sys.argv[1]); print('open', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code, uri], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        try:
            yield
        finally:
            process.kill()


def test_uris(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert plain_uri("some.db") == str(tmp_path / "some.db")
    for same in ("http://10.0.0.1:19530", "https://host.example/database", str(tmp_path / "x.db")):
        assert plain_uri(same) == same
    for wrong in ("some.milvus", "ftp://host/x.db", "http://", "localhost:19530", ""):
        with pytest.raises(ValueError, match=r"must be http://HOST:PORT, or a file whose name ends in \.db; got"):
            plain_uri(wrong)
    for secret in ("http://root:geheim@host:19530", "https://geheim@host:19530"):
        with pytest.raises(ValueError, match="HNCLIP_MILVUS_TOKEN") as raised:
            plain_uri(secret)
        assert "geheim" not in str(raised.value)


def test_a_file_has_one_process_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever writes meanwhile leaves Milvus as it is, and says so; whoever searches is told what else to do."""
    path, rows = tmp_path / "photos.hnc", apart(180)
    with writing(path, "milvus") as writer:
        add(writer, rows[:150])
        make_engine(writer, "milvus")
        add(writer, rows[150:])
        uri = str(writer.directory / "engines" / "milvus.db")
        with other_process(uri):  # this one has let go of it
            caplog.set_level("INFO", logger="hnclip")
            make_engine(writer, "milvus")
            assert caplog.messages[-1] == (
                "milvus of images is not brought up to date, new rows are scanned until it is: "
                f"{uri} is open in another process, and a file of Milvus can be open in one at a time: wait for it, or "
                "search with --engine exact, or use a server of Milvus"
            )
            with Index(path) as index, pytest.raises(InUse, match="search with --engine exact"):
                open_candidates(index, "images", "milvus")
            with gallery(path, "exact") as some:
                assert [near.rows[0] for near in some.nearest(rows[150:], 1)] == list(range(150, 180))
        with gallery(path, "milvus") as some, gallery(path, "milvus") as second:  # one process may have it twice
            assert some.candidates is not None
            assert some.candidates.covered == 150
            written: list[int] = []
            honest = Connection.write
            monkeypatch.setattr(
                Connection, "write", lambda self, name, rows: written.append(len(rows)) or honest(self, name, rows)
            )
            make_engine(writer, "milvus")  # and write it meanwhile
            assert written == [30]  # what is new
            assert second.nearest(rows[160:161], 1)[0].rows.tolist() == [160]
    assert sum("not brought up to date" in text for text in caplog.messages) == 1
    with gallery(path, "milvus") as some:
        assert some.candidates is not None
        assert some.candidates.covered == 180


def test_generations_that_are_gone_are_dropped(tmp_path: Path) -> None:
    """Who reads an old one goes on exactly; collections of others are left alone."""
    path, uri, rows = tmp_path / "photos.hnc", str(tmp_path / "all.db"), clusters(200)
    others = tmp_path / "other.hnc"
    with writing(others, "milvus") as writer:
        add(writer, clusters(120, seed=5))
        make_engine(writer, "milvus", uri)
        other = collection(writer)
    with writing(path, "milvus") as writer:
        add(writer, rows)
        make_engine(writer, "milvus", uri)
        old = collection(writer)
        with gallery(path, "milvus") as some, gallery(path, "exact") as exact:
            assert some.candidates is not None
            assert some.candidates.propose(rows[:2], 3)[:, 0].min() >= 0
            compact(writer)
            make_engine(writer, "milvus", uri)
            assert some.candidates.propose(rows[:2], 3).tolist() == [[-1] * 3] * 2
            for near, right in zip(some.nearest(rows[:9], 4), exact.nearest(rows[:9], 4)):
                assert near.rows.tolist() == right.rows.tolist()
        new = collection(writer)
        assert names(uri) == {other, new} != {other, old}
    assert json.loads((path / "milvus.json").read_text())["id"] in new


def test_a_copy_of_an_index_has_collections_of_its_own(tmp_path: Path) -> None:
    path, copy, uri = tmp_path / "photos.hnc", tmp_path / "copy.hnc", str(tmp_path / "all.db")
    with writing(path, "milvus") as writer:
        add(writer, clusters(120))
        make_engine(writer, "milvus", uri)
        first = collection(writer)
    shutil.copytree(path, copy)
    with gallery(copy, "milvus") as some:  # until it is changed the copy is the same
        assert some.candidates is not None
    with writing(copy, "milvus") as writer:
        add(writer, clusters(20, seed=3))
        make_engine(writer, "milvus", uri)
        assert collection(writer) != first
        make_engine(writer, "milvus", uri)
        assert names(uri) == {first, collection(writer)}


def test_a_half_filled_or_dropped_collection_is_filled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, rows = tmp_path / "photos.hnc", clusters(130)
    honest = milvus_engine.row_blocks

    def halves(*arguments: object, size: int) -> Iterator[tuple[int, np.ndarray]]:
        yield next(honest(*arguments, size=4 * 32 * 40))  # type: ignore[arg-type]
        raise KeyboardInterrupt

    with writing(path, "milvus") as writer:
        add(writer, rows)
        with monkeypatch.context() as broken:
            broken.setattr(milvus_engine, "row_blocks", halves)
            with pytest.raises(KeyboardInterrupt):
                make_engine(writer, "milvus")
        assert read_made(writer, "images", "milvus") is None
        with gallery(path, "milvus") as some:
            assert some.candidates is None  # searched exactly
        make_engine(writer, "milvus")
        uri = str(writer.directory / "engines" / "milvus.db")
        with Connection(uri) as connection:
            assert connection.keep(collection(writer)) == 130  # each row once
            connection.drop(collection(writer))
        with gallery(path, "milvus") as some:
            assert some.candidates is None
        with monkeypatch.context() as broken:
            broken.setattr(Connection, "keep", lambda self, name: 129)
            with pytest.raises(OSError, match=r"milvus\.db has 129 of 130 images: the same command goes on"):
                make_engine(writer, "milvus")
        make_engine(writer, "milvus")
    with gallery(path, "milvus") as some:
        assert some.candidates is not None
        assert sorted(some.candidates.propose(rows[:1], 130)[0].tolist()) == list(range(130))
        monkeypatch.setattr(milvus_engine, "MOST", 30)  # no more is asked for than Milvus gives
        proposed = some.candidates.propose(rows[:2], 40)
        assert ((proposed >= 0).sum(1) == 30).all()
        assert len(some.nearest(rows[:2], 50)[1].rows) == 50


def test_to_search_makes_no_file(tmp_path: Path) -> None:
    path, place = tmp_path / "photos.hnc", tmp_path / "milvus"
    with writing(path, "milvus") as writer:
        add(writer, clusters(110))
        make_engine(writer, "milvus", str(place / "some.db"))  # its directory is made
        assert (place / "some.db").exists()
        shutil.rmtree(place)
        with gallery(path, "milvus") as some:
            assert some.candidates is None  # searched exactly
        assert not place.exists()
        make_engine(writer, "milvus", str(place / "some.db"))
        file = made_file(writer, "images", "milvus")
        file.write_text(json.dumps({**json.loads(file.read_text()), "details": {"uri": None}}))
    with gallery(path, "milvus") as some:
        assert some.candidates is None


def test_a_server_that_goes_away(tmp_path: Path) -> None:
    path, uri, rows = tmp_path / "photos.hnc", str(tmp_path / "some.db"), apart(120)
    with writing(path, "milvus") as writer:
        add(writer, rows)
        make_engine(writer, "milvus", uri)
        with gallery(path, "milvus") as some:
            assert some.nearest(rows[:1], 1)[0].rows.tolist() == [0]
            server_manager_instance.release_server(uri)  # what serves the file, while it is used
            with pytest.raises(OSError, match=f"Milvus at {uri} cannot be used: "):
                some.nearest(rows[:1], 1)
        start = time.monotonic()
        with pytest.raises(OSError, match=r"Milvus at http://127\.0\.0\.1:1 cannot be used: .*server unavailable"):
            make_engine(writer, "milvus", "http://127.0.0.1:1")
        assert time.monotonic() - start < 15
    with gallery(path, "milvus") as some:  # nothing was lost by it
        assert some.candidates is not None


def test_a_file_that_is_none_of_milvus(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file.db").write_text("something else")
    with pytest.raises(OSError, match=r"Milvus at .*file.db cannot be used: .*File exists"):
        Connection(str(tmp_path / "file.db"))
    assert capfd.readouterr() == ("", "")  # no traceback in a log


def test_errors_name_the_uri_and_the_token() -> None:
    with (
        pytest.raises(OSError, match=r"Milvus at http://h:1 cannot be used: auth check failure.*\$HNCLIP_MILVUS_TOKEN"),
        explained("http://h:1"),
    ):
        raise MilvusException(message="auth check failure, please check api key is correct")


def test_the_token_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {}

    class Client:
        def __init__(self, **options: object) -> None:
            given.update(options)

        def close(self) -> None:
            given["closed"] = True

    monkeypatch.setattr("pymilvus.MilvusClient", Client)
    monkeypatch.setenv("HNCLIP_MILVUS_TOKEN", "root:geheim")
    with Connection("http://host:1"):
        assert (given["uri"], given["token"]) == ("http://host:1", "root:geheim")
    assert given["closed"]
