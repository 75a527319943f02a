"""`hnclip diagnose` from data to report: what it finds, what it reuses, and what it makes of bad input."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from browser import open_browser
from hnclip.analysis.caption_pairs import caption_similarity
from hnclip.cli import main
from hnclip.config import ReadConfig
from hnclip.diagnose import diagnose
from hnclip.options import Diagnose, Opening

WORDS = ["a", "red", "house", "stands", "beside", "two", "small", "trees", "under", "the", "cloudy", "sky"]


def write_data(folder: Path, captions: Sequence[str], *, splits: Sequence[str] | None = None) -> Path:
    """A table of one picture for each caption."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "data.jsonl").open("w", encoding="utf-8") as file:
        for number, caption in enumerate(captions):
            pixels = np.random.default_rng(number).integers(0, 256, (20, 20, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{number}.png")
            row = {"image": f"{number}.png", "caption": caption}
            file.write(json.dumps(row | ({"split": splits[number]} if splits else {})) + "\n")
    return folder / "data.jsonl"


def sentences(count: int, seed: int = 0) -> list[str]:
    random = np.random.default_rng(seed)
    return [f"{number} {' '.join(random.choice(WORDS, 8))}" for number in range(count)]


def options(data: Path, model: Path, out: Path, **changed: Any) -> Diagnose:
    given = {"probe": False, "device": "cpu", "recipe": "tiny", **changed}
    read = given.pop("read", ReadConfig())
    return Diagnose(data=str(data), opening=Opening(), read=read, model=str(model), out=out, **given)


def run(*arguments: Any, **changed: Any) -> Any:
    return diagnose(options(*arguments, **changed))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, model_directory: Path) -> Any:
    """A diagnosis with all its parts, on 120 pairs of which some repeat each other."""
    folder = tmp_path_factory.mktemp("whole")
    captions = sentences(120)
    captions[5] = captions[4]
    splits = ["train"] * 90 + ["validation"] * 30
    data = write_data(folder / "data", captions, splits=splits)
    return run(data, model_directory, folder / "out", probe=True, gradients=True, batches=2, fractions=(0.5,))


def test_the_geometry_is_that_of_the_training_captions(whole: Any) -> None:
    found = whole.found
    assert (found.split, found.captions, found.records) == ("train", 90, 90)
    assert found.geometry.pairwise.total == 90 * 89 / 2
    assert found.geometry.pairwise.mean < found.geometry.hardest.mean <= 1 + 1e-6
    assert found.repeats.same_text == ((4, 5),)


def test_every_part_is_there_and_has_numbers(whole: Any) -> None:
    assert whole.found.gaps == {}
    numbers = json.loads((whole.report.parent / "report.json").read_text(encoding="utf-8"))
    assert numbers["geometry"]["pairwise"]["mean"] == pytest.approx(whole.found.geometry.pairwise.mean)
    assert len(numbers["gradients"]["measurements"]) == 2
    assert numbers["gradients"]["summary"]["dtypes"] == ["float32"]
    assert list(numbers["fractions"]) == ["50 %"]
    assert numbers["fractions"]["50 %"]["measurements"][0]["step"] == 0
    assert numbers["probe"]["verdict"] in ("raises", "lowers", "undecided")
    assert numbers["start"]["micro"]["negatives"] < numbers["start"]["batch"]["negatives"]
    assert sum(numbers["negatives"]["buckets"]["shares"]) == pytest.approx(1)
    assert {finding["level"] for finding in numbers["findings"]} <= {"act", "note", "good"}
    assert "Pairs that repeat each other" in [finding["title"] for finding in numbers["findings"]]


def test_the_report_lies_beside_its_figures(whole: Any) -> None:
    figures = {path.name for path in whole.report.parent.glob("*.png")}
    assert {"caption-similarity.png", "one-batch.png", "hardness-of-negatives.png", "near-duplicates.png"} <= figures
    assert {"gradients-at-the-start.png", "gradients-along-runs.png"} <= figures
    page = whole.report.read_text(encoding="utf-8")
    assert "<mark>" in page
    assert "data:image/" in page
    assert "://" not in page


def test_the_text_names_every_finding_and_the_report(whole: Any) -> None:
    text = whole.to_text()
    for finding in whole.found.findings():
        assert finding.title in text
        assert finding.number in text
        assert finding.advice in text
    assert text.endswith(f"report: {whole.report}")


def test_pressing_findings_come_first(whole: Any) -> None:
    levels = [finding.level for finding in whole.found.findings()]
    assert levels == sorted(levels, key=["act", "note", "good"].index)


def test_a_second_diagnosis_encodes_nothing(
    tmp_path: Path, model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hnclip.models.dual_encoder import DualEncoder

    data = write_data(tmp_path / "data", sentences(12))
    first = run(data, model_directory, tmp_path / "out")
    calls: list[int] = []
    encode_texts = DualEncoder.encode_texts

    def counted(self: DualEncoder, texts: Any, **given: Any) -> Any:
        calls.append(len(texts.lengths))
        return encode_texts(self, texts, **given)

    monkeypatch.setattr(DualEncoder, "encode_texts", counted)
    second = run(data, model_directory, tmp_path / "out")
    assert not calls
    assert second.found.to_dict() == first.found.to_dict()


def test_numbers_are_those_of_the_model_itself(tmp_path: Path, model_directory: Path) -> None:
    from hnclip.encode.loop import encode_captions
    from hnclip.models.load import load

    captions = sentences(15)
    found = run(write_data(tmp_path / "data", captions), model_directory, tmp_path / "out").found
    model = load(str(model_directory))
    text = encode_captions(model, model.text_transform(captions))
    alike = caption_similarity(text, torch.arange(15))
    assert found.geometry.pairwise.mean == pytest.approx(alike.pairwise, abs=1e-6)
    assert found.geometry.hardest.mean == pytest.approx(alike.hardest, abs=1e-6)
    assert found.scale == pytest.approx(model.scale.item())


def test_one_caption_is_a_clear_error(
    tmp_path: Path, model_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_data(tmp_path / "data", ["a red house"])
    arguments = ["diagnose", str(data), "--model", str(model_directory), "--out", str(tmp_path / "out"), "--quiet"]
    assert main(arguments) == 1
    printed = capsys.readouterr()
    assert "hnclip diagnose:" in printed.err
    assert "Traceback" not in printed.err
    assert "at least 2 images" in printed.err


def test_equal_captions_are_found_and_batches_a_gap(tmp_path: Path, model_directory: Path) -> None:
    found = run(write_data(tmp_path / "data", ["a red house"] * 20), model_directory, tmp_path / "out").found
    assert found.geometry.pairwise.mean == pytest.approx(1, abs=1e-5)
    assert [len(group) for group in found.repeats.same_text] == [20]
    assert found.negatives is None
    assert "batches" in found.gaps
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "Not shown" in page


def test_missing_pictures_leave_the_captions(tmp_path: Path, model_directory: Path) -> None:
    data = write_data(tmp_path / "data", sentences(40))
    for picture in (tmp_path / "data").glob("*.png"):
        picture.unlink()
    found = run(data, model_directory, tmp_path / "out", probe=True, gradients=True).found
    assert found.captions == 40
    assert found.negatives is not None
    assert found.probe is None
    assert found.start is None
    assert found.gradients is None
    for part in ("probe", "gradients"):
        assert "missing image" in found.gaps[part], part
    assert found.repeats.same_image is None
    assert all(row.query.picture is None for row in found.near)


def test_an_encoder_that_returns_nan_is_named(
    tmp_path: Path, model_directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from hnclip.core import ViewEmbeddings
    from hnclip.models.dual_encoder import DualEncoder

    def broken(self: DualEncoder, texts: Any, **given: Any) -> ViewEmbeddings:
        return ViewEmbeddings(torch.full((len(texts.lengths), 32), torch.nan))

    monkeypatch.setattr(DualEncoder, "encode_texts", broken)
    data = write_data(tmp_path / "data", sentences(10))
    arguments = ["diagnose", str(data), "--model", str(model_directory), "--out", str(tmp_path / "out"), "--no-probe"]
    assert main(arguments) == 1
    assert "NaN" in capsys.readouterr().err


def test_other_scripts_and_endless_captions_are_shown(tmp_path: Path, model_directory: Path) -> None:
    chinese = ["云雾缭绕的山间小路上有一辆红色摩托车", "云雾缭绕的山谷里有一辆红色摩托车"]
    arabic = "كلب صغير أمام بيت أحمر"
    captions = [*chinese, arabic, "a red house " * 80_000]  # the last is a megabyte
    found = run(write_data(tmp_path / "data", captions), model_directory, tmp_path / "out", threshold=0.1).found
    assert found.captions == 4
    assert found.truncated >= 1
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert len(page) < 5_000_000
    shown = page.replace("<mark>", "").replace("</mark>", "")
    for caption in (*chinese, arabic):
        assert caption in shown


@pytest.mark.slow
def test_an_edited_caption_does_not_meet_its_old_vector(tmp_path: Path, model_directory: Path) -> None:
    captions = sentences(12)
    first = run(write_data(tmp_path / "data", captions), model_directory, tmp_path / "out").found
    captions[3] = captions[4]
    second = run(write_data(tmp_path / "data", captions), model_directory, tmp_path / "out").found
    assert first.repeats.same_text == ()
    assert second.same_text == [["3.png", "4.png"]]
    again = run(write_data(tmp_path / "data", sentences(12)), model_directory, tmp_path / "out").found
    assert again.to_dict() == first.to_dict()


@pytest.mark.slow
def test_runs_on_edited_data_are_begun_anew(tmp_path: Path, model_directory: Path) -> None:
    splits = ["train"] * 24 + ["validation"] * 8

    def measured(captions: list[str]) -> Any:
        data = write_data(tmp_path / "data", captions, splits=splits)
        return run(data, model_directory, tmp_path / "out", fractions=(0.001, 0.5)).found

    first = measured(sentences(32))
    assert list(first.fractions) == ["50 %"]  # too small a share is a gap of its own
    assert "gradients along a run on 0.1 %" in first.gaps
    second = measured(sentences(32, seed=1))
    assert second.fractions["50 %"].gradients[0]["hn"] != first.fractions["50 %"].gradients[0]["hn"]


def test_doubles_are_no_negatives_that_could_meet(tmp_path: Path, model_directory: Path) -> None:
    captions = [caption for caption in sentences(40) for _ in range(2)]
    found = run(write_data(tmp_path / "data", captions), model_directory, tmp_path / "out").found
    assert found.geometry.hardest.mean == pytest.approx(1, abs=1e-5)
    assert found.negatives.hardest_of_all < 1 - 1e-4


def test_captions_that_only_the_cut_makes_equal_are_told_from_equal_ones(tmp_path: Path, model_directory: Path) -> None:
    long = " ".join(WORDS * 40)
    captions = [f"{long} one", f"{long} two", "A  red house", "a red house", *sentences(6)]
    found = run(write_data(tmp_path / "data", captions), model_directory, tmp_path / "out").found
    assert found.same_text == [["0.png", "1.png"], ["2.png", "3.png"]]
    assert found.cut_alike == 1
    numbers = {finding.title: finding.number for finding in found.findings()}
    assert numbers["Pairs that repeat each other"].startswith("1 group of equal captions")


@pytest.mark.slow
def test_splits_decide_whose_captions_are_looked_at(tmp_path: Path, model_directory: Path) -> None:
    def found(splits: list[str], **changed: Any) -> tuple[str, int]:
        data = write_data(tmp_path / "data", sentences(8), splits=splits)
        seen = run(data, model_directory, tmp_path / "out", **changed).found
        return seen.split, seen.captions

    assert found(["train"] * 5 + ["validation"] * 3) == ("train", 5)
    assert found(["validation"] * 5 + ["test"] * 3) == ("validation", 5)
    assert found(["test"] * 8, split="test") == ("test", 8)
    with pytest.raises(ValueError, match="name those to look at with --split: it has test"):
        found(["test"] * 8)


def test_pictures_that_return_nan_are_a_gap(
    tmp_path: Path, model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hnclip.core import ViewEmbeddings
    from hnclip.models.dual_encoder import DualEncoder

    encode_pixels = DualEncoder.encode_pixels

    def broken(self: DualEncoder, pixels: Any, **given: Any) -> ViewEmbeddings:
        return ViewEmbeddings(encode_pixels(self, pixels, **given).vectors * torch.nan)

    monkeypatch.setattr(DualEncoder, "encode_pixels", broken)
    splits = ["train"] * 80 + ["validation"] * 20
    data = write_data(tmp_path / "data", sentences(100), splits=splits)
    found = run(data, model_directory, tmp_path / "out", probe=True, gradients=True).found
    assert "not finite" in found.gaps["probe"]
    assert "not a number" in found.gaps["gradients"]
    assert (tmp_path / "out" / "report.json").is_file()


def test_json_is_what_the_report_holds(
    tmp_path: Path, model_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_data(tmp_path / "data", sentences(12))
    out = tmp_path / "out"
    arguments = ["diagnose", str(data), "--model", str(model_directory), "--out", str(out), "--no-probe", "--json"]
    assert main(arguments) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed.pop("report") == str(out / "report.html")
    assert printed == json.loads((out / "report.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "wrong", [["--fractions", "0.5", "2"], ["--threshold", "1.5"], ["--batches", "0"], ["--gamma", "-1"]]
)
def test_wrong_options_are_named_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: list[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["diagnose", "nowhere.csv", "--out", str(tmp_path / "out"), *wrong])
    assert ended.value.code == 2
    assert wrong[0] in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_split_that_is_not_there_is_named(
    tmp_path: Path, model_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_data(tmp_path / "data", sentences(6))
    arguments = ["diagnose", str(data), "--model", str(model_directory), "--out", str(tmp_path / "out"), "--no-probe"]
    assert main([*arguments, "--split", "tset"]) == 1
    assert "tset" in capsys.readouterr().err


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_the_page_is_readable_in_a_browser(whole: Any, tmp_path: Path, width: int, scheme: Any) -> None:
    complaints: list[str] = []
    with open_browser() as browser:
        page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(whole.report.as_uri())
        headings = page.locator("h2").all_text_contents()
        widest = page.evaluate("document.documentElement.scrollWidth")
        loaded = page.evaluate("[...document.images].map(image => image.complete && image.naturalWidth > 0)")
        page.screenshot(path=tmp_path / "page.png", full_page=True)
    assert complaints == []
    assert widest <= width
    assert len(loaded) > 20
    assert all(loaded)
    assert "What was found, and what to do" in headings
    assert "What heads on frozen features promise" in headings
    with Image.open(tmp_path / "page.png") as shot:
        assert shot.width == width
        corner = np.array(shot.convert("L"))[:40, :20]  # the page's own colour
    assert corner.mean() > 200 if scheme == "light" else corner.mean() < 60
