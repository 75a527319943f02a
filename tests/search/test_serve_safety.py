"""The server refuses clients without the token, other host names, bytes that were not indexed, and what exceeds its
limits."""

from __future__ import annotations

import io
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from serve_helpers import scene_index, scenes, served
from small_index import small_index
from starlette.testclient import TestClient

from hnclip.core import Record
from hnclip.data.image_sources import FileImage
from hnclip.search.searcher import Searcher
from hnclip.search.serve.run import is_local, listen, own_names

TOKEN = "räuber hotzenplotz"


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return scene_index(tmp_path_factory.mktemp("safety"), 4)


@pytest.fixture(scope="module")
def client(index: Path) -> Iterator[TestClient]:
    with served(index, max_upload=100_000, max_pixels=1_000_000) as found:
        yield found


@pytest.fixture
def locked(index: Path) -> Iterator[TestClient]:
    with served(index, token=TOKEN) as found:
        yield found


def test_without_the_token_only_the_page_is_served(locked: TestClient) -> None:
    for path in ("/", "/healthz", "/openapi.json", "/page/page.css", "/page/app.js"):
        assert locked.get(path).status_code == 200, path
    for path in ("/api/index", "/api/problems", "/api/images/1", "/api/images/1/thumbnail", "/nothing", "/api/search"):
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
    assert locked.get("/api/images/1/thumbnail").status_code == 200
    locked.cookies.clear()
    name, _, value = (own := cookie.partition(";")[0]).partition("=")
    for cookies in (f"{name}={value[:-1]}", f"{name}=", f"other={value}", f"{name}=ä"):
        assert status("cookie", cookies.encode()) == 401, cookies
    for other in ('prefs={"a":1}', '_x="unterminated', "x=ä"):  # of other servers on this machine
        assert status("cookie", f"{other}; {own}".encode()) == 200, other


def test_other_host_names_are_refused(client: TestClient) -> None:
    for host in ("localhost:1", "127.0.0.1:8765", "[::1]:8765", "LOCALHOST:8765", "192.168.0.7:80"):
        assert client.get("/healthz", headers={"host": host}).status_code == 200, host
    for host in ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example:8765", "", "[::1", "1.2.3"):
        assert client.get("/healthz", headers={"host": host}).status_code == 421, host
    with listen("127.0.0.1", 0) as local, listen("0.0.0.0", 0) as public:
        assert (is_local(local), is_local(public)) == (True, False)
        assert own_names("127.0.0.1", local, "secret") == ("localhost", "127.0.0.1")
        assert own_names("0.0.0.0", public, "secret") is None  # clients without the token are refused anyway
        assert "localhost" in (own_names("0.0.0.0", public, None) or ())


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


def test_formats_that_browsers_cannot_show_become_jpeg(tmp_path: Path) -> None:
    records = []
    for name, scene in zip(("a.tif", "b.webp", "c.pcx"), scenes()):
        scene.image.load().save(tmp_path / name)
        records.append(Record(name, FileImage(tmp_path / name), ("a scene",), None))
    small_index(tmp_path / "park.hnc", [*records, scenes()[9]])  # the last one is no file
    with served(tmp_path / "park.hnc") as client:
        jpeg, webp, small, missing = (client.get(f"/api/images/{number}") for number in range(1, 5))
        assert (jpeg.content[:2], webp.headers["content-type"]) == (b"\xff\xd8", "image/webp")
        assert small.content == client.get("/api/images/3/thumbnail").content  # such files are not decoded
        assert missing.status_code == 404


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
        (UPLOAD, encoded("TIFF"), 200, ""),
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
        *(
            (JSON, b'{"text": "a", ' + more + b": 1}", 422, "")
            for more in (b'"k": NaN, "b"', b'"' + b"n" * 10_000 + b'"')
        ),
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


def test_every_response_has_the_security_headers(client: TestClient) -> None:
    for response in (
        *(client.get(path) for path in ("/", "/nothing", "/api/index", "/api/images/1", "/page/app.js")),
        client.post("/api/search"),
        client.get("/healthz", headers={"host": "evil.example"}),
    ):
        assert "default-src 'none'" in response.headers["content-security-policy"]
        assert "unsafe" not in response.headers["content-security-policy"]
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["cache-control"] in ("no-store", "private, no-cache")
        assert "access-control-allow-origin" not in response.headers


def test_internal_errors_are_logged_and_not_shown_to_clients(
    client: TestClient, index: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for error in (RuntimeError("an inside"), ValueError(f"{index} is damaged")):
        monkeypatch.setattr(Searcher, "search", Mock(side_effect=error))
        response = client.post("/api/search", json={"text": "a tent"})
        assert (response.status_code, str(error) in response.text, str(error) in caplog.text) == (500, False, True)
