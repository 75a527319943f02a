"""`hnclip search` as a person and as a program calls it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from small_index import bundled, small_index

from hnclip.cli import main
from hnclip.core import Record
from hnclip.data.image_sources import FileImage
from hnclip.data.scenes import scene_records
from hnclip.models.dual_encoder import DualEncoder
from hnclip.search.answer_text import differences
from hnclip.search.ask import THUMBNAILS
from hnclip.search.engines.open import make_engine
from hnclip.search.index.opening import open_writer
from hnclip.search.rerank import WEIGHT

RECORDS = scene_records("park", "test", families=3)
TEXT = RECORDS[5].captions[0]

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def model() -> DualEncoder:
    return bundled()


@pytest.fixture(autouse=True)
def loaded_once(model: DualEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """How a model is opened is a matter of test_find.py."""
    monkeypatch.setattr("hnclip.models.load.load", lambda *_, **__: model)


@pytest.fixture(scope="module")
def folder(model: DualEncoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ask")
    small_index(folder / "files.hnc", model, RECORDS, files=folder / "files")
    bare = [Record(record.id, record.image, (), None) for record in RECORDS[:3]]
    small_index(folder / "bare.hnc", model, bare)
    small_index(folder / "empty.hnc", model, [])
    return folder


def printed(capsys: Capture, *arguments: object) -> str:
    assert main(["search", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def found(capsys: Capture, *arguments: object) -> dict[str, Any]:
    return json.loads(printed(capsys, *arguments, "--json"))


def refused(capsys: Capture, *arguments: object) -> str:
    assert main(["search", *map(str, arguments)]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert "Traceback" not in said.err
    return said.err


def name_of(number: int) -> str:
    return f"{RECORDS[number].id.replace('/', '-')}.png"


def test_people_see_rank_score_path_and_caption(folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = printed(capsys, folder / "files.hnc", TEXT, "-k", 5).splitlines()
    assert lines[0] == f"5 of 12 pictures in {folder / 'files.hnc'}, nearest first"
    assert lines[2].split() == ["#", "score", "picture"]
    for rank, (head, said) in enumerate(zip(lines[3::2], lines[4::2], strict=True), 1):
        number, score, path = head.split()
        assert (int(number), Path(path).parent) == (rank, folder / "files")
        assert Path(path).is_file()
        assert 0 < float(score) <= 1
        assert len(said) <= 80
        (record,) = [each for each in RECORDS if each.id.replace("/", "-") == Path(path).stem]
        assert record.captions[0].startswith(said.strip().removesuffix("…"))
        assert len(said.strip()) > 50
    assert rank == 5


def test_programs_get_everything(folder: Path, capsys: Capture) -> None:
    answer = found(capsys, folder / "files.hnc", TEXT, "-k", 5, "--explain", "--rerank")
    assert (answer["text"], answer["find"], answer["total"], answer["cut"]) == (TEXT, "images", 12, False)
    assert answer["captions"] == answer["notes"] == []
    results = answer["results"]
    both = [result["score"] + WEIGHT * result["tokens"] for result in results]
    assert both == pytest.approx(sorted(both, reverse=True), abs=1e-5)
    assert len({result["id"] for result in results}) == 5
    for result in results:
        assert Path(result["path"]).name == result["name"]
        assert (result["width"], result["height"]) == (192, 192)
        assert result["captions"] in [list(record.captions) for record in RECORDS]
    (group,) = [each for each in answer["groups"] if results[0]["id"] in each["ids"]]
    members = [result["id"] for result in results if result["group"] == answer["groups"].index(group)]
    assert group["ids"] == members
    assert len(members) > 1
    assert 0.8 < group["similarity"] <= 1.001
    assert [said["id"] for said in group["captions"]] == members
    assert group["separated"] == members
    assert all(len(separator["scores"]) == len(members) for separator in group["separators"])
    numbers = [group["similarity"], *(found[name] for found in results for name in ("score", "tokens"))]
    assert all(number == round(number, 5) for number in numbers)  # as all others
    assert len(answer["explanations"]) == 3
    for explanation, result in zip(answer["explanations"], results):
        assert explanation["id"] == result["id"]
        assert (explanation["rows"], explanation["columns"], explanation["box"]) == (6, 6, [0, 0, 1, 1])
        for word in explanation["words"]:
            assert explanation["text"][word["start"] : word["stop"]] == word["text"]
            assert len(word["patches"]) == 36
            assert word["score"] == max(word["patches"])


def test_the_best_of_all_that_are_re_ranked_are_shown(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hnclip.search.rerank.WEIGHT", -5.0)  # so that the nearest is hardly the best
    best = [found(capsys, folder / "files.hnc", TEXT, "--rerank", "-k", k)["results"][0]["id"] for k in (12, 1)]
    assert best[0] == best[1] != found(capsys, folder / "files.hnc", TEXT, "-k", 1)["results"][0]["id"]


def test_without_explanations_nothing_is_explained(folder: Path, capsys: Capture) -> None:
    answer = found(capsys, folder / "files.hnc", TEXT)
    assert answer["groups"] == answer["explanations"] == []
    assert all(result["tokens"] is None and result["group"] is None for result in answer["results"])


@pytest.mark.parametrize("columns", [80, 120])
def test_explanations_fit_the_terminal(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    text = printed(capsys, folder / "files.hnc", TEXT, "--explain", "-k", 6)
    lines = text.splitlines()
    assert all(len(line) <= columns or str(folder) in line for line in lines)
    maps = [line for line in lines if "█" in line and not set(line) - set("·░▒▓█ ")]
    assert len(maps) >= 3
    assert max(map(len, maps)) > columns - 25
    assert text.count("Words that stand out in result ") == 3
    assert any(place in text for place in ("top left", "top right", "bottom left", "bottom right", "centre"))
    assert "Near-twins A: results " in text
    assert "Words in [brackets] are in one of their captions alone:" in text
    assert "Words of the description that separate them" in text
    assert "   1A " in text


def test_a_text_that_a_second_cleaning_changes_is_explained(folder: Path, capsys: Capture) -> None:
    text = "<b> &amp;amp;amp;lt;&amp;amp;amp;gt; dog cat tree"
    explanation = found(capsys, folder / "files.hnc", text, "--explain")["explanations"][0]
    assert [word["text"] for word in explanation["words"]][-3:] == ["dog", "cat", "tree"]


def test_copies_are_twins_that_nothing_separates(
    model: DualEncoder, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those are compared whose content differs, under their own ranks."""
    monkeypatch.setenv("COLUMNS", "80")
    files = tmp_path / "files"
    files.mkdir()
    records = []
    for name, scene in (("a", 4), ("b", 4), ("c", 5), ("d", 4)):
        RECORDS[scene].image.load().save(files / f"{name}.png")
        records.append(Record(name, FileImage(files / f"{name}.png"), (), None))
    small_index(tmp_path / "copies.hnc", model, [records[0], records[1]])
    (group,) = found(capsys, tmp_path / "copies.hnc", TEXT, "--explain")["groups"]
    assert (group["similarity"], group["separated"], group["separators"]) == (1, [], [])
    text = printed(capsys, tmp_path / "copies.hnc", TEXT, "--explain")
    assert "Near-twins A: results 1 and 2; cosine with the first 1.0000\n" in text + "\n"
    assert "separate them" not in text
    small_index(tmp_path / "more.hnc", model, records)
    answer = found(capsys, tmp_path / "more.hnc", TEXT, "--explain")
    (group,) = answer["groups"]
    names = [result["name"] for result in answer["results"]]
    assert sorted(names) == ["a", "b", "c", "d"]
    ranks = [0, 1] if names[0] == "c" else [0, 3]  # copies come together
    assert group["separated"] == [answer["results"][place]["id"] for place in ranks]
    assert {len(separator["scores"]) for separator in group["separators"]} == {2}
    lines = printed(capsys, tmp_path / "more.hnc", TEXT, "--explain").splitlines()
    (head,) = [line for line in lines if line.strip().startswith("word ")]
    assert head.split() == ["word", *(str(place + 1) for place in ranks)]


