"""`hnclip diagnose` from data to report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from hnclip.analysis import diagnose as module
from hnclip.analysis.advice import CHANCE_TITLE, TOO_FEW_TITLE
from hnclip.analysis.captions import caption_similarity
from hnclip.analysis.diagnose import DiagnoseResult, diagnose
from hnclip.cli import main
from hnclip.data.scenes import scene_records
from hnclip.encode.loop import encode_captions
from hnclip.models.load import load

SUBJECTS = ["Clusters", "γ", "Negatives", "Scale"]
WORDS = ["a", "red", "house", "stands", "near", "two", "small", "trees", "under", "the", "cloudy", "sky"]


def write_data(folder: Path, captions: Sequence[str], images: Sequence[Image.Image] = ()) -> Path:
    """A table of one image for each caption, of noise if not given."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number, caption in enumerate(captions):
        pixels = np.random.default_rng(number).integers(0, 256, (20, 20, 3), dtype=np.uint8)
        (images[number] if images else Image.fromarray(pixels)).save(folder / f"{number}.png")
        rows.append(json.dumps({"image": f"{number}.png", "caption": caption}))
    (folder / "data.jsonl").write_text("\n".join(rows), encoding="utf-8")
    return folder / "data.jsonl"


def sentences(count: int) -> list[str]:
    random = np.random.default_rng(0)
    return [f"{number} {' '.join(random.choice(WORDS, 8))}" for number in range(count)]


def run(data: Path | str, out: Path, **changed: Any) -> DiagnoseResult:
    return diagnose(str(data), out=out, **{"device": "cpu", "recipe": "tiny", **changed})


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DiagnoseResult]:
    """120 scenes that the bundled model knows, with one duplicate and one missing image."""
    folder = tmp_path_factory.mktemp("scenes")
    records = list(scene_records("park", "train", families=60))
    records[5] = records[4]
    data = write_data(
        folder / "data", [record.captions[0] for record in records], [record.image.load() for record in records]
    )
    (folder / "data" / "7.png").unlink()
    return data, run(data, folder / "out", gradients=True, batches=2)


def test_all_sections_have_numbers_findings_and_figures(scenes: tuple[Path, DiagnoseResult]) -> None:
    page = scenes[1].page
    numbers = json.loads(page.with_suffix(".json").read_text(encoding="utf-8"))
    assert numbers["missing"] == {}
    assert (numbers["split"], numbers["records"], numbers["captions"], numbers["skipped"]) == ("all", 119, 119, 1)
    assert numbers["duplicates"]["equal_captions"] == [["4.png", "5.png"]]
    assert numbers["duplicates"]["equal_images"] == [["4.png", "5.png"]]
    assert numbers["similarity"]["pairwise"]["count"] == 119 * 118 / 2
    assert numbers["retrieval"]["share_in_nearest"] > 0.8
    micro, batch, memory = (numbers["losses"][kind]["negatives"] for kind in ("micro", "batch", "memory"))
    assert micro < batch < memory
    negatives = numbers["negatives"]
    assert negatives["hardest"] <= negatives["hardest_of_all"] <= numbers["similarity"]["hardest"]["mean"]
    assert len(numbers["gradients"]["measurements"]) == 2
    assert [finding["title"].partition(":")[0] for finding in numbers["advice"]] == SUBJECTS
    assert {path.stem for path in page.parent.glob("*.png")} == {"caption-similarity", "one-batch", "gradients"}


def test_a_second_call_encodes_nothing_with_any_batch_size(
    scenes: tuple[Path, DiagnoseResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    data, first = scenes
    known, out = first.to_dict()["losses"], first.page.parent
    with monkeypatch.context() as patch:
        for name in ("encode_captions", "encode_pixels"):
            patch.setattr(module, name, None)
        assert run(data, out, batch=16).to_dict()["losses"] == known
    for file in (out / "features").iterdir():  # damaged files are made again
        file.write_bytes(file.read_bytes()[:100])
    data.write_text(data.read_text(encoding="utf-8").replace("tree", "lamp"), encoding="utf-8")
    assert run(data, out).to_dict()["losses"] != known


@pytest.mark.parametrize(("count", "title"), [(120, CHANCE_TITLE), (12, TOO_FEW_TITLE)])
def test_no_advice_at_chance_or_of_few_records(tmp_path: Path, model_directory: Path, count: int, title: str) -> None:
    captions = sentences(count)
    numbers = run(write_data(tmp_path / "data", captions), tmp_path / "out", model=str(model_directory)).to_dict()
    assert title in {finding["title"] for finding in numbers["findings"]}
    assert numbers["advice"] == []
    model = load(str(model_directory))
    expected = caption_similarity(encode_captions(model, model.text_transform(captions)), torch.arange(count))
    for name in ("pairwise", "hardest"):
        assert numbers["similarity"][name]["mean"] == pytest.approx(expected[name], abs=1e-6)


def test_without_images_captions_are_analysed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_data(tmp_path / "data", sentences(120))
    for image in (tmp_path / "data").glob("*.png"):
        image.unlink()
    assert main(["diagnose", str(data), "--out", str(tmp_path / "out"), "--recipe", "tiny", "--json"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert numbers["records"] == 120
    assert {*numbers["missing"]} == {"Retrieval", "Losses before the first step", "Gradients before the first step"}
    assert "missing image" in numbers["missing"]["Retrieval"]
    assert [finding["title"].partition(":")[0] for finding in numbers["advice"]] == SUBJECTS[:2]
