"""Responses of the server: the library's results, from the newest state of the index, and errors."""

from __future__ import annotations

import json
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
from PIL import Image
from serve_helpers import PATIENCE, PNG, ask, live, scene_index, scenes, served, until
from starlette.testclient import TestClient
from store_helpers import continue_index

from hnclip.core import Problem
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


def plain(found: dict[str, Any]) -> dict[str, Any]:
    """As in JSON, without the time that it took."""
    return json.loads(json.dumps({**found, "seconds": 0}))


def test_responses_are_the_results_of_the_library(index: Path, client: TestClient) -> None:
    file = sorted((index.parent / "images").iterdir())[5]

    def check(path: str, result: dict[str, Any], **body: Any) -> None:
        assert plain(client.post(f"/api/{path}", **body).json()) == plain(result)

    with open_index(index) as library, Image.open(file) as image:
        for asked in ({"k": 24}, {"k": 4, "find": "captions"}, {"k": 6, "rerank": True}):
            found = library.search(TEXT, **asked)  # type: ignore[arg-type]
            check("search", found.to_dict(paths=False), json={"text": TEXT, **asked})
        check("explain", library.explain(TEXT, [2])[0].to_dict(), json={"text": TEXT, "id": 2})
        check("separate", library.separate(TEXT, [1, 2]).to_dict(), json={"text": TEXT, "ids": [1, 2]})
        wanted = library.search(image=image, k=3, find="captions").to_dict(paths=False)
        check("search/image?k=3&find=captions", wanted, content=file.read_bytes(), headers=PNG)


def test_no_response_contains_paths_of_the_machine(tmp_path: Path) -> None:
    path = scene_index(tmp_path, 3)
    broken = Problem("corrupt image", "a/b.jpg", f"{tmp_path / 'images' / 'a' / 'b.jpg'} is empty")
    with continue_index(path) as writer:
        writer.commit(Change(problems=[(broken, "a stamp")]))
    with served(path, max_k=7) as client:
        info, problems, *others = (
            *(client.get(path) for path in ("/api/index", "/api/problems", "/api/images/9", "/openapi.json")),
            *(client.post("/api/search", json={"text": TEXT, "find": find}) for find in ("images", "captions")),
            client.post("/api/explain", json={"text": TEXT, "id": 1}),
            client.post("/api/separate", json={"text": TEXT, "ids": [1, 9]}),
            client.post("/api/search/image", content=b"none", headers=PNG),
        )
    assert {"name": "park", "images": 3, "captions": 3, "problems": 1, "engine": "exact"}.items() <= info.json().items()
    assert problems.json()["problems"] == [{"kind": "corrupt image", "where": "a/b.jpg", "detail": "a/b.jpg is empty"}]
    assert [response.status_code for response in others] == [404, 200, 200, 200, 200, 404, 422]
    assert not any(str(tmp_path) in response.text for response in (info, problems, *others))


def test_invalid_requests_are_refused(client: TestClient) -> None:
    for path, more, status, word in (
        ("search", {"text": "?!"}, 422, "words"),
        ("search", {"text": "x" * 20_001}, 422, "20,000"),
        ("search", {"k": 201}, 422, "200"),
        ("search", {"limit": 3}, 422, "limit:"),
        ("explain", {"id": 10**6}, 404, "image"),
        ("separate", {"ids": [1, 10**6]}, 404, "image"),
    ):
        response = client.post(f"/api/{path}", json={"text": "a tent", **more})
        assert (response.status_code, word in response.json()["error"]) == (status, True)


def test_an_update_of_the_index_is_served_without_a_failed_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
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
            scene_index(tmp_path, 5)
            until(lambda: len(search()[1]["hits"]) == 5)
            shutil.move(path, tmp_path / "elsewhere")  # the old state is served until there is a new one
            until(lambda: caplog.messages)
            assert len(search()[1]["hits"]) == 5
            shutil.move(tmp_path / "elsewhere", path)
            first = search()[1]["hits"][0]
            with continue_index(path) as writer:
                writer.commit(Change(deleted=[first["name"]]))
            until(lambda: len(search()[1]["hits"]) == 4)
            assert ask(server.port, f"/api/images/{first['id']}/thumbnail")[0] == 404
        finally:
            stop.set()
        assert [one.result(PATIENCE) for one in searching] == [{200}] * 4
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
    load, text = threading.Event(), {"text": TEXT}

    def fail(searcher: Searcher) -> None:
        assert load.wait(PATIENCE)
        raise ValueError("no such model")

    monkeypatch.setattr(Searcher, "load_model", fail)
    for timeout, status in ((0.1, 503), (PATIENCE, 422)):
        load.clear()
        with served(index, timeout=timeout) as client:
            if status == 422:
                assert client.post("/api/search", json=text).status_code == 200
                load.set()
            for path, asked in (("search", {**text, "rerank": True}), ("explain", {**text, "id": 1})):
                assert client.post(f"/api/{path}", json=asked).status_code == status
            load.set()


def test_the_command_serves_until_a_signal(index: Path) -> None:
    environment = {**os.environ, "HNCLIP_TOKEN": "secret"}
    command = [sys.executable, "-m", "hnclip", "serve", str(index), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            found = re.search(r"http://127\.0\.0\.1:(\d+)/", process.stderr.readline())  # type: ignore[union-attr]
            assert found
            assert ask(int(found[1]), "/api/index")[0] == 401
            assert len(ask(int(found[1]), "/api/search", {"text": TEXT}, token="secret")[1]["hits"]) == 16
            process.send_signal(signal.SIGTERM)
            assert "Traceback" not in process.communicate(timeout=PATIENCE)[1]
            assert process.returncode == 0
        finally:
            process.kill()


def test_wrong_options_are_refused_before_the_server_starts(index: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="--port"):
        run.serve(index, Settings(port=taken.getsockname()[1]))
    for wrong in ({"host": "no.such.host.invalid"}, {"port": 70000}, {"timeout": 0.0}, {"max_k": 0}):
        with pytest.raises(ValueError, match=f"--{next(iter(wrong)).replace('_', '-')}"):
            run.serve(index, Settings(**wrong))  # type: ignore[arg-type]
