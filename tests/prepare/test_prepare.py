"""`hnclip prepare` as a user calls it, and its matching against a literal copy of LISM."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from hnclip.cli import main
from hnclip.core import Box
from hnclip.data.batching import pad_texts
from hnclip.data.images import preprocess_image
from hnclip.data.manifest import apply_manifest, read_manifest
from hnclip.data.records import DataSet
from hnclip.data.scenes import scene_records
from hnclip.data.sources import open_data
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.load import load
from hnclip.prepare import run as prepare_run
from hnclip.prepare.run import crop_candidates, match_sentences

IMAGES = 6


@pytest.fixture(scope="module")
def model(model_directory: Path) -> DualEncoder:
    return load(model_directory).train()  # with dropout, which matching must turn off


def speckled(image: Image.Image, seed: int) -> Image.Image:
    """Without two places that look the same: which of equal crops is the most similar would be chance."""
    noise = np.random.default_rng(seed).integers(0, 256, (*image.size[::-1], 3), dtype=np.uint8)
    return Image.blend(image.convert("RGB"), Image.fromarray(noise), 0.3)


def cells(image: Image.Image, count: int) -> list[Box]:
    w, h = image.width // count, image.height // count
    return [(x * w, y * h, (x + 1) * w, (y + 1) * h) for y in range(count) for x in range(count)]


def literal_matches(
    model: DualEncoder, image: Image.Image, boxes: list[Box], sentences: list[str]
) -> list[tuple[Box, str, float]]:
    """GOAL's steps, one crop and one sentence at a time: candidates = [full image] + crops; logits_per_image; each
    sentence to the argmax; sentences of the full image are deleted."""
    entries = []
    with torch.no_grad():
        scale = model.backbone.logit_scale.exp().item()
        for sentence in sentences:
            (ids,) = model.text_transform([sentence])
            text = model.encode_texts(pad_texts([ids], model.text_transform.pad)).vectors[0].double()
            logits = []
            for candidate in [image, *(image.crop(box) for box in boxes)]:
                pixels = preprocess_image(candidate, model.image_transform)[None]
                vector = model.encode_images(pixels).vectors[0].double()
                logits.append(scale * float((vector / vector.norm()) @ (text / text.norm())))
            best = max(range(len(logits)), key=logits.__getitem__)
            if best > 0:
                entries.append((boxes[best - 1], sentence, logits[best]))
    return sorted(entries, key=lambda entry: -entry[2])


@pytest.mark.parametrize("batch", [3, 128])
def test_matches_are_those_of_the_literal_steps(model: DualEncoder, batch: int) -> None:
    matched = dropped = shared = 0
    for number, record in enumerate(scene_records("park", "train", families=2, members=4)[:5]):
        image = speckled(record.image.load(), number)
        sentences = [region.sentence for region in record.regions] + ["a small red tree and " * 100]  # is cut
        boxes, pixels = crop_candidates(image, cells(image, number) if number else [], model.image_transform)
        found = match_sentences(model, boxes, pixels, sentences, batch=batch)
        assert model.training
        expected = literal_matches(model.eval(), image, boxes, sentences)
        model.train()
        assert [(each["box"], each["sentence"]) for each in found] == [(box, text) for box, text, _ in expected]
        assert [each["score"] for each in found] == pytest.approx([score for *_, score in expected], abs=1e-4)
        matched, dropped = matched + len(found), dropped + len(sentences) - len(found)
        shared += len(found) - len({each["box"] for each in found})
    assert min(matched, dropped, shared) > 0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Images with captions in text files of the same names."""
    directory = tmp_path / "images"
    directory.mkdir()
    for number, record in enumerate(scene_records("park", "train", families=2, members=4)[:IMAGES]):
        record.image.load().crop((0, 0, 192, 100 + 8 * number)).save(directory / f"{number}.png")
        (directory / f"{number}.txt").write_text(record.captions[0] + "\n", encoding="utf-8")
    return directory


def run(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["prepare", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def regions(data: Path | str, model: Path, *more: str) -> list[str]:
    return ["regions", str(data), "--model", str(model), "--batch", "8", "--device", "cpu", "--workers", "2", *more]


def test_regions_of_a_folder(folder: Path, model_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(capsys, *regions(folder, model_directory))
    assert (found["records"], found["made"], found["kept"], found["problems"]) == (IMAGES, IMAGES, 0, [])
    made, applied, _ = apply_manifest(open_data(str(folder)).records, read_manifest(Path(found["manifest"]), "regions"))
    assert applied == IMAGES
    assert any(record.regions for record in made)
    for record in made:
        width, height = record.image.load().size
        assert list(record.regions) == sorted(record.regions, key=lambda region: -(region.score or 0))
        for region in record.regions:
            left, top, right, bottom = region.box
            assert 0 <= left < right <= width
            assert 0 <= top < bottom <= height
            assert region.sentence in record.captions[0]


def test_only_changed_records_are_made_again(
    folder: Path, model_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = regions(folder, model_directory, "--proposer", "grid")
    first = run(capsys, *words)
    assert run(capsys, *words) == {**first, "made": 0, "kept": IMAGES}
    (folder / "1.txt").write_text("A car. A tree.\n", encoding="utf-8")
    Image.new("RGB", (60, 60), "red").save(folder / "2.png")
    assert run(capsys, *words)["made"] == 2


def test_unusable_records_are_listed_and_own_regions_are_kept_unless_a_proposer_is_named(
    folder: Path, model_directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "0.png").write_bytes(b"not an image")
    words = regions(folder, model_directory, "--proposer", "grid")
    found = run(capsys, *words)
    assert main(["prepare", *words]) == 0
    assert "1 skipped" in capsys.readouterr().out
    kinds = [(problem["where"], problem["kind"]) for problem in found["problems"]]
    assert (kinds, found["made"]) == ([("0", "corrupt image")], IMAGES - 1)
    own = scene_records("park", "train", families=1, members=4)
    own[0] = replace(own[0], regions=())
    monkeypatch.setattr(prepare_run, "open_data", lambda source, read, splits: DataSet(source, tuple(own)))
    words = regions("some.json", model_directory, "--out", str(folder / "a"))
    for more, numbers in (([], (3, 1)), (["--proposer", "grid", "--replace"], (0, 4))):
        found = run(capsys, *words, *more)
        assert (found["own"], found["made"]) == numbers


def test_captions_are_filtered_and_a_failing_filter_keeps_earlier_results(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The shipped one, and one of the user's that fails once: what was done before is kept."""
    shipped = run(capsys, "text", str(folder), "--out", str(tmp_path / "a"))
    assert shipped["counts"] == {"captions": IMAGES, "changed": IMAGES}
    assert run(capsys, "text", str(folder), "--read.prepared", str(tmp_path / "a"))["kept"] == IMAGES
    code = "calls = []\ndef strict(caption):\n    calls.append(caption)\n"
    code += "    if len(calls) == 4: raise RuntimeError('busy')\n    return caption.upper()\n"
    (tmp_path / "own_filters.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["prepare", "text", str(folder), "--filter", "own_filters:strict"]) == 1
    assert "busy" in capsys.readouterr().err
    found = run(capsys, "text", str(folder), "--filter", "own_filters:strict", "--workers", "2")
    assert (found["made"], found["kept"], found["counts"]["changed"]) == (IMAGES - 3, 3, IMAGES)