def test_an_engine_that_is_not_there_is_told(
    model: DualEncoder, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.hnc"
    small_index(path, model, RECORDS, engine="faiss-hnsw")
    answer = found(capsys, path, TEXT, "-k", 3)
    assert (answer["engine"], answer["notes"]) == ("exact", [])  # there are few
    monkeypatch.setattr("hnclip.search.engines.open.FEW", 12)
    answer = found(capsys, path, TEXT, "-k", 3)
    command = f"  hnclip index 'records of a test' --out {path} --engine faiss-hnsw"
    assert (answer["engine"], answer["notes"]) == (
        "exact",
        ["faiss-hnsw of the pictures is not made, or is gone, so all of them were looked at: make it with\n" + command],
    )
    assert command in printed(capsys, path, TEXT, "-k", 3).splitlines()  # to be copied
    with open_writer(path, None) as writer:
        make_engine(writer, "faiss-hnsw")
    for find in ("images", "captions"):
        answer = found(capsys, path, TEXT, "-k", 3, "--find", find)
        assert (answer["engine"], answer["notes"]) == ("faiss-hnsw", [])
    assert found(capsys, path, TEXT, "--engine", "exact", "-k", 3)["notes"] == []


def test_pictures_that_were_looked_at_by_their_thumbnails_are_told(
    folder: Path, model: DualEncoder, tmp_path: Path, capsys: Capture
) -> None:
    bare, path = folder / "bare.hnc", tmp_path / "a.hnc"
    for more in (["--rerank"], ["--explain"]):
        assert found(capsys, bare, TEXT, "-k", 3, *more)["notes"] == [THUMBNAILS]
        assert found(capsys, folder / "files.hnc", TEXT, "-k", 3, *more)["notes"] == []
    small_index(path, model, RECORDS, files=tmp_path / "files")
    last = found(capsys, path, TEXT, "-k", 12, "--rerank")["results"][-1]
    Path(last["path"]).unlink()
    assert found(capsys, path, TEXT, "-k", 1, "--rerank")["notes"] == [THUMBNAILS]  # though it is not shown
    assert found(capsys, path, TEXT, "-k", 1)["notes"] == []


def test_the_description_comes_from_standard_input(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = found(capsys, folder / "files.hnc", TEXT)
    monkeypatch.setattr("sys.stdin", io.StringIO(TEXT + "\n"))
    assert found(capsys, folder / "files.hnc", "-") == expected
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert "the description has no word" in refused(capsys, folder / "files.hnc", "-")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a tree \xff"), encoding="utf-8"))
    assert "standard input is no text in UTF-8" in refused(capsys, folder / "files.hnc", "-")


def test_a_picture_finds_pictures_and_captions(folder: Path, capsys: Capture) -> None:
    query = folder / "files" / name_of(8)
    answer = found(capsys, folder / "files.hnc", "--image", query, "-k", 2)
    assert answer["image"] == str(query)
    assert answer["results"][0]["score"] == pytest.approx(1, abs=0.005)
    captions = found(capsys, folder / "files.hnc", "--image", query, "--find", "captions", "-k", 3)
    assert (captions["results"], captions["total"], len(captions["captions"])) == ([], 12, 3)
    for caption in captions["captions"]:
        assert [caption["text"]] == caption["pictures"][0]["captions"]
    text = printed(capsys, folder / "files.hnc", "--image", query, "--find", "captions", "-k", 3)
    assert f"of {captions['captions'][0]['pictures'][0]['path']}" in text
    assert "3 of 12 captions" in text


def test_twins_of_a_pictures_results_have_no_separators(folder: Path, capsys: Capture) -> None:
    query = folder / "files" / name_of(4)
    for find in ("images", "captions"):
        answer = found(capsys, folder / "files.hnc", "--image", query, "--explain", "-k", 4, "--find", find)
        assert answer["groups"]
        assert all(group["separators"] == [] for group in answer["groups"])
        assert "a picture has no words" in answer["notes"][0]
        assert "Near-twins A" in printed(capsys, folder / "files.hnc", "--image", query, "--explain", "--find", find)


def test_texts_find_captions(folder: Path, capsys: Capture) -> None:
    answer = found(capsys, folder / "files.hnc", TEXT, "--find", "captions", "-k", 1, "--explain")
    assert answer["captions"][0]["text"] == TEXT
    assert answer["captions"][0]["score"] == pytest.approx(1, abs=0.005)
    assert "words and patches are explained where pictures are found" in answer["notes"]


def test_fewer_none_and_nothing_at_all(folder: Path, capsys: Capture) -> None:
    bare, empty = folder / "bare.hnc", folder / "empty.hnc"
    assert f"there are no more: {bare} holds 3 pictures" in found(capsys, bare, TEXT)["notes"]
    assert found(capsys, bare, TEXT, "-k", 3)["notes"] == []
    assert printed(capsys, bare, TEXT, "-k", 1).startswith(f"1 of 3 pictures in {bare}")
    one = folder / "one.hnc"
    small_index(one, bundled(), RECORDS[:1])
    for find, what in (("images", "picture"), ("captions", "caption")):
        text = printed(capsys, one, TEXT, "--find", find)
        assert text.startswith(f"1 of 1 {what} in {one}")
        assert f"holds 1 {what} #" in " ".join(text.split())
    answer = found(capsys, bare, TEXT, "--find", "captions")
    assert answer["captions"] == []
    assert f"{bare} holds no captions" in answer["notes"][0]
    for more in ([], ["--rerank"], ["--explain"], ["--find", "captions"]):
        text = printed(capsys, empty, TEXT, *more)
        assert text.startswith(f"note: {empty} holds no pictures")
    text = printed(capsys, bare, TEXT, "--explain")
    assert RECORDS[0].id in text  # no path, so its name
    assert "thumbnails" in text
    assert found(capsys, bare, TEXT)["results"][0]["path"] is None


def test_a_cut_description_says_where(folder: Path, capsys: Capture, model: DualEncoder) -> None:
    text = "tree " * (model.context - 3) + "house flag"
    answer = found(capsys, folder / "files.hnc", text)
    assert answer["cut"]
    assert [note for note in answer["notes"] if "context" in note] == [
        "the description is longer than the model's context of 248 tokens: it was read up to "
        "“… tree tree tree tree house”"
    ]
    assert not found(capsys, folder / "files.hnc", text.removesuffix(" flag"))["cut"]
    behind = ". " * model.context + "tree"  # no word was read
    assert found(capsys, folder / "files.hnc", behind)["notes"][-1].endswith("context of 248 tokens")


@pytest.mark.parametrize("text", ["", "   ", "…!"])
def test_texts_without_a_word_are_refused(folder: Path, capsys: Capture, text: str) -> None:
    assert "the description has no word" in refused(capsys, folder / "files.hnc", text)


def test_bad_pictures_are_refused(
    folder: Path, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = (folder / "files" / name_of(0)).read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.jpg").write_text("no picture")
    (tmp_path / "empty.jpg").write_bytes(b"")
    Image.new("RGB", (90_000, 1)).save(tmp_path / "thin.png")
    reasons = {"cut.png": "truncated", "text.jpg": "image format", "empty.jpg": "is empty", "thin.png": "too thin"}
    for name, reason in {**reasons, "none.jpg": "does not exist", ".": "is not a file"}.items():
        said = refused(capsys, folder / "files.hnc", "--image", tmp_path / name)
        assert reason in said
        assert str(tmp_path) in said
    monkeypatch.setattr("hnclip.data.image_sources.MAX_PIXELS", 1000)
    assert "at most 1,000 are decoded" in refused(
        capsys, folder / "files.hnc", "--image", folder / "files" / name_of(0)
    )


def test_a_terminal_obeys_no_name_or_caption(model: DualEncoder, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "red \x1b[31m\nfake line.png"
    RECORDS[0].image.load().save(path)
    caption = "A tree \x1b]0;title\x07 stands\r\nbelow \u202eevil"
    records = [Record("a", FileImage(path), (caption,), None), Record("b", RECORDS[1].image, (caption,), None)]
    small_index(tmp_path / "a.hnc", model, records)
    for find in ("images", "captions"):
        text = printed(capsys, tmp_path / "a.hnc", "a tree \x1b[2J", "--find", find, "--explain")
        assert not {"\x1b", "\x07", "\r", "\u202e"} & set(text)
        assert not [line for line in text.splitlines() if line.startswith("fake")]


def test_no_index_or_a_wrong_call(folder: Path, capsys: Capture, tmp_path: Path) -> None:
    assert "does not exist: make it with hnclip index" in refused(capsys, tmp_path / "none.hnc", TEXT)
    for wrong in ([], [TEXT, "--image", "a.png"], [TEXT, "-k", "0"], ["--image", "a.png", "--rerank"]):
        with pytest.raises(SystemExit) as done:
            main(["search", str(folder / "files.hnc"), *wrong])
        assert done.value.code == 2


@pytest.mark.parametrize(
    ("passage", "text"),
    [
        ((("a ", False), ("red", True), (", small dog.", False)), "a [red], small dog."),
        ((("nothing at all", False),), ""),
        ((("one two three four five six ", False), ("seven", True)), "… two three four five six [seven]"),
        ((("seven", True), (" one two three four five six", False)), "[seven] one two three four five …"),
        ((("a ", False), ("b", True), (" ", False), ("c", True), (".", False)), "a [b c]."),
        ((("红", False), ("房子", True), ("。", False)), "红[房子]。"),
    ],
)
def test_differences_are_shown_with_a_few_words_around(passage: Any, text: str) -> None:
    assert differences(passage) == text
