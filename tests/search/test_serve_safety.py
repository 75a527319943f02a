"""The server refuses clients without the token, other host names, bytes that were not indexed, and what exceeds its
limits."""

from __future__ import annotations

import io
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image
from serve_helpers import PNG, scene_index, scenes, served
from small_index import small_index
from starlette.testclient import TestClient

from hnclip.core import Record
from hnclip.data.image_sources import FileImage
from hnclip.search.searcher import Searcher
from hnclip.search.serve import images
from hnclip.search.serve.run import checked_token, is_local, listen, own_names, url

TOKEN = "räuber hotzenplotz"
JSON = {"Content-Type": "application/json"}


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
        response = locked.get(path)
        assert (response.status_code, list(response.json())) == (401, ["error"]), path
        assert response.headers["www-authenticate"].startswith("Bearer")
    for path in ("search", "explain", "separate", "search/image"):
        assert locked.post(f"/api/{path}", json={"text": "a tent"}).status_code == 401


def test_only_the_whole_token_is_accepted(locked: TestClient) -> None:
    token = TOKEN.encode()
    for scheme in (b"Bearer ", b"bearer   "):
        assert locked.get("/api/index", headers={b"authorization": scheme + token}).status_code == 200
    for wrong in (b"", b"Bearer", b"Bearer " + token[:-1], b"Bearer " + token + b"x", b"Basic " + token, token):
        assert locked.get("/api/index", headers={b"authorization": wrong}).status_code == 401, wrong


def test_the_token_is_exchanged_for_a_cookie(locked: TestClient) -> None:
    for wrong in ("", TOKEN[:-1], f"{TOKEN} "):
        assert locked.post("/api/session", json={"token": wrong}).status_code == 401
    response = locked.post("/api/session", json={"token": TOKEN})
    assert (response.status_code, response.content) == (204, b"")
    cookie = response.headers["set-cookie"]
    assert all(part in cookie for part in ("; HttpOnly", "; SameSite=strict", "; Path=/"))
    assert "hotzenplotz" not in cookie
    assert locked.get("/api/images/1/thumbnail").status_code == 200
    locked.cookies.clear()
    own = cookie.partition(";")[0]
    name, _, value = own.partition("=")
    for wrong in (f"{name}={value[:-1]}", f"{name}=", f"other={value}", 'hnclip="', f"{name}=ä"):
        assert locked.get("/api/index", headers={b"cookie": wrong.encode()}).status_code == 401, wrong
    for other in ('prefs={"a":1}', "flag", '_x="unterminated', "x=ä"):  # of other servers on this machine
        assert locked.get("/api/index", headers={b"cookie": f"{other}; {own}".encode()}).status_code == 200, other


def test_the_token_is_that_of_the_option_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HNCLIP_TOKEN", raising=False)
    assert checked_token(None) is None
    monkeypatch.setenv("HNCLIP_TOKEN", "of the environment")
    assert (checked_token(None), checked_token("own")) == ("of the environment", "own")
    for wrong in ("", " ", "a\nb", " a"):
        with pytest.raises(ValueError, match="token"):
            checked_token(wrong)


