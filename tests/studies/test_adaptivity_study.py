"""The crossed table: chosen without the test split, and saying only what its intervals support."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev

import pytest
import torch

from hnclip.analysis.head_probe import Change
from hnclip.analysis.heads import TowerFeatures
from hnclip.evaluate.bootstrap import Estimate
from hnclip.evaluate.ranks import Ranks
from hnclip.studies import adaptivity as module
from hnclip.studies.adaptivity import AdaptivityOptions, adaptivity, cross
from hnclip.studies.adaptivity_result import Adaptivity, Comparison, Row, clear_marks, questions
from hnclip.studies.tower_heads import HeadSettings, MarginLoss

HEADS = HeadSettings(epochs=2, micro_batch=8, accumulate=2, width=4)


def pairs(count: int, seed: int, captions: int = 1) -> TowerFeatures:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(count, 3, generator=generator)
    owner = torch.arange(count).repeat_interleave(captions)
    image, text = (
        rows @ torch.randn(3, width, generator=torch.Generator().manual_seed(width))
        + 0.3 * torch.randn(len(rows), width, generator=generator)
        for rows, width in ((hidden, 6), (hidden[owner], 5))
    )
    return TowerFeatures(image, text, owner, torch.arange(count), torch.arange(len(owner)))


SPLITS = {"train": pairs(70, 0, 2), "validation": pairs(20, 1), "test": pairs(24, 2, 2)}


def options(out: Path, **changes) -> AdaptivityOptions:
    given = {"rates": (0.1,), "margins": (0.1,), "gammas": (0.25, 0.5), "affine_gammas": (0.2,), "seeds": (0, 1)}
    return AdaptivityOptions(model="towers", data="pairs", out=out, heads=HEADS, **{**given, **changes})


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("study")


@pytest.fixture(scope="module")
def found(kept: Path) -> Adaptivity:
    return cross(SPLITS, options(kept))


def decided(result: Adaptivity) -> dict[str, tuple]:
    return {row.key: (row.negatives, row.loss, row.rate, row.epoch, row.validation) for row in result.rows}


def test_every_cell_has_a_loss_of_its_own_family(found) -> None:
    rows = found.by_key
    for block in ("micro", "batch"):
        assert rows[f"{block}/infonce"].loss == MarginLoss()
        assert rows[f"{block}/fixed"].loss == MarginLoss(0.1)
        assert rows[f"{block}/hn"].loss in (MarginLoss(gamma=0.25), MarginLoss(gamma=0.5))
        assert rows[f"{block}/affine"].loss == MarginLoss(0.1, 0.2, centred=True)
        assert all(row.negatives == block for key, row in rows.items() if key.startswith(f"{block}/"))
    assert rows["setting/hn"].loss == MarginLoss(gamma=0.5)
    assert rows["setting/hn"].negatives == "micro"


def test_the_fixed_margin_beside_l_hn_is_as_large_as_its_mean(found, kept) -> None:
    hn = found.by_key["setting/hn"]
    if hn.similarity > 0:
        assert found.by_key["setting/fixed"].loss == MarginLoss(0.5 * hn.similarity)
    else:
        assert "setting/fixed" not in found.by_key
    cells = 2 * (1 + 1 + 2 + 1)  # losses; L_HN at γ 0.5 is among them
    assert len(list((kept / "runs").iterdir())) == (cells + (hn.similarity > 0)) * 2
    assert options(kept).runs == (cells + 2) * 2


@pytest.mark.parametrize(("similarity", "there"), [(0.4, True), (-0.1, False)])
def test_without_a_mean_there_is_nothing_to_imitate(tmp_path, monkeypatch, similarity, there) -> None:
    monkeypatch.setattr(module.Chosen, "mean", lambda self, what: similarity)
    few = options(tmp_path, gammas=(0.5,), seeds=(0,))
    rows = cross(SPLITS, few).by_key
    assert ("setting/fixed" in rows) == there
    if there:
        assert rows["setting/fixed"].loss.margin == pytest.approx(0.2)


def test_the_test_split_chooses_nothing(found, tmp_path) -> None:
    test = SPLITS["test"]
    scrambled = replace(test, image=test.image.roll(5, 0), text=-test.text)
    other = cross({**SPLITS, "test": scrambled}, options(tmp_path))
    assert decided(other) == decided(found)
    assert [row.recall for row in other.rows] != [row.recall for row in found.rows]


def test_the_validation_split_chooses(found, tmp_path) -> None:
    other = cross({**SPLITS, "validation": pairs(20, 40)}, options(tmp_path))
    assert decided(other) != decided(found)


def test_a_second_study_trains_nothing_and_prints_the_same(found, kept, monkeypatch) -> None:
    monkeypatch.setattr("hnclip.studies.head_runs.train_tower_heads", None)
    again = cross(SPLITS, options(kept))
    assert {**again.to_dict(), "seconds": 0} == {**found.to_dict(), "seconds": 0}
    assert again.to_text() == found.to_text()


def test_differences_are_those_of_the_rows(found) -> None:
    rows = found.by_key
    assert found.comparisons
    for comparison in found.comparisons:
        ours, base = rows[comparison.ours], rows[comparison.base]
        for name in ("text_to_image", "image_to_text"):
            difference = fmean(ours.recall[name][1]) - fmean(base.recall[name][1])
            assert getattr(comparison.change, name).mean == pytest.approx(difference)
        assert comparison.change.mean.low <= comparison.change.mean.mean <= comparison.change.mean.high


def test_all_questions_are_asked() -> None:
    every = {f"{block}/{family}" for block in ("micro", "batch") for family in ("infonce", "fixed", "hn", "affine")}
    asked = {(ours, base) for _, ours, base in questions({*every, "setting/hn", "setting/fixed"})}
    for block in ("micro", "batch"):
        assert {(f"{block}/{family}", f"{block}/infonce") for family in ("fixed", "hn", "affine")} <= asked
        assert {(f"{block}/hn", f"{block}/fixed"), (f"{block}/affine", f"{block}/fixed")} <= asked
    assert {(f"batch/{family}", f"micro/{family}") for family in ("infonce", "fixed", "hn", "affine")} <= asked
    assert {
        ("setting/hn", "micro/infonce"),
        ("setting/fixed", "micro/infonce"),
        ("setting/hn", "setting/fixed"),
    } <= asked
    assert not any("setting/fixed" in pair for pair in [(o, b) for _, o, b in questions({*every, "setting/hn"})])


def row(key: str, loss: MarginLoss) -> Row:
    recall = {name: {1: (30.0, 32.0), 5: (50.0, 50.0), 10: (60.0, 60.0)} for name in ("text_to_image", "image_to_text")}
    return Row(key, "micro", loss, 0.01, 2, 31.0, 20.0, 0.1, recall)


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [(0.2, 2.0, "clearly higher than"), (-2.0, -0.2, "clearly lower than"), (-0.5, 1.5, "not clearly different from")],
)
def test_a_sentence_claims_what_the_interval_supports(low, high, words) -> None:
    rows = {"micro/hn": row("micro/hn", MarginLoss(gamma=0.5)), "micro/infonce": row("micro/infonce", MarginLoss())}
    mean = Estimate((low + high) / 2, low, high)
    sentence = Comparison("Does it?", "micro/hn", "micro/infonce", Change(mean, mean, mean)).sentence(rows)
    assert sentence.startswith(f"Does it? R@1 of L_HN, γ 0.5 (micro-batch) is {words} that of InfoNCE (micro-")
    assert sentence.endswith(f"{mean.mean:+.1f} [{low:+.1f}, {high:+.1f}] points.")


def ranks(hits: int, queries: int = 100) -> Ranks:
    found = torch.full((queries,), 2)
    found[:hits] = 1
    return Ranks(found, found.flip(0), torch.arange(queries))


def test_marks_need_clear_differences() -> None:
    families = torch.arange(100)
    clear = clear_marks({"a": [ranks(60)] * 3, "b": [ranks(20)] * 3, "c": [ranks(21)] * 3}, families)
    assert clear == {("a", "text_to_image"): "best", ("a", "image_to_text"): "best"}
    second = clear_marks({"a": [ranks(90)] * 3, "b": [ranks(60)] * 3, "c": [ranks(21)] * 3}, families)
    assert second["b", "text_to_image"] == "second"
    assert clear_marks({"a": [ranks(22)] * 3, "b": [ranks(20)] * 3}, families) == {}
    assert clear_marks({"a": [ranks(62)] * 3, "b": [ranks(60)] * 3, "c": [ranks(20)] * 3}, families) == {}
    assert clear_marks({"a": [ranks(22)] * 3}, families) == {}
    noisy = clear_marks({"a": [ranks(60), ranks(10), ranks(50)], "b": [ranks(10), ranks(60), ranks(45)]}, families)
    assert noisy == {}  # seeds that disagree


def test_what_is_written(found) -> None:
    plain = json.loads(json.dumps(found.to_dict()))
    first = plain["rows"][0]
    assert first["text_to_image"]["R@1"]["seeds"] == list(found.rows[0].recall["text_to_image"][1])
    assert first["text_to_image"]["R@10"]["std"] == pytest.approx(stdev(found.rows[0].recall["text_to_image"][10]))
    assert plain["settings"]["margins"] == [0.1]
    assert plain["captions"] == {"train": 140, "validation": 20, "test": 48}
    text, markdown, latex = found.to_text(), found.to_markdown(), found.to_latex()
    assert all(sentence in text and f"- {sentence}" in markdown for sentence in found.sentences())
    values = found.by_key["batch/affine"].recall["text_to_image"][1]
    assert f"{fmean(values):.1f} ± {stdev(values):.1f}" in markdown
    assert r"\begin{tabular}" in latex
    assert markdown.count("| micro-batch |") == len(found.rows) - 4 + 1  # InfoNCE stands in both blocks
    assert plain["grid"][0] == {
        "loss": {"margin": 0.0, "gamma": 0.0, "centred": False},
        "negatives": "micro",
        "rate": 0.1,
        "epoch": plain["grid"][0]["epoch"],
        "validation": plain["grid"][0]["validation"],
    }
    assert plain["grid"][0]["validation"] == found.rows[0].validation
    assert len(plain["grid"]) == 2 * 5 + len(found.rows) - 8
    assert all(note in text and note in markdown for note in found.notes())


def test_choices_at_the_edge_are_said(found) -> None:
    rows = [
        replace(found.by_key["setting/hn"], similarity=0.2, epoch=1, rate=0.05),
        replace(found.by_key["micro/hn"], loss=MarginLoss(gamma=0.25), rate=0.05, epoch=2),
        replace(found.by_key["batch/affine"], loss=MarginLoss(0.2, 0.2, centred=True), rate=0.01, epoch=1),
    ]
    settings = {**found.settings, "rates": [0.01, 0.05, 0.1], "margins": [0.1, 0.2, 0.3], "affine_gammas": [0.2]}
    mean, edges = replace(found, rows=tuple(rows), settings=settings).notes()
    assert "mean Ḡ of 0.200 among its negatives: its mean margin is 0.100, which" in mean
    assert edges == (
        "Chosen at the edge of their grid: L_HN, γ 0.25 (micro-batch): γ 0.25, the last epoch; "
        "affine, m 0.2, γ 0.2 (whole batch): rate 0.01."
    )
    inside = replace(found, rows=tuple(rows[:1]), settings=settings).notes()
    assert len(inside) == 1
    negative = replace(found, rows=(replace(rows[0], similarity=-0.1),), settings=settings).notes()
    assert "too small to imitate" in negative[0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"margins": ()}, "margins must name"),
        ({"gammas": (0.1, 0.1)}, "gammas must name"),
        ({"rates": (0.0,)}, "rates must be positive"),
        ({"affine_gammas": (float("inf"),)}, "affine_gammas must be positive"),
        ({"gamma": 0.0}, "gamma must be positive"),
    ],
)
def test_options_that_make_no_sense(tmp_path, changes, words) -> None:
    with pytest.raises(ValueError, match=words):
        options(tmp_path, **changes)


def write_data(directory: Path, splits: list[str]) -> str:
    from PIL import Image

    lines = []
    for number, split in enumerate(splits):
        Image.new("RGB", (8, 8), (number, 9, 9)).save(directory / f"{number}.png")
        lines.append(json.dumps({"image": f"{number}.png", "caption": f"picture {number}", "split": split}))
    (directory / "data.jsonl").write_text("\n".join(lines) + "\n")
    return str(directory / "data.jsonl")


@pytest.mark.parametrize(
    ("splits", "words"),
    [
        (["train"] * 6, "no split 'test'"),
        (["test"] * 6, "no split 'train'"),
        (["train", "test"], "too few"),
    ],
)
def test_data_without_a_split(tmp_path, splits, words) -> None:
    given = AdaptivityOptions(model="bundled", data=write_data(tmp_path, splits), out=tmp_path / "out")
    with pytest.raises(ValueError, match=words):
        adaptivity(given)


def test_from_towers_to_a_table(tmp_path, model_directory, caplog) -> None:
    """All of it on pictures and a model of two small towers; the second time nothing is encoded or trained."""
    data = write_data(tmp_path, ["train"] * 64 + ["val"] * 16 + ["test"] * 16)
    caplog.set_level("INFO", logger="hnclip")
    given = options(tmp_path / "out", rates=(0.01,), gammas=(0.5,), seeds=(0,))
    given = replace(given, model=str(model_directory), data=data, device="cpu")
    first = adaptivity(given)
    assert first.pictures == {"train": 64, "validation": 16, "test": 16}
    assert "train 64, validation 16, test 16" in caplog.messages[0]
    again = adaptivity(given)
    assert again.to_text() == first.to_text()
