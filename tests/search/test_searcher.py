"""Search against all scores, the other parts of a result, and `hnclip search`."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_index import bundled, small_index
from store_helpers import all_files, continue_index, image_hash, vectors_of

from hnclip.cli import main
from hnclip.core import Record
from hnclip.data.image_sources import FileImage
from hnclip.data.scenes import scene_records
from hnclip.models.load import load
from hnclip.search.database import Kind
from hnclip.search.engines import update_engine
from hnclip.search.reader import IndexReader
from hnclip.search.searcher import Searcher, open_index
from hnclip.search.writer import Change, NewFile, NewImage

RECORDS = scene_records("park", "test", families=3)
TEXT, IMAGE = RECORDS[5].captions[0], RECORDS[9].image.load()
SHARED = "a caption that several files have"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """all.hnc has files with equal content, a shared caption, and deleted images; bare.hnc has neither files nor
    captions."""
    folder = tmp_path_factory.mktemp("searcher")
    files, path = folder / "files", folder / "all.hnc"
    small_index(path, [*RECORDS[2:], *(replace(one, captions=(SHARED,)) for one in RECORDS[:2])], files=files)
    names = sorted(file.name for file in files.iterdir())
    copies = []
    for number, name in enumerate((names[5], names[8], names[8])):
        (files / f"copy-{number}.png").write_bytes((files / name).read_bytes())
        copies.append(Record(f"copy {number}", FileImage(files / f"copy-{number}.png"), (SHARED,) * (number % 2), None))
    small_index(path, copies)
    with continue_index(path) as writer:
        writer.commit(Change(deleted={names[3], names[7], names[8]}))
        writer.delete_unused()
    small_index(folder / "bare.hnc", [replace(record, captions=()) for record in RECORDS[:3]])
    small_index(folder / "empty.hnc", [])
    return folder


@pytest.fixture
def index(folder: Path) -> Iterator[Searcher]:
    with open_index(folder / "all.hnc") as index:
        yield index


def all_scores(reader: IndexReader, kind: Kind, vector: np.ndarray) -> dict[str, float]:
    """By the name of a file or the text of a caption, best first, equal ones by id."""
    vectors = vectors_of(reader, kind)
    if kind == "images":
        found = [(file.name, file.image) for file in all_files(reader)]
    else:
        found = [(one.text, number) for number, one in reader.captions(list(vectors)).items()]
        assert {text for text, _ in found} == {text for file in all_files(reader) for text in file.captions}
    scored = [(-float(vectors[number] @ vector), number, name) for name, number in found]
    return {name: -score for score, _, name in sorted(scored, key=lambda one: one[:2])}


@pytest.mark.parametrize("k", [1, 4, 100])
@pytest.mark.parametrize("query", [{"text": TEXT}, {"text": SHARED}, {"image": IMAGE}], ids=["text", "shared", "image"])
def test_search_equals_all_scores(query: dict[str, Any], k: int, index: Searcher) -> None:
    (vector,) = bundled().encode(list(query.values()))  # [D]
    scores = all_scores(index.reader, "images", vector)
    images = index.search(**query, k=k)
    assert {hit.file.name: hit.score for hit in images.hits} == pytest.approx(dict([*scores.items()][:k]), abs=1e-5)
    assert [hit.file.name for hit in images.hits] == [*scores][:k]
    texts = all_scores(index.reader, "captions", vector)
    captions = index.search(**query, k=k, find="captions")
    assert [hit.text for hit in captions.captions] == [*texts][:k]
    for hit in captions.captions:
        assert hit.score == pytest.approx(texts[hit.text], abs=1e-5)
        owners = {file.name: scores[file.name] for file in all_files(index.reader) if hit.text in file.captions}
        assert {one.file.name: one.score for one in hit.images} == pytest.approx(owners, abs=1e-5)
        assert len(owners) == (3 if hit.text == SHARED else 1)
    assert (images.total, images.captions, captions.total, captions.hits) == (len(scores), (), len(texts), ())


@pytest.mark.parametrize("options", [{"text": TEXT}, {"text": TEXT, "find": "captions"}, {"image": IMAGE}])
def test_results_as_json(options: dict[str, Any], index: Searcher, folder: Path) -> None:
    result = index.search(**options, explain=True)
    whole, public = result.to_dict(), result.to_dict(paths=False)
    assert json.loads(json.dumps(whole, allow_nan=False)) == whole
    assert str(folder) not in json.dumps(public)
    assert (whole.pop("index"), whole.pop(result.kind)) == (str(folder / "all.hnc"), options.get("text", "an image"))
    for hit in [*whole["hits"], *(image for caption in whole["captions"] for image in caption["images"])]:
        path = Path(hit.pop("path"))
        assert path.is_file()
        assert path.name == hit["name"].replace("copy ", "copy-").removesuffix(".png") + ".png"
        assert (hit["width"], hit["height"], hit["token_score"]) == (192, 192, None)
    assert whole == public
    of_words = result.kind == "text" and result.find == "images"
    members = whole["hits"] or [caption["images"][0] | {"group": caption["group"]} for caption in whole["captions"]]
    assert whole["groups"]
    for number, group in enumerate(whole["groups"]):
        assert group["ids"] == [hit["id"] for hit in members if hit["group"] == number]
        different = {hit["score"] for hit in members if hit["group"] == number}  # files of one image have one score
        assert len(group["separated"]) == (len(different) if of_words and len(different) > 1 else 0)
        assert bool(group["separators"]) == bool(group["separated"])
    assert [one["id"] for one in whole["explanations"]] == [hit["id"] for hit in whole["hits"][:3] if of_words]


def test_threads_may_share_a_searcher(index: Searcher) -> None:
    def search(text: str) -> dict[str, Any]:
        return index.search(text, k=5).to_dict() | {"seconds": 0}

    texts = [text for file in all_files(index.reader) for text in file.captions]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(search, texts)) == list(map(search, texts))


@pytest.mark.parametrize("k", [1, 7])
def test_the_best_re_ranked_hits_are_returned(k: int, index: Searcher) -> None:
    text = RECORDS[10].captions[0]
    whole, best = index.search(text, k=100, rerank=True), index.search(text, k=k, rerank=True)
    assert whole.hits[:k] == best.hits
    assert {hit.file for hit in whole.hits} == set(all_files(index.reader))
    assert all(hit.token_score is not None for hit in whole.hits)
    assert {hit.file for hit in best.hits} != {hit.file for hit in index.search(text, k=7).hits}


@pytest.mark.parametrize(
    ("path", "options", "word"),
    [
        ("all", {"k": 13}, "holds no more"),
        ("all", {"k": 12}, None),
        ("all", {"text": "tree " * 245 + "house flag", "k": 1}, "house”"),
        ("all", {"text": ". " * 250 + "tree", "k": 1}, "context"),
        ("all", {"find": "captions", "explain": True, "k": 1}, "where a text finds images"),
        ("bare", {"k": 1, "explain": True}, "thumbnails"),
        ("bare", {"k": 3, "rerank": True}, "thumbnails"),
        ("bare", {"k": 3}, None),
        ("bare", {"find": "captions"}, "no captions"),
        ("empty", {"explain": True, "rerank": True}, "no images"),
    ],
)
def test_notes_of_a_result(path: str, options: dict[str, Any], word: str | None, folder: Path) -> None:
    with open_index(folder / f"{path}.hnc") as index:
        result = index.search(**{"text": TEXT, **options})
    assert str(folder) not in json.dumps(result.to_dict(paths=False))
    assert len(result.notes) == (word is not None)
    for note in result.notes:
        assert str(word) in note
        assert note.replace(" ", "") in "".join(result.to_text().split())
    assert bool(result.hits or result.captions) == (word not in ("no captions", "no images"))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"text": TEXT, "image": IMAGE},
        {"text": TEXT, "k": 0},
        {"text": TEXT, "rerank": True, "find": "captions"},
        {"image": IMAGE, "rerank": True},
        {"text": "???"},
    ],
)
def test_invalid_queries_are_refused(options: dict[str, Any], index: Searcher) -> None:
    with pytest.raises(ValueError):
        index.search(**options)


def test_unknown_ids_are_refused(index: Searcher) -> None:
    for call in (index.explain, index.separate):
        with pytest.raises(KeyError):
            call(TEXT, [1, 999])


def test_a_searcher_of_an_older_state_and_its_successor(tmp_path: Path, model_directory: Path) -> None:
    """Deleted files are not found any more; new files, and captions that only these have, not yet."""
    path = tmp_path / "x.hnc"
    small_index(path, RECORDS[:4], files=tmp_path / "files")
    with open_index(path) as old:
        deleted, *others = (hit.file for hit in old.search(TEXT).hits)
        with continue_index(path) as writer:
            writer.commit(Change(deleted={deleted.name}))
        small_index(path, [replace(RECORDS[4], captions=deleted.captions)], files=tmp_path / "files")
        assert [hit.file for hit in old.search(TEXT).hits] == others
        captions = old.search(TEXT, find="captions").captions
        assert {hit.text for hit in captions} == {text for file in others for text in file.captions}
        with old.reopen() as new:
            assert new.encoder is old.encoder
            assert len(new.search(TEXT).hits) == len(new.search(TEXT, find="captions").captions) == 4
            shutil.rmtree(path)
            small_index(path, RECORDS[:1], model=load(model_directory).eval(), name=str(model_directory))
            with new.reopen() as another:
                assert another.encoder.fingerprint == another.reader.about.fingerprint != old.encoder.fingerprint
                assert len(another.search(TEXT).hits) == 1


def index_of_1001(path: Path) -> None:
    """An index of 1,001 random vectors: enough for engines, of which it has none yet."""
    small_index(path, RECORDS[:1])
    with continue_index(path) as writer:
        random = np.random.default_rng(0).standard_normal((1000, writer.about.width)).astype(np.float32)
        vectors = random / np.linalg.norm(random, axis=1, keepdims=True)  # [1000, D]
        images = [NewImage(image_hash(number), vector, (1, 1), b"") for number, vector in enumerate(vectors)]
        writer.set_about(replace(writer.about, engine="faiss-hnsw"))
        writer.commit(Change(images=images, files=[NewFile(one.hash.hex(), one.hash, "{}", "") for one in images]))


def test_engines_that_were_built_and_those_that_were_not(tmp_path: Path) -> None:
    path = tmp_path / "x.hnc"
    index_of_1001(path)
    for engine, message in (("faiss-ivf", "no faiss-ivf"), ("fast", "engine")):
        with pytest.raises(ValueError, match=message):
            open_index(path, engine=engine)
    with open_index(path) as index:
        exact = index.search(TEXT, k=3)
        assert (exact.engine, index.search(TEXT, k=1, find="captions").notes) == ("exact", ())
        assert "--engine faiss-hnsw" in exact.notes[0]  # the index's own, which was not built yet
        with continue_index(path) as writer:
            update_engine(writer, "images", "faiss-hnsw")
        with index.reopen() as new:
            result = new.search(TEXT, k=3)
            assert (result.engine, new.engine_of("captions"), result.notes) == ("faiss-hnsw", "exact", ())
            assert result.hits == exact.hits
    with open_index(path, engine="exact") as index:
        assert (index.search(TEXT, k=3).engine, index.search(TEXT, k=3).notes) == ("exact", ())


@pytest.mark.parametrize("kind", ["images", "captions"])
def test_damaged_vectors_are_reported(kind: Kind, tmp_path: Path) -> None:
    small_index(tmp_path / "x.hnc", RECORDS[:4])
    file = tmp_path / f"x.hnc/{kind}-1.f16"
    with open_index(tmp_path / "x.hnc") as index:
        file.write_bytes(b"\xff" * file.stat().st_size)  # in place: it is mapped
        with pytest.raises(ValueError, match=r"(?s)damaged.*--replace"):
            index.search(TEXT, find=kind)
    with pytest.raises(ValueError, match=r"(?s)damaged.*--replace"):
        open_index(tmp_path / "x.hnc")


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ([TEXT, "-k", "5", "--rerank", "--explain"], {"text": TEXT, "k": 5, "rerank": True, "explain": True}),
        (["--image", "files/copy-0.png", "--find", "captions"], {"image": "files/copy-0.png", "find": "captions"}),
        (["-"], {"text": f"{TEXT}\n"}),
    ],
)
def test_the_command_prints_the_result_of_the_library(
    arguments: list[str],
    options: dict[str, Any],
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    if name := options.get("image"):
        options = {**options, "image": FileImage(Path(name)).load(), "name": name}
    with open_index("all.hnc") as index:
        expected = index.search(**options)
    for more in ([], ["--json"]):
        monkeypatch.setattr("sys.stdin", io.StringIO(f"{TEXT}\n"))
        assert main(["search", "all.hnc", *arguments, *more]) == 0
        printed = capsys.readouterr().out
        if more:
            assert json.loads(printed) | {"seconds": expected.seconds} == expected.to_dict()
        else:
            assert printed == f"{expected.to_text()}\n"


@pytest.mark.parametrize("arguments", [["-"], ["--image", "none.png"], ["a tree", "--engine", "faiss-ivf"]])
def test_the_command_reports_errors_without_a_traceback(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(" \n"))
    index_of_1001(tmp_path / "x.hnc")
    assert main(["search", str(tmp_path / "x.hnc"), *arguments]) == 1
    printed = capsys.readouterr()
    assert (printed.out, bool(printed.err), "Traceback" in printed.err) == ("", True, False)


@pytest.mark.parametrize("find", ["images", "captions"])
def test_text_for_a_terminal_contains_no_control_characters(find: Kind, tmp_path: Path) -> None:
    path = tmp_path / "red \x1b[31m\nfake line.png"
    RECORDS[0].image.load().save(path)
    captions = ("A [tree] \x1b]0;title\x07 stands\r\nbelow \u202eevil",), ("A big [tree] stands below",)
    records = [Record("a", FileImage(path), captions[0], None), Record("b", RECORDS[1].image, captions[1], None)]
    small_index(tmp_path / "x.hnc", records)
    with open_index(tmp_path / "x.hnc") as index:
        result = index.search("a tree \x1b[2J", find=find, explain=True)
    text = result.to_text()
    assert not {"\x1b", "\x07", "\r", "\u202e"} & set(text)
    assert not any(line.startswith("fake") for line in text.splitlines())
    assert "fake line.png" in text
    assert all(f"{hit.score:.3f}" in text for hit in result.hits or result.captions)
    assert text.count("[tree]") == 2  # in the list; among differing words brackets mark what differs
    assert ("[big] (tree] stands" in text) == bool(result.groups) == (find == "images")
