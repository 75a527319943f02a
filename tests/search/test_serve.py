"""Responses of the server: the library's results, from the newest state of the index, and errors."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fastapi.openapi.models import OpenAPI
from PIL import Image
from serve_helpers import PATIENCE, PNG, ask, live, scene_index, scenes, served, until
from starlette.testclient import TestClient
from store_helpers import continue_index

from hnclip.core import Problem
from hnclip.search.database import KINDS
from hnclip.search.searcher import Searcher, open_index
from hnclip.search.serve import run, service
from hnclip.search.serve.run import Settings
from hnclip.search.writer import Change

TEXT = scenes()[3].captions[0]


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return scene_index(tmp_path_factory.mktemp("serve"))


@pytest.fixture(scope="module")
def client(index: Path) -> Iterator[TestClient]:
    with served(index) as found:
        yield found


def hits(client: TestClient) -> list[dict[str, Any]]:
    return client.post("/api/search", json={"text": TEXT}).json()["hits"]


def plain(found: Any) -> Any:
    """With lists for tuples, as in JSON, and without the time that it took."""
    if isinstance(found, dict):
        return {name: plain(value) for name, value in found.items() if name != "seconds"}
    return [plain(value) for value in found] if isinstance(found, (list, tuple)) else found


def test_responses_are_the_results_of_the_library(index: Path, client: TestClient) -> None:
    with open_index(index) as library:
        for asked in (
            {"text": TEXT},
            {"text": "word " * 400, "k": 3},
            {"text": TEXT, "k": 4, "find": "captions"},
            {"text": TEXT, "k": 6, "rerank": True},
        ):
            wanted = library.search(**{"k": 24, **asked})  # type: ignore[arg-type]
            assert wanted.groups  # scenes come in families
            assert plain(client.post("/api/search", json=asked).json()) == plain(wanted.to_dict(paths=False))
        file = sorted((index.parent / "images").iterdir())[5]
        for kind in KINDS:
            found = client.post(f"/api/search/image?k=3&find={kind}", content=file.read_bytes(), headers=PNG).json()
            with Image.open(file) as image:
                assert plain(found) == plain(library.search(image=image, k=3, find=kind).to_dict(paths=False))
        found = client.post("/api/explain", json={"text": TEXT, "id": 2}).json()
        assert found == plain(library.explain(TEXT, [2])[0].to_dict())
        found = client.post("/api/separate", json={"text": TEXT, "ids": [1, 2]}).json()
        assert found == plain(library.separate(TEXT, [1, 2]).to_dict())
        assert found["separators"]


def test_the_index_and_its_problems_are_described_without_paths_of_the_machine(tmp_path: Path) -> None:
    path = scene_index(tmp_path, 3)
    broken = Problem("corrupt image", "a/b.jpg", f"{tmp_path / 'images' / 'a' / 'b.jpg'} is empty")
    with continue_index(path) as writer:
        writer.commit(Change(problems=[(broken, "a stamp")]))
    with served(path, max_k=7) as client:
        info = client.get("/api/index").json()
        assert (info["name"], info["images"], info["captions"], info["problems"]) == ("park", 3, 3, 1)
        assert (info["engine"], info["limits"]["k"]) == ("exact", 7)
        problems = client.get("/api/problems").json()["problems"]
        assert problems == [{"kind": "corrupt image", "where": "a/b.jpg", "detail": "a/b.jpg is empty"}]
        assert client.get("/healthz").json() == {"status": "ok"}
        responses = [
            *(client.get(path) for path in ("/api/index", "/api/problems", "/api/images/9", "/openapi.json")),
            *(client.post("/api/search", json={"text": TEXT, "find": find}) for find in ("images", "captions")),
            client.post("/api/explain", json={"text": TEXT, "id": 1}),
            client.post("/api/separate", json={"text": TEXT, "ids": [1, 9]}),
            client.post("/api/search/image", content=b"none", headers=PNG),
        ]
    assert [response.status_code for response in responses] == [200, 200, 404, 200, 200, 200, 200, 404, 422]
    assert [response.url.path for response in responses if str(tmp_path) in response.text] == []


def test_an_image_that_the_client_has_is_not_read_again(tmp_path: Path) -> None:
    path = scene_index(tmp_path, 1)
    (file,) = (tmp_path / "images").iterdir()
    with served(path) as client:
        response = client.get("/api/images/1")
        assert (response.headers["content-type"], response.content) == ("image/png", file.read_bytes())
        small = client.get("/api/images/1/thumbnail")
        assert small.headers["content-type"] == "image/jpeg"
        file.unlink()
        for one in (response, small):
            known = {"If-None-Match": f'"other", W/{one.headers["etag"]}'}
            again = client.get(one.url.path, headers=known)
            assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", one.headers["etag"])
        assert client.get("/api/images/1").status_code == 410


@pytest.mark.parametrize(
    ("path", "asked", "status", "word"),
    [
        ("search", {"text": "?!"}, 422, "words"),
        ("explain", {"text": "", "id": 1}, 422, "words"),
        ("search", {"text": "a tent", "rerank": True, "find": "captions"}, 422, "re-ranking"),
        ("search", {"text": "x" * 20_001}, 422, "20,000"),
        ("search", {"text": "a tent", "k": 201}, 422, "200"),
        *(("search", {"text": "a tent", "k": k}, 422, "k:") for k in (0, "5", 5.5)),
        ("search", {}, 422, "text:"),
        ("search", {"text": "a tent", "limit": 3}, 422, "limit:"),
        ("search", [], 422, "body:"),
        ("explain", {"text": "a tent", "id": 10**6}, 404, "image"),
        ("explain", {"text": "a tent", "id": 2**53}, 422, "id:"),
        ("separate", {"text": "a tent", "ids": [1, 10**6]}, 404, "image"),
        ("separate", {"text": "a tent", "ids": [1]}, 422, "ids:"),
    ],
)
def test_invalid_requests_are_refused(path: str, asked: Any, status: int, word: str, client: TestClient) -> None:
    response = client.post(f"/api/{path}", json=asked)
    assert (response.status_code, list(response.json())) == (status, ["error"])
    assert word in response.json()["error"]


def test_the_schema_is_valid_and_has_every_route(client: TestClient, index: Path) -> None:
    found = client.get("/openapi.json").json()
    OpenAPI.model_validate(found)
    images = ("images/{id}", "images/{id}/thumbnail")
    names = ("session", "index", "problems", "search", "search/image", "explain", "separate", *images)
    assert found["paths"].keys() == {"/healthz", *(f"/api/{name}" for name in names)}
    with served(index, token="secret") as locked:
        paths = locked.get("/openapi.json").json()["paths"]
        assert ["security" in paths["/api/search"]["post"], "security" in paths["/healthz"]["get"]] == [True, False]


def test_an_update_of_the_index_is_served_without_a_failed_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "INTERVAL", 0.02)
    path, stop = scene_index(tmp_path, 3), threading.Event()
    with live(path) as server, ThreadPoolExecutor(4) as pool:

        def search(find: str = "images") -> tuple[int, Any]:
            return ask(server.port, "/api/search", {"text": TEXT, "find": find})

        searching = [
            pool.submit(lambda find=find: {search(find)[0] for _ in iter(stop.is_set, True)})
            for find in ("images", "captions") * 2
        ]
        try:
            for count in (5, 8, 12):
                scene_index(tmp_path, count)
                until(lambda count=count: len(search()[1]["hits"]) == count)
            first = search()[1]["hits"][0]
            with continue_index(path) as writer:
                writer.commit(Change(deleted=[first["name"]]))
            until(lambda: len(search()[1]["hits"]) == 11)
            assert ask(server.port, f"/api/images/{first['id']}/thumbnail")[0] == 404
        finally:
            stop.set()
        assert [one.result(PATIENCE) for one in searching] == [{200}] * 4


def test_a_state_that_cannot_be_opened_is_not_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(service, "INTERVAL", 0.05)
    path = scene_index(tmp_path, 4)
    with served(path) as client:
        shutil.move(path, tmp_path / "elsewhere")
        until(lambda: caplog.messages)
        assert len(hits(client)) == 4
        assert client.get("/api/images/1/thumbnail").status_code == 200
        shutil.move(tmp_path / "elsewhere", path)
        scene_index(tmp_path, 6)
        until(lambda: len(hits(client)) == 6)
    assert len(caplog.messages) == 1  # once, not at each attempt


def test_requests_beyond_the_queue_and_late_ones_are_refused(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free, query = threading.Event(), {"json": {"text": TEXT}}
    search = Searcher.search

    def held(*given: Any, **named: Any) -> Any:
        assert free.wait(PATIENCE)
        return search(*given, **named)

    monkeypatch.setattr(Searcher, "search", held)
    with served(index, waiting=1, timeout=PATIENCE) as client, ThreadPoolExecutor(4) as pool:
        accepted = [pool.submit(client.post, "/api/search", **query) for _ in range(4)]  # one more than there is room
        until(lambda: any(one.done() for one in accepted))
        assert client.get("/api/index").status_code == 200
        (refused,) = (one.result() for one in accepted if one.done())
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        free.set()
        assert sorted(one.result(PATIENCE).status_code for one in accepted) == [200, 200, 200, 503]
        assert client.post("/api/search", **query).status_code == 200
    free.clear()
    with served(index, timeout=0.1) as client:
        assert client.post("/api/search", **query).status_code == 504
        assert client.get("/healthz").status_code == 200
        free.set()


def test_only_what_needs_the_model_waits_for_it(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = threading.Event()

    def fail(searcher: Searcher) -> None:
        assert load.wait(PATIENCE)
        raise ValueError("no such model")

    monkeypatch.setattr(Searcher, "load_model", fail)
    needing, text = [("search", {"text": TEXT, "rerank": True}), ("explain", {"text": TEXT, "id": 1})], {"text": TEXT}
    with served(index, timeout=PATIENCE) as client:
        assert client.post("/api/search", json=text).status_code == 200
        load.set()
        for path, asked in needing:
            assert client.post(f"/api/{path}", json=asked).status_code == 422
        assert client.post("/api/search", json=text).status_code == 200
    load.clear()
    with served(index, timeout=0.1) as client:
        for path, asked in needing:
            response = client.post(f"/api/{path}", json=asked)
            assert (response.status_code, "retry-after" in response.headers) == (503, True)
        load.set()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_until_a_signal(number: int, index: Path) -> None:
    environment = {**os.environ, "HNCLIP_TOKEN": "secret"}
    command = [sys.executable, "-m", "hnclip", "serve", str(index), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            found = re.search(r"http://127\.0\.0\.1:(\d+)/", line)
            assert found, line
            assert ask(int(found[1]), "/api/index")[0] == 401
            assert len(ask(int(found[1]), "/api/search", {"text": TEXT}, token="secret")[1]["hits"]) == 16
            process.send_signal(number)
            assert "Traceback" not in process.communicate(timeout=PATIENCE)[1]
            assert process.returncode == 0
        finally:
            process.kill()


def test_wrong_options_are_refused_before_the_server_starts(index: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        run.serve(tmp_path / "none.hnc", Settings(port=0))
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="--port"):
        run.serve(index, Settings(port=taken.getsockname()[1]))
    with pytest.raises(ValueError, match="--host"):
        run.serve(index, Settings(host="no.such.host.invalid"))


@pytest.mark.parametrize(
    "wrong", [{"port": 70000}, {"waiting": 0}, {"timeout": 0.0}, {"max_k": 0}, {"threads": -1}, {"host": " "}]
)
def test_invalid_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"--{next(iter(wrong)).replace('_', '-')}"):
        Settings(**wrong)
