"""The server: results of the newest state of the index, access, what is served and accepted, errors."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx2
import pytest
from PIL import Image
from serve_helpers import PATIENCE, PNG, ask, live, scene_index, scenes, served, until
from starlette.testclient import TestClient
from store_helpers import continue_index

from hnclip.core import Problem
from hnclip.search.searcher import Searcher, open_index
from hnclip.search.serve import service
from hnclip.search.serve.run import Settings, is_local, listen, own_names

TEXT = scenes()[3].captions[0]
TOKEN = "räuber hotzenplotz"


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return scene_index(tmp_path_factory.mktemp("serve"))


@pytest.fixture(scope="module")
def client(index: Path) -> Iterator[TestClient]:
    with served(index, max_upload=100_000, max_pixels=1_000_000) as found:
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
        writer.finish((), {broken.where: (broken, "a stamp")})
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


def test_an_update_of_the_index_is_served_without_a_failed_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opened, closed, reopen, close = list[Searcher](), list[Searcher](), Searcher.reopen, Searcher.close

    def note_opened(searcher: Searcher) -> Searcher:
        opened.append(reopen(searcher))
        return opened[-1]

    def note_closed(searcher: Searcher) -> None:
        closed.append(searcher)
        close(searcher)

    monkeypatch.setattr(service, "INTERVAL", 0.02)
    monkeypatch.setattr(Searcher, "reopen", note_opened)
    monkeypatch.setattr(Searcher, "close", note_closed)
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
            scene_index(tmp_path, 8)
            until(lambda: len(search()[1]["hits"]) == 8)
        finally:
            stop.set()
        assert [one.result(PATIENCE) for one in searching] == [{200}] * 4
    assert len(caplog.messages) == 1  # once, not at each attempt
    assert closed[1:] == opened  # each once, and the first one


def test_requests_beyond_the_queue_and_late_ones_are_refused(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free, query, search = threading.Event(), {"json": {"text": TEXT}}, Searcher.search

    def held(*given: Any, **named: Any) -> Any:
        assert free.wait(PATIENCE)
        return search(*given, **named)

    monkeypatch.setattr(Searcher, "search", held)
    with served(index, timeout=0.1) as client:
        assert client.post("/api/search", **query).status_code == 504
        free.set()
    free.clear()
    with served(index, waiting=1, timeout=PATIENCE) as client, ThreadPoolExecutor(4) as pool:
        accepted = [pool.submit(client.post, "/api/search", **query) for _ in range(4)]  # one more than there is room
        until(lambda: any(one.done() for one in accepted))
        assert client.get("/api/index").status_code == 200
        assert [one.result().status_code for one in accepted if one.done()] == [503]
        free.set()
        assert sorted(one.result(PATIENCE).status_code for one in accepted) == [200, 200, 200, 503]


def test_text_is_searched_without_a_model(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Searcher, "load_model", Mock(side_effect=ValueError("no such model")))
    with served(index) as client:
        for path, more, status in (("search", {}, 200), ("search", {"rerank": True}, 422), ("explain", {"id": 1}, 422)):
            assert client.post(f"/api/{path}", json={"text": TEXT, **more}).status_code == status


def test_invalid_settings_are_refused() -> None:
    for wrong in ({"port": 70000}, {"timeout": 0.0}, {"max_k": 0}, {"host": " "}, {"threads": -1}):
        with pytest.raises(ValueError, match=f"--{next(iter(wrong)).replace('_', '-')}"):
            Settings(**wrong)  # type: ignore[arg-type]


def test_the_command_serves_until_a_signal(index: Path) -> None:
    environment = {**os.environ, "HNCLIP_TOKEN": "secret"}
    command = [sys.executable, "-m", "hnclip", "serve", str(index), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            found = re.search(r"http://127\.0\.0\.1:(\d+)/", process.stderr.readline())  # type: ignore[union-attr]
            assert found
            assert ask(int(found[1]), "/api/index")[0] == 401
            assert len(ask(int(found[1]), "/api/search", {"text": TEXT}, token="secret")[1]["hits"]) == 16
            process.send_signal(signal.SIGINT)
            assert "Traceback" not in process.communicate(timeout=PATIENCE)[1]
            assert process.returncode == 0
        finally:
            process.kill()


@pytest.fixture
def locked(index: Path) -> Iterator[TestClient]:
    with served(index, token=TOKEN) as found:
        yield found


def test_without_the_token_only_the_page_is_served(locked: TestClient) -> None:
    for path in ("/", "/healthz", "/openapi.json", "/page/page.css", "/page/app.js"):
        assert locked.get(path).status_code == 200, path
    for path in ("/api/index", "/api/problems", "/api/images/1", "/api/images/1/thumbnail"):
        assert locked.get(path).status_code == 401, path
    for path in ("search", "explain", "separate", "search/image"):
        assert locked.post(f"/api/{path}", json={"text": "a tent"}).status_code == 401


def test_only_the_whole_token_and_its_cookie_are_accepted(locked: TestClient) -> None:
    def status(name: str, value: bytes) -> int:
        return locked.get("/api/index", headers={name.encode(): value}).status_code

    token = TOKEN.encode()
    assert status("authorization", b"bearer   " + token) == 200
    for wrong in (b"", b"Bearer", b"Bearer " + token[:-1], b"Bearer " + token + b"x", b"Basic " + token, token):
        assert status("authorization", wrong) == 401, wrong
    for bad in ("", TOKEN[:-1], f"{TOKEN} "):
        assert locked.post("/api/session", json={"token": bad}).status_code == 401
    cookie = locked.post("/api/session", json={"token": TOKEN}).headers["set-cookie"]
    assert {" HttpOnly", " SameSite=strict", " Path=/"} <= set(cookie.split(";"))
    assert "hotzenplotz" not in cookie
    locked.cookies.clear()
    name, _, value = (own := cookie.partition(";")[0]).partition("=")
    for cookies in (f"{name}={value[:-1]}", f"{name}=", f"other={value}", f"{name}=ä"):
        assert status("cookie", cookies.encode()) == 401, cookies
    assert status("cookie", f'prefs={{"a":1}}; _x="unterminated; {own}'.encode()) == 200  # others of this machine


def test_other_host_names_are_refused(client: TestClient) -> None:
    for host in ("localhost:1", "127.0.0.1:8765", "[::1]:8765", "LOCALHOST:8765", "192.168.0.7:80"):
        assert client.get("/healthz", headers={"host": host}).status_code == 200, host
    for host in ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example:8765", "", "[::1", "1.2.3"):
        assert client.get("/healthz", headers={"host": host}).status_code == 421, host
    with listen("127.0.0.1", 0) as local, listen("0.0.0.0", 0) as public:
        assert (is_local(local), is_local(public)) == (True, False)
        assert own_names("127.0.0.1", local, "secret") == ("localhost", "127.0.0.1")
        assert own_names("0.0.0.0", public, None) is not None


def test_paths_do_not_leave_the_page_and_the_api(client: TestClient) -> None:
    for path in (
        *("/page/../run.py", "/page/..%2frun.py", "/page//etc/passwd", "/page/", "/%ff%fe", "/page/page.css%00.py"),
        *("/api/images/..%2f..%2fetc%2fpasswd", "/api/images/1/../../../etc/passwd"),
    ):
        assert client.get(path).status_code in (404, 422), path


def test_only_bytes_that_were_indexed_are_served(tmp_path: Path) -> None:
    path, secret = scene_index(tmp_path, 6), tmp_path / "secret.txt"
    secret.write_text("a secret")
    files = sorted((tmp_path / "images").iterdir())
    contents = [file.read_bytes() for file in files]
    moved = files[5].rename(tmp_path / "moved.png")
    for file in files[:5]:
        file.unlink()
    with served(path) as client:
        files[0].symlink_to(secret)
        files[1].write_bytes(contents[2])  # another image, even one of the index
        files[3].symlink_to("/dev/zero")  # has no end
        os.mkfifo(files[4])  # never begins
        files[5].symlink_to(moved)
        for number in range(1, 6):
            response = client.get(f"/api/images/{number}")
            assert (response.status_code, str(tmp_path) in response.text) == (410, False), number
            assert client.get(f"/api/images/{number}/thumbnail").status_code == 200
        assert client.get("/api/images/6").content == contents[5]  # a link to what was indexed


def encoded(kind: str, size: tuple[int, int] = (48, 48), **options: object) -> bytes:
    content = io.BytesIO()
    scenes()[0].image.load().resize(size).save(content, kind, **options)
    return content.getvalue()


def png_of(width: int, height: int) -> bytes:
    """A PNG whose header declares so many pixels."""
    content = encoded("PNG")
    header = b"IHDR" + struct.pack(">II", width, height) + content[24:29]
    return content[:12] + header + struct.pack(">I", zlib.crc32(header)) + content[33:]


def jpeg_of(scans: int) -> bytes:
    plain = encoded("JPEG", progressive=True)
    start = plain.rindex(b"\xff\xda")
    return plain[:-2] + plain[start:-2] * (scans - plain.count(b"\xff\xda")) + plain[-2:]


JSON, UPLOAD = ("search", "application/json"), ("search/image", "image/png")
LONG, TENT = b'{"text": "' + b"x" * 300_000 + b'"}', b'{"text": "a tent"}'


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(
    ("path", "content", "status", "word"),
    [
        (UPLOAD, jpeg_of(100), 200, ""),
        (UPLOAD, jpeg_of(101), 422, "scans"),
        (UPLOAD, encoded("TIFF", compression="jpeg"), 422, "TIFF"),
        (UPLOAD, b"P3\n1 1\n255\n0 1 2\n", 422, "PPM"),
        *((UPLOAD, png_of(*size), 413, "pixels") for size in ((1001, 1000), (60_000, 60_000))),
        (UPLOAD, encoded("PNG", (900_000, 1)), 422, "thin"),
        (UPLOAD, png_of(100, 100), 422, "damaged"),
        (UPLOAD, b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n", 422, "format"),  # Ghostscript
        (UPLOAD, b"x" * 100_001, 413, "bytes"),
        (UPLOAD, [b"x" * 10_000] * 11, 413, "bytes"),  # without a length
        (JSON, [LONG], 413, "bytes"),
        *((("search", kind), TENT, 415, "json") for kind in ("text/plain", "", "multipart/form-data; boundary=x")),
        *((("search/image", kind), encoded("PNG"), 415, "image") for kind in ("", "application/json", "imagex/png")),
        *((JSON, body, 422, "") for body in (b"", b"{", b"null", b'{"text": "a", "\\ud800": 1}')),
        (JSON, b'{"text": "?!"}', 422, "words"),
        (JSON, b'{"text": "' + b"x" * 20_001 + b'"}', 422, "20,000"),
        (JSON, b'{"text": "a", "k": 201}', 422, "200"),
        (("explain", JSON[1]), b'{"text": "a", "id": 99}', 404, "image"),
        (JSON, b'{"text": "a", "' + b"n" * 10_000 + b'": 1}', 422, ""),
    ],
)
def test_bodies_are_limited_and_validated(
    path: tuple[str, str], content: Any, status: int, word: str, client: TestClient
) -> None:
    given = iter(content) if isinstance(content, list) else content
    response = client.post(f"/api/{path[0]}", content=given, headers={"Content-Type": path[1]})
    assert response.status_code == status, response.text
    if status != 200:
        (message,) = response.json().values()
        assert word in message
        assert len(message) <= 500


@pytest.mark.parametrize("path", ["search", "search/image"])
def test_bodies_that_do_not_arrive_are_refused(index: Path, path: str) -> None:
    with live(index, timeout=0.2) as server, socket.create_connection(("127.0.0.1", server.port)) as client:
        client.settimeout(PATIENCE)
        head = f"POST /api/{path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\nContent-Length: 9\r\n\r\nP"
        client.sendall(head.encode())
        assert client.recv(1000).startswith(b"HTTP/1.1 408")


def test_every_response_has_the_security_headers(index: Path) -> None:
    with live(index) as server, httpx2.Client(base_url=server.address) as client:
        for response in (
            *(client.get(path) for path in ("/", "/nothing", "/api/index", "/api/images/1", "/page/app.js")),
            client.post("/api/search"),
            client.get("/healthz", headers={"host": "evil.example"}),
        ):
            assert "default-src 'none'" in response.headers["content-security-policy"]
            assert "unsafe" not in response.headers["content-security-policy"]
            assert response.headers["x-content-type-options"] == "nosniff"
            assert response.headers["cache-control"] == "private, no-cache"
            assert "access-control-allow-origin" not in response.headers


def test_internal_errors_are_logged_and_not_shown_to_clients(
    client: TestClient, index: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    error = ValueError(f"{index} is damaged")
    monkeypatch.setattr(Searcher, "search", Mock(side_effect=error))
    response = client.post("/api/search", json={"text": "a tent"})
    assert (response.status_code, str(error) in response.text, str(error) in caplog.text) == (500, False, True)
    assert response.headers["connection"] == "close"
