"""A user's own pictures from end to end: check, train, evaluate, compare."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from filelock import FileLock

from hnclip.cli import main
from hnclip.data.image_cache import list_caches, load_images
from hnclip.data.images import ImageTransform
from hnclip.data.scenes import scene_records


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """24 pictures with captions in text files of the same names."""
    directory = tmp_path / "photos"
    directory.mkdir()
    for number, record in enumerate(scene_records("park", "train", families=6, members=4)):
        record.image.load().save(directory / f"{number:02}.png")
        (directory / f"{number:02}.txt").write_text(record.captions[0] + "\n", encoding="utf-8")
    return directory


def read(capsys: pytest.CaptureFixture[str]) -> dict:
    return json.loads(capsys.readouterr().out)


def test_check_train_evaluate_compare(
    folder: Path, tmp_path: Path, model_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, data, run = str(model_directory), str(folder), tmp_path / "run"
    assert main(["data", "check", data, "--model", model, "--json"]) == 0
    assert read(capsys)["total"]["records"] == 24

    options = ["--recipe", "tiny", "--model", model, "--optim.epochs", "2", "--threads", "1"]
    assert main(["train", "--data", data, "--out", str(run), *options, "--read.validation-share", "0.25"]) == 0
    said = capsys.readouterr()
    assert f"18 training pairs and 6 validation images from {data}" in said.err
    hint = next(line for line in said.out.splitlines() if line.startswith("evaluate: hnclip "))
    assert "--split validation --read.validation-share 0.25" in hint  # training pairs are not what to evaluate on
    assert main([*shlex.split(hint.removeprefix("evaluate: hnclip ")), "--json"]) == 0
    assert [row["images"] for row in read(capsys)["results"]] in ([6], [6, 6])

    queries, page = tmp_path / "queries", tmp_path / "page.md"
    arguments = ["eval", "--model", model, str(run / "last"), "--on", f"{data},scenes/park", "--split", "validation"]
    assert main([*arguments, "--queries", str(queries), "--out", str(page), "--json"]) == 0
    found = read(capsys)
    assert [(row["model"], row["data"]) for row in found["results"]] == [
        (name, source) for name in (model, str(run / "last")) for source in (data, "scenes/park")
    ]
    assert len(found["comparisons"]) == 4
    assert "## All data sets" in page.read_text(encoding="utf-8")

    files = sorted(queries.glob("*-scenes-park-validation.jsonl"))
    assert main(["compare", str(files[1]), str(files[0]), "--k", "1", "--json"]) == 0
    compared = json.loads(capsys.readouterr().out)
    again = [row for row in found["comparisons"] if row["data"] == "scenes/park"]
    assert [row["difference"] for row in compared] == [row["difference"] for row in again]
    assert main(["compare", str(files[1]), str(files[0])]) == 0
    assert capsys.readouterr().out.count("points of R@10") == 2


@pytest.mark.parametrize("given", [["--model", "X", "Y"], ["--model", "X", "--model", "Y"]])
def test_several_models_in_either_spelling(
    folder: Path, tmp_path: Path, model_directory: Path, capsys: pytest.CaptureFixture[str], given: list[str]
) -> None:
    other = tmp_path / "other"
    other.symlink_to(model_directory)
    paths = {"X": str(model_directory), "Y": str(other)}
    arguments = ["eval", *(paths.get(word, word) for word in given), "--on", str(folder), "--queries", str(tmp_path)]
    assert main([*arguments, "--json", "--batch", "5"]) == 0
    found = read(capsys)
    assert [row["model"] for row in found["results"]] == list(paths.values())
    assert set(found["results"][0]["caption_similarity"]) == {"pairwise", "hardest"}
    files = sorted(tmp_path.glob("*.jsonl"))
    files[0].write_bytes(files[0].read_bytes()[:-100])
    assert main(["compare", *map(str, files)]) == 1
    said = capsys.readouterr().err.strip()
    assert len(said.splitlines()) == 1
    assert f"{files[0]} is damaged" in said


def test_evaluation_of_data_without_splits_says_that_it_uses_everything(
    folder: Path, model_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "--model", str(model_directory), "--data", str(folder), "--quiet"]) == 0
    said = capsys.readouterr()
    assert "declares no splits: all 24 records are used" in said.err
    assert "24 images, 24 captions" in said.out


def test_check_fails_on_errors_and_training_names_them(
    folder: Path, tmp_path: Path, model_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "03.png").write_bytes((folder / "03.png").read_bytes()[:200])
    (folder / "04.txt").write_text(" \n")
    assert main(["data", "check", str(folder), "--quiet"]) == 1
    printed = capsys.readouterr().out
    assert "truncated image" in printed
    assert "empty caption" in printed
    train = ["train", "--recipe", "tiny", "--data", str(folder), "--model", str(model_directory), "--threads", "1"]
    assert main([*train, "--out", str(tmp_path / "run")]) == 1
    assert "1 of 24 rows" in capsys.readouterr().err  # the empty caption
    assert main([*train, "--out", str(tmp_path / "run"), "--read.max-bad", "0.042"]) == 1
    assert "1 of 23 records" in capsys.readouterr().err  # the truncated picture
    assert main([*train, "--out", str(tmp_path / "run"), "--read.max-bad", "0.2", "--optim.epochs", "1"]) == 0
    assert len((tmp_path / "run" / "left_out.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["data"], 2, "usage: hnclip data check"),
        (["data", "chekc"], 2, "usage: hnclip data check"),
        (["data", "--help"], 0, "usage: hnclip data check"),
        (["data", "check", "nowhere/at/all.csv"], 1, "no such file or directory"),
        (["eval", "--on", "docci"], 1, "where is docci?"),
        (["eval", "--out", "table.xls"], 1, "table.xls: its ending must be one of"),
        (["eval", "--split", "nonsense"], 1, "has no split 'nonsense'"),
        (["compare", "a.jsonl", "b.jsonl"], 1, "a.jsonl"),
    ],
)
def test_wrong_calls_are_one_clear_line(
    arguments: list[str],
    code: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("HNCLIP_DATA", raising=False)
    assert main(arguments) == code
    printed = capsys.readouterr()
    assert said in (printed.err if code else printed.out)
    assert "Traceback" not in printed.err


@pytest.mark.parametrize(
    "arguments", [["eval", "--top", "0"], ["eval", "--batch", "0"], ["compare", "a.jsonl", "b.jsonl", "--k", "0"]]
)
def test_ranges_are_checked_before_any_work(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert arguments[-2] in capsys.readouterr().err


def test_cached_images_are_listed_and_deleted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = [record.image for record in scene_records("park", "train", families=1, members=4)]
    load_images(images, ImageTransform(32), cache=tmp_path)
    old = tmp_path / "images" / "0123456789abcdef"
    old.mkdir()
    (old / "index.sqlite").write_bytes(bytes(1_500_000))
    command = ["data", "cache", "--read.cache", str(tmp_path)]
    assert main(command) == 0
    printed = capsys.readouterr().out
    for part in ("32px, bicubic: 4 images", "13 kB", "1.5 MB", "--delete old"):
        assert part in printed
    assert main([*command, "--delete", "old", "--json"]) == 0
    assert [(row["images"], row["deleted"]) for row in read(capsys)["caches"]] == [(0, True), (4, False)]
    assert not old.exists()
    (info,) = list_caches(tmp_path)
    with FileLock(info.path / "lock"):
        assert main([*command, "--delete", "all"]) == 1
    assert "in use" in capsys.readouterr().err
    assert main([*command, "--delete", "all"]) == 0
    assert list_caches(tmp_path) == []
    assert main(command) == 0
    assert main(["data"]) == 2
    assert main(["data", "--help"]) == 0
