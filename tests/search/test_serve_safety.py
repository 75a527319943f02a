"""What the server refuses: strangers, other hosts' names, files that are not of the index, and more than its limits."""

from __future__ import annotations

import io
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image
from serve_helpers import Served, make_index, model, records, served
from small_index import small_index

from hnclip.core import Record
from hnclip.data.image_sources import FileImage
from hnclip.search.options import ServeOptions
from hnclip.search.serve import pictures
from hnclip.search.serve.guard import HEADERS, host_name
from hnclip.search.serve.run import checked_token

PNG = {"content-type": "image/png"}


@pytest.fixture(scope="module")
def park(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(make_index(tmp_path_factory.mktemp("safety"), 4), max_upload=100_000, max_pixels=1_000_000) as found:
        yield found


@pytest.fixture(scope="module")
def locked(park: Served) -> Iterator[Served]:
    with served(park.service.options.index, token="räuber hotzenplotz") as found:
        yield found


def png_of(width: int, height: int) -> bytes:
    """A PNG of a few bytes whose head promises so many pixels."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    )


def pcx() -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (9, 9)).save(content, "PCX")
    return content.getvalue()


PCX = pcx()

# Strangers


def test_without_the_token_there_is_the_page_and_nothing_else(locked: Served) -> None:
    client = locked.client()
    for path in ("/", "/healthz", "/openapi.json", "/page/page.css", "/page/page.js"):
        assert client.get(path).status_code == 200, path
    for path in ("/api/index", "/api/pictures/1", "/api/pictures/1/thumbnail", "/nothing", "/page/other.js"):
        answer = client.get(path)
        assert (answer.status_code, list(answer.json())) == (401, ["error"]), path
        assert answer.headers["www-authenticate"].startswith("Bearer")
    for path in ("/api/search", "/api/explain", "/api/separate", "/api/search/image"):
        assert client.post(path, json={"text": "a tent"}).status_code == 401


def test_the_token_opens_and_what_is_nearly_the_token_does_not(locked: Served) -> None:
    client = locked.client()
    token = "räuber hotzenplotz".encode()
    for kind in (b"Bearer ", b"bearer ", b"Bearer   "):
        assert client.get("/api/index", headers={b"authorization": kind + token}).status_code == 200
    for wrong in (
        b"",
        b"Bearer",
        b"Bearer ",
        b"Bearer " + token[:-1],
        b"Bearer " + token + b"x",
        b"Basic " + token,
        token,
    ):
        assert client.get("/api/index", headers={b"authorization": wrong}).status_code == 401, wrong


def test_a_session_is_a_cookie_that_is_not_the_token(locked: Served, park: Served) -> None:
    client = locked.client()
    for wrong in ("", "räuber", "raeuber hotzenplotz", "räuber hotzenplotz "):
        assert client.post("/api/session", json={"token": wrong}).status_code == 401
    answer = client.post("/api/session", json={"token": "räuber hotzenplotz"})
    assert (answer.status_code, answer.content) == (204, b"")
    cookie = answer.headers["set-cookie"]
    assert all(part in cookie for part in ("; HttpOnly", "; SameSite=Strict", "; Path=/"))
    assert "hotzenplotz" not in cookie
    assert client.get("/api/pictures/1/thumbnail").status_code == 200  # the client has kept it
    name, _, value = cookie.partition(";")[0].partition("=")
    for wrong in (f"{name}={value[:-1]}", f"{name}=", f"other={value}", "=;=;", 'hnclip="', f"{name}=ä"):
        assert locked.client().get("/api/index", headers={b"cookie": wrong.encode()}).status_code == 401, wrong
    assert "set-cookie" not in park.client().post("/api/session", json={"token": "any"}).headers


@pytest.mark.parametrize("other", ['prefs={"a":1}', "x=a b", "flag", '_x="unterminated', "expires=x", "x=ä"])
def test_cookies_of_others_lock_nobody_out(locked: Served, other: str) -> None:
    cookie = locked.client().post("/api/session", json={"token": "räuber hotzenplotz"}).headers["set-cookie"]
    own = cookie.partition(";")[0]
    for both in (f"{other}; {own}", f"{own}; {other}", f"{other};{own};{other}"):
        assert locked.client().get("/api/index", headers={b"cookie": both.encode()}).status_code == 200, both
    assert locked.client().get("/api/index", headers={b"cookie": other.encode()}).status_code == 401


def test_tokens_come_from_the_option_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HNCLIP_TOKEN", raising=False)
    assert checked_token(ServeOptions(index=Path("x"))) is None
    monkeypatch.setenv("HNCLIP_TOKEN", "of the environment")
    assert checked_token(ServeOptions(index=Path("x"))) == "of the environment"
    assert checked_token(ServeOptions(index=Path("x"), token="own")) == "own"
    for wrong in ("", " ", "a\nb", " a"):
        with pytest.raises(ValueError, match="token"):
            checked_token(ServeOptions(index=Path("x"), token=wrong))


def test_a_local_server_answers_to_local_names_only(park: Served) -> None:
    client = park.client()
    for host in ("localhost", "localhost:1", "127.0.0.1:8765", "[::1]:8765", "LOCALHOST:8765", "192.168.0.7:80"):
        assert client.get("/healthz", headers={"host": host}).status_code == 200, host
    for host in (
        "evil.example",
        "evil.example:8765",
        "localhost.evil.example",
        "127.0.0.1.evil.example:8765",
        "",
        "[::1",
        "1.2.3",
    ):
        answer = client.get("/healthz", headers={"host": host})
        assert (answer.status_code, list(answer.json())) == (421, ["error"]), host


def test_names_of_hosts() -> None:
    assert host_name("[::1]:80") == "[::1]"
    assert host_name("a:80") == host_name("A") == "a"


# Files


def test_no_path_leads_out_of_the_index(park: Served) -> None:
    client = park.client()
    for path in (
        "/page/../run.py",
        "/page/..%2frun.py",
        "/page/%2e%2e/run.py",
        "/page/..%5crun.py",
        "/page//etc/passwd",
        "/page/page.css%00.py",
        "/page/",
        "/page",
        "/api/pictures/../../etc/passwd",
        "/api/pictures/..%2f..%2f..%2fetc%2fpasswd",
        "/api/pictures/%2fetc%2fpasswd",
        "/api/pictures/1/../../../etc/passwd",
        "//etc/passwd",
        "/%ff%fe",
    ):
        answer = client.get(path)
        assert answer.status_code in (404, 422), path
        assert list(answer.json()) == ["error"]
        assert "root:" not in answer.text


def test_what_is_not_what_was_indexed_is_never_given_out(tmp_path: Path) -> None:
    path = make_index(tmp_path, 6)
    secret = tmp_path / "secret.txt"
    secret.write_text("nobody must read this")
    with served(path) as found:
        client = found.client()
        with found.service.keeper.borrow() as view:
            items = [view.index.item(number) for number in range(1, 7)]
        files = [tmp_path / "pictures" / item.name for item in items if item is not None]
        contents = [file.read_bytes() for file in files]
        files[0].unlink()
        files[0].symlink_to(secret)  # swapped for a link
        files[1].write_bytes(contents[2])  # another picture, even one of the index
        files[2].unlink()  # gone
        files[3].unlink()
        files[3].symlink_to("/dev/zero")  # would never end
        files[4].unlink()
        os.mkfifo(files[4])  # would never begin
        moved = tmp_path / "moved.png"
        files[5].rename(moved)
        files[5].symlink_to(moved)  # a link to what was indexed is that
        for number in range(1, 6):
            answer = client.get(f"/api/pictures/{number}")
            assert (answer.status_code, list(answer.json())) == (410, ["error"]), number
            assert str(tmp_path) not in answer.text
            assert client.get(f"/api/pictures/{number}/thumbnail").status_code == 200
        assert client.get("/api/pictures/6").content == contents[5]
        files[4].unlink()
        explained = client.post("/api/explain", json={"text": "a tent", "id": 1}).json()
        assert explained["approximate"] is True  # of the thumbnail


def test_pictures_without_files_have_a_thumbnail_alone(tmp_path: Path) -> None:
    small_index(tmp_path / "park.hnc", model(), records()[:2])
    with served(tmp_path / "park.hnc") as found:
        assert found.client().get("/api/pictures/1").status_code == 404
        assert found.client().get("/api/pictures/1/thumbnail").status_code == 200


def test_formats_that_browsers_do_not_show_become_jpeg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {"a.tif": "jpeg", "b.ppm": "jpeg", "c.webp": "webp", "d.bmp": "bmp", "e.jpg": "jpeg", "f.pcx": "jpeg"}
    made = []
    for number, name in enumerate(kinds):
        picture = records()[number].image.load()
        picture.save(tmp_path / name)
        made.append(Record(id=name, image=FileImage(tmp_path / name), captions=("a scene",), split="all"))
    small_index(tmp_path / "park.hnc", model(), made)
    with served(tmp_path / "park.hnc") as found:
        client = found.client()
        for number, (name, kind) in enumerate(kinds.items()):
            answer = client.get(f"/api/pictures/{number + 1}")
            assert answer.headers["content-type"] == f"image/{kind}"
            with Image.open(tmp_path / name) as picture:
                assert Image.open(io.BytesIO(answer.content)).size == picture.size
        assert answer.content == client.get("/api/pictures/6/thumbnail").content  # of a rare format
        with monkeypatch.context() as patch:
            patch.setattr(pictures, "LARGEST", 1000)
            assert client.get("/api/pictures/1").status_code == 410
    with served(tmp_path / "park.hnc", max_pixels=100) as found:
        small = found.client().get("/api/pictures/1/thumbnail").content
        assert found.client().get("/api/pictures/1").content == small  # too large to be converted
        assert found.client().get("/api/pictures/3").headers["content-type"] == "image/webp"


# Limits


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_pictures_that_would_be_too_large_are_not_decoded(park: Served) -> None:
    client = park.client()
    for width, height in ((1001, 1000), (12_000, 12_000), (2**31 - 1, 1), (60_000, 60_000)):
        answer = client.post("/api/search/image", content=png_of(width, height), headers=PNG)
        assert (answer.status_code, "pixels" in answer.json()["error"]) == (413, True), (width, height)


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"", 422),
        (b"no picture", 422),
        (png_of(100, 100), 422),  # promises more than it has
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n", 422),  # Pillow would start Ghostscript
        (PCX, 422),  # Pillow would know it
        (b"\x89PNG\r\n\x1a\n", 422),
        (b"x" * 100_001, 413),
    ],
)
def test_bodies_that_are_no_picture(park: Served, content: bytes, status: int) -> None:
    answer = park.client().post("/api/search/image", content=content, headers=PNG)
    assert (answer.status_code, list(answer.json())) == (status, ["error"])


def encoded(kind: str, **options: object) -> bytes:
    content = io.BytesIO()
    records()[0].image.load().resize((48, 48)).save(content, kind, **options)
    return content.getvalue()


def test_jpegs_of_very_many_scans_are_not_decoded(park: Served) -> None:
    plain = encoded("JPEG", progressive=True)
    last = plain.rindex(b"\xff\xda")
    scan, own = plain[last:-2], plain.count(b"\xff\xda")

    def send(scans: int) -> int:
        content = plain[:-2] + scan * (scans - own) + plain[-2:]
        return park.client().post("/api/search/image", content=content, headers=PNG).status_code

    assert [send(own), send(100), send(101)] == [200, 200, 422]


def test_formats_that_would_take_long_are_not_decoded(park: Served) -> None:
    for content, part in [
        (encoded("TIFF", compression="jpeg"), "TIFF"),
        (b"P1\n2 1\n0 1\n", "plain"),
        (b"P2\n2 1\n255\n0 1\n", "plain"),
        (b"P3\n1 1\n255\n0 1 2\n", "plain"),
    ]:
        answer = park.client().post("/api/search/image", content=content, headers=PNG)
        assert (answer.status_code, part in answer.json()["error"]) == (422, True), answer.text
    for content in (encoded("TIFF"), encoded("TIFF", compression="tiff_lzw"), encoded("PPM")):
        assert park.client().post("/api/search/image", content=content, headers=PNG).status_code == 200


def test_thin_pictures_are_refused_and_not_stretched(park: Served) -> None:
    thin = io.BytesIO()
    Image.new("RGB", (900_000, 1)).save(thin, "PNG")
    answer = park.client().post("/api/search/image", content=thin.getvalue(), headers=PNG)
    assert (answer.status_code, "thin" in answer.json()["error"]) == (422, True)


def test_a_body_without_a_length_has_the_same_limit(park: Served) -> None:
    parts = [b"x" * 10_000] * 11
    answer = park.client().post("/api/search/image", content=iter(parts), headers=PNG)
    assert answer.status_code == 413
    long = b'{"text": "' + b"x" * 300_000 + b'"}'
    json = {"content-type": "application/json"}
    assert park.client().post("/api/search", content=long, headers=json).status_code == 413
    assert park.client().post("/api/search", content=iter([long]), headers=json).status_code == 413


def test_a_body_that_nobody_reads_has_no_limit(park: Served) -> None:
    assert park.client().request("GET", "/healthz", headers={"content-length": "999999999"}).status_code == 200


def test_types_of_bodies(park: Served) -> None:
    client = park.client()
    for kind in ("text/plain", "", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "image/png"):
        answer = client.post("/api/search", content=b'{"text": "a tent"}', headers={"content-type": kind})
        assert (answer.status_code, list(answer.json())) == (415, ["error"]), kind
    for kind in ("application/json", "application/json; charset=utf-8", "Application/JSON"):
        assert (
            client.post("/api/search", content=b'{"text": "a tent"}', headers={"content-type": kind}).status_code == 200
        )
    for kind in ("", "application/octet-stream", "text/html", "application/json", "imagex/png"):
        assert client.post("/api/search/image", content=b"x", headers={"content-type": kind}).status_code == 415, kind


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b'{"text": "\xff"}',
        b"[" * 100_000,
        b'{"text": "a", "k": ' + b"9" * 5000 + b"}",
        b'{"text": "a", "k": 1e999}',
        b'{"text": "a", "k": NaN}',
        b'{"text": "\\ud800"}',
        b'{"text": "a", "\\ud800": 1}',
        b'{"text": "a", "' + b"n" * 10_000 + b'": 1}',
        b"null",
        b'"text"',
        b'{"text": ["a"]}',
        b'{"text": "a", "find": "pictures"}',
    ],
)
def test_bodies_that_are_no_request(park: Served, body: bytes) -> None:
    answer = park.client().post("/api/search", content=body, headers={"content-type": "application/json"})
    assert answer.status_code in (400, 422)
    assert list(answer.json()) == ["error"]
    assert len(answer.json()["error"]) <= 500


def test_other_methods_and_addresses(park: Served) -> None:
    client = park.client()
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND", "GET"):
        answer = client.request(method, "/api/search")
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
        assert list(answer.json()) == ["error"]
    for path in ("/docs", "/redoc", "/openapi.yaml", "/api", "/api/search/", "/favicon.ico"):
        assert client.get(path).status_code == 404


def test_all_answers_have_the_headers_of_safety(park: Served) -> None:
    client = park.client()
    answers = [
        client.get(path) for path in ("/", "/nothing", "/api/index", "/api/pictures/1", "/api/pictures/1/thumbnail")
    ]
    answers += [client.post("/api/search"), client.get("/healthz", headers={"host": "evil.example"})]
    for answer in answers:
        assert {name: answer.headers[name] for name in HEADERS} == HEADERS
        assert "access-control-allow-origin" not in answer.headers
    policy = HEADERS["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_an_error_inside_is_told_to_the_log_and_not_to_the_client(
    park: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(index: object, number: int) -> None:
        raise RuntimeError("an inside")

    monkeypatch.setattr("hnclip.search.serve.app.thumbnail", fail)
    monkeypatch.setattr("hnclip.search.serve.answers.rerank", lambda *given, **more: fail(None, 0))
    client = park.client()
    for answer in (
        client.get("/api/pictures/1/thumbnail"),
        client.post("/api/search", json={"text": "a tent", "rerank": True}),
    ):
        assert (answer.status_code, answer.json()) == (500, {"error": "the server failed; its log says how"})
    assert caplog.text.count("an inside") >= 2
    assert client.post("/api/search", json={"text": "a tent"}).status_code == 200