def test_other_host_names_are_refused(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    for host in ("localhost", "localhost:1", "127.0.0.1:8765", "[::1]:8765", "LOCALHOST:8765", "192.168.0.7:80"):
        assert client.get("/healthz", headers={"host": host}).status_code == 200, host
    for host in ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example:8765", "", "[::1", "1.2.3"):
        response = client.get("/healthz", headers={"host": host})
        assert (response.status_code, list(response.json())) == (421, ["error"]), host
    monkeypatch.setattr("socket.gethostname", lambda: "Lab7.example.org")
    with listen("127.0.0.1", 0) as local, listen("0.0.0.0", 0) as public:
        assert (is_local(local), is_local(public)) == (True, False)
        assert url("::1", local) == f"http://[::1]:{local.getsockname()[1]}/"
        assert own_names("127.0.0.1", local, "secret") == ("localhost", "127.0.0.1")
        assert own_names("0.0.0.0", public, "secret") is None  # clients without the token are refused anyway
        assert {"images.example", "lab7.example.org", "lab7.local"} < set(
            own_names("Images.example", public, None) or ()
        )


@pytest.mark.parametrize(
    "path",
    [
        *("/page/../run.py", "/page/..%2frun.py", "/page/%2e%2e/run.py", "/page//etc/passwd", "/page/", "/%ff%fe"),
        *("/page/page.css%00.py", "/api/images/..%2f..%2fetc%2fpasswd", "/api/images/1/../../../etc/passwd", "/docs"),
    ],
)
def test_paths_do_not_leave_the_page_and_the_api(path: str, client: TestClient) -> None:
    response = client.get(path)
    assert (response.status_code in (404, 422), list(response.json())) == (True, ["error"])


def test_only_bytes_that_were_indexed_are_served(tmp_path: Path) -> None:
    path, secret = scene_index(tmp_path, 6), tmp_path / "secret.txt"
    secret.write_text("a secret")
    files = sorted((tmp_path / "images").iterdir())
    contents = [file.read_bytes() for file in files]
    with served(path) as client:
        files[0].unlink()
        files[0].symlink_to(secret)
        files[1].write_bytes(contents[2])  # another image, even one of the index
        files[2].unlink()
        files[3].unlink()
        files[3].symlink_to("/dev/zero")  # has no end
        files[4].unlink()
        os.mkfifo(files[4])  # never begins
        moved = files[5].rename(tmp_path / "moved.png")
        files[5].symlink_to(moved)
        for number in range(1, 6):
            response = client.get(f"/api/images/{number}")
            assert (response.status_code, list(response.json())) == (410, ["error"]), number
            assert str(tmp_path) not in response.text
            assert client.get(f"/api/images/{number}/thumbnail").status_code == 200
        assert client.get("/api/images/6").content == contents[5]  # a link to what was indexed
        assert client.post("/api/explain", json={"text": "a tent", "id": 1}).json()["approximate"] is True


def test_formats_that_browsers_cannot_show_become_jpeg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    types = {"a.tif": "jpeg", "b.ppm": "jpeg", "c.webp": "webp", "d.bmp": "bmp", "e.jpg": "jpeg", "f.pcx": "jpeg"}
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
        assert response.content == client.get("/api/images/6/thumbnail").content  # of a format that is not decoded
        assert [client.get(f"/api/images/7{part}").status_code for part in ("", "/thumbnail")] == [404, 200]
        monkeypatch.setattr(images, "MAX_FILE", 1000)
        assert client.get("/api/images/1").status_code == 410
    monkeypatch.undo()
    with served(tmp_path / "park.hnc", max_pixels=100) as client:
        assert client.get("/api/images/1").content == client.get("/api/images/1/thumbnail").content
        assert client.get("/api/images/3").headers["content-type"] == "image/webp"


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
        (encoded("PPM"), 200, ""),
        (jpeg_of(100), 200, ""),
        (jpeg_of(101), 422, "scans"),
        (encoded("TIFF", compression="jpeg"), 422, "TIFF"),
        (b"P3\n1 1\n255\n0 1 2\n", 422, "PPM"),
        *((png_of(*size), 413, "pixels") for size in ((1001, 1000), (2**31 - 1, 1), (60_000, 60_000))),
        (encoded("PNG", (900_000, 1)), 422, "thin"),
        (png_of(100, 100), 422, "damaged"),
        (encoded("PCX"), 422, "format"),  # Pillow would know it
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n", 422, "format"),  # starts Ghostscript
        (b"", 422, "format"),
        (b"x" * 100_001, 413, "bytes"),
    ],
)
def test_uploads_beyond_the_limits_are_refused(content: bytes, status: int, word: str, client: TestClient) -> None:
    response = client.post("/api/search/image", content=content, headers=PNG)
    assert response.status_code == status, response.text
    assert status == 200 or (list(response.json()) == ["error"] and word in response.json()["error"])


def test_a_body_without_a_length_has_the_same_limit(client: TestClient) -> None:
    assert client.post("/api/search/image", content=iter([b"x" * 10_000] * 11), headers=PNG).status_code == 413
    long = b'{"text": "' + b"x" * 300_000 + b'"}'
    for content in (long, iter([long])):
        assert client.post("/api/search", content=content, headers=JSON).status_code == 413


def test_other_content_types_are_refused(client: TestClient) -> None:
    json, png = b'{"text": "a tent"}', encoded("PNG")
    for path, content, kind, status in (
        *(("search", json, kind, 415) for kind in ("text/plain", "", "multipart/form-data; boundary=x", "image/png")),
        *(("search", json, kind, 200) for kind in ("application/json; charset=utf-8", "Application/JSON")),
        *(("search/image", png, kind, 415) for kind in ("", "application/json", "imagex/png")),
    ):
        response = client.post(f"/api/{path}", content=content, headers={"Content-Type": kind})
        assert (response.status_code, "error" in response.json()) == (status, status == 415), kind


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b'{"text": "\xff"}', b"[" * 100_000, b"null", b'{"text": ["a"]}'),
        *(b'{"text": "a", "k": ' + k + b"}" for k in (b"9" * 5000, b"1e999", b"NaN")),
        *(b'{"text": "a", "\\ud800": 1}', b'{"text": "a", "' + b"n" * 10_000 + b'": 1}'),
    ],
)
def test_malformed_bodies_are_refused(body: bytes, client: TestClient) -> None:
    response = client.post("/api/search", content=body, headers=JSON)
    assert (response.status_code in (400, 422), list(response.json())) == (True, ["error"])
    assert len(response.json()["error"]) <= 500


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


@pytest.mark.parametrize("error", [RuntimeError("an inside"), ValueError("{path} is damaged"), OSError("disk")])
def test_internal_errors_are_logged_and_not_shown_to_clients(
    error: Exception, client: TestClient, index: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    message = str(error).format(path=index)

    def fail(*given: object, **named: object) -> None:
        raise type(error)(message)

    with monkeypatch.context() as patch:
        patch.setattr(Searcher, "search", fail)
        response = client.post("/api/search", json={"text": "a tent"})
    assert (response.status_code, list(response.json())) == (500, ["error"])
    assert message not in response.text
    assert message in caplog.text
    assert client.post("/api/search", json={"text": "a tent"}).status_code == 200
