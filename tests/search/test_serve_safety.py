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
from PIL import Image
from serve_helpers import PNG, scene_index, scenes, served
from small_index import small_index
from starlette.testclient import TestClient

from hnclip.core import Record
from hnclip.data.image_sources import FileImage
from hnclip.search.searcher import Searcher
from hnclip.search.serve import images
from hnclip.search.serve.run import checked_token, is_local, listen, own_names

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


def test_the_token_is_that_of_the_option_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HNCLIP_TOKEN", raising=False)
    assert checked_token(None) is None
    monkeypatch.setenv("HNCLIP_TOKEN", "of the environment")
    assert (checked_token(None), checked_token("own")) == ("of the environment", "own")
    for wrong in ("", " ", "a\nb", " a"):
        with pytest.raises(ValueError, match="token"):
            checked_token(wrong)


def test_other_host_names_are_refused(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    for host in ("localhost:1", "127.0.0.1:8765", "[::1]:8765", "LOCALHOST:8765", "192.168.0.7:80"):
        assert client.get("/healthz", headers={"host": host}).status_code == 200, host
    for host in ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example:8765", "", "[::1", "1.2.3"):
        assert client.get("/healthz", headers={"host": host}).status_code == 421, host
    monkeypatch.setattr("socket.gethostname", lambda: "Lab7.example.org")
    with listen("127.0.0.1", 0) as local, listen("0.0.0.0", 0) as public:
        assert (is_local(local), is_local(public)) == (True, False)
        assert own_names("127.0.0.1", local, "secret") == ("localhost", "127.0.0.1")
        assert own_names("0.0.0.0", public, "secret") is None  # clients without the token are refused anyway
        assert {"images.example", "lab7.local"} < set(own_names("Images.example", public, None) or ())


@pytest.mark.parametrize(
    "path",
    [
        *("/page/../run.py", "/page/..%2frun.py", "/page//etc/passwd", "/page/", "/%ff%fe", "/page/page.css%00.py"),
        *("/api/images/..%2f..%2fetc%2fpasswd", "/api/images/1/../../../etc/passwd"),
    ],
)
def test_paths_do_not_leave_the_page_and_the_api(path: str, client: TestClient) -> None:
    assert client.get(path).status_code in (404, 422)


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


def test_formats_that_browsers_cannot_show_become_jpeg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    types = {"a.tif": "jpeg", "b.webp": "webp", "c.pcx": "jpeg"}
    records = []
    for name, scene in zip(types, scenes()):
        scene.image.load().save(tmp_path / name)
        records.append(Record(name, FileImage(tmp_path / name), ("a scene",), None))
    small_index(tmp_path / "park.hnc", [*records, scenes()[9]])  # the last one is no file
    with served(tmp_path / "park.hnc") as client:
        for number, kind in enumerate(types.values(), 1):
            response = client.get(f"/api/images/{number}")
            assert response.headers["content-type"] == f"image/{kind}"
            assert Image.open(io.BytesIO(response.content)).size == (192, 192)
        assert response.content == client.get("/api/images/3/thumbnail").content  # of a format that is not decoded
        assert [client.get(f"/api/images/4{part}").status_code for part in ("", "/thumbnail")] == [404, 200]
        monkeypatch.setattr(images, "MAX_FILE", 1000)
        assert client.get("/api/images/1").status_code == 410
    monkeypatch.undo()
    with served(tmp_path / "park.hnc", max_pixels=100) as client:
        assert client.get("/api/images/1").content == client.get("/api/images/1/thumbnail").content


def png_of(width: int, height: int) -> bytes:
    """A PNG of a few bytes whose header declares so many pixels."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")


def encoded(kind: str, size: tuple[int, int] = (48, 48), **options: object) -> bytes:
    content = io.BytesIO()
    scenes()[0].image.load().resize(size).save(content, kind, **options)
    return content.getvalue()


def jpeg_of(scans: int) -> bytes:
    plain = encoded("JPEG", progressive=True)
    start = plain.rindex(b"\xff\xda")
    return plain[:-2] + plain[start:-2] * (scans - plain.count(b"\xff\xda")) + plain[-2:]


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(
    ("content", "status", "word"),
    [
        (encoded("TIFF"), 200, ""),
        (jpeg_of(100), 200, ""),
        (jpeg_of(101), 422, "scans"),
        (encoded("TIFF", compression="jpeg"), 422, "TIFF"),
        (b"P3\n1 1\n255\n0 1 2\n", 422, "PPM"),
        *((png_of(*size), 413, "pixels") for size in ((1001, 1000), (60_000, 60_000))),
        (encoded("PNG", (900_000, 1)), 422, "thin"),
        (png_of(100, 100), 422, "damaged"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n", 422, "format"),  # starts Ghostscript
        (b"x" * 100_001, 413, "bytes"),
    ],
)
def test_uploads_beyond_the_limits_are_refused(content: bytes, status: int, word: str, client: TestClient) -> None:
    response = client.post("/api/search/image", content=content, headers=PNG)
    assert response.status_code == status, response.text
    assert status == 200 or (list(response.json()) == ["error"] and word in response.json()["error"])


LONG, TENT = b'{"text": "' + b"x" * 300_000 + b'"}', b'{"text": "a tent"}'


@pytest.mark.parametrize(
    ("path", "kind", "content", "status"),
    [
        ("search", "application/json", [LONG], 413),  # without a length
        ("search/image", "image/png", [b"x" * 10_000] * 11, 413),
        ("search", "Application/JSON; charset=utf-8", TENT, 200),
        *(("search", kind, TENT, 415) for kind in ("text/plain", "", "multipart/form-data; boundary=x")),
        *(("search/image", kind, encoded("PNG"), 415) for kind in ("", "application/json", "imagex/png")),
        *(("search", "application/json", body, 422) for body in (b"", b"{", b"null", b'{"text": "a", "\\ud800": 1}')),
        *(("search", "application/json", b'{"text": "a", "k": ' + k + b"}", 422) for k in (b"1e999", b"NaN")),
        ("search", "application/json", b'{"text": "a", "' + b"n" * 10_000 + b'": 1}', 422),
    ],
)
def test_bodies_are_limited_and_have_their_type(
    path: str, kind: str, content: Any, status: int, client: TestClient
) -> None:
    given = iter(content) if isinstance(content, list) else content
    response = client.post(f"/api/{path}", content=given, headers={"Content-Type": kind})
    assert (response.status_code, list(response.json()) == ["error"]) == (status, status != 200)
    assert status == 200 or len(response.json()["error"]) <= 500


def test_every_response_has_the_security_headers(client: TestClient) -> None:
    for response in (
        *(client.get(path) for path in ("/", "/nothing", "/api/index", "/api/images/1", "/page/app.js")),
        client.post("/api/search"),
        client.get("/healthz", headers={"host": "evil.example"}),
    ):
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["cross-origin-resource-policy"] == "same-origin"
        assert "access-control-allow-origin" not in response.headers
    assert client.get("/api/index").headers["cache-control"] == "no-store"
    assert client.get("/api/images/1").headers["cache-control"] == "private, no-cache"


def test_internal_errors_are_logged_and_not_shown_to_clients(
    client: TestClient, index: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for error in (RuntimeError("an inside"), ValueError(f"{index} is damaged")):
        monkeypatch.setattr(Searcher, "search", Mock(side_effect=error))
        response = client.post("/api/search", json={"text": "a tent"})
        assert (response.status_code, str(error) in response.text, str(error) in caplog.text) == (500, False, True)
