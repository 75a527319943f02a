"""Shows that look at data and models themselves: geometry, doubles, retrievals, efficiency."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hnclip.analysis.figures.words import joined
from hnclip.config import RunOptions
from hnclip.data.scenes import scene_records
from hnclip.models.load import load, save
from hnclip.recipes import miniature
from hnclip.studies import step_time
from hnclip.studies.catalogue import STUDIES
from hnclip.studies.findings import Findings, find
from hnclip.studies.matched import mean_similarity
from hnclip.studies.parts import FigurePart, Shown, TablePart, WordsPart
from hnclip.studies.plan import Setting
from hnclip.studies.shows import doubles, efficiency, geometry, retrievals
from hnclip.studies.store import Store
from hnclip.studies.study import Domain

TRAIN, VALIDATION, TEST = 16, 4, 12


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory, model_directory: Path) -> Setting:
    """Two domains of a few scenes each, as files. In the second, two training pairs have one caption, three others one
    picture, and one of the latter has the caption of a fourth."""
    root = tmp_path_factory.mktemp("data")
    for name, seed in (("plain", 1), ("double", 2)):
        rows = []
        for split, count in (("train", TRAIN), ("validation", VALIDATION), ("test", TEST)):
            for record in scene_records("park", split, families=count // 4, members=4, seed=seed):
                picture = f"{name}-{record.id.replace('/', '-')}.png"
                record.image.load().resize((24, 24)).save(root / picture)
                rows.append({"image": picture, "caption": record.captions[0], "split": split, "id": picture})
        if name == "double":
            rows[1]["caption"] = rows[0]["caption"]
            for copy in (5, 6):
                shutil.copy(root / rows[4]["image"], root / rows[copy]["image"])
            rows[6]["caption"] = rows[7]["caption"]
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = [str(root / f"{name}.jsonl") for name in ("plain", "double")]
    base = replace(miniature(), model=str(model_directory))
    return Setting(base, tuple(Domain(source, (source,)) for source in sources))


def found_of(study: str, setting: Setting, directory: Path) -> Findings:
    return find(STUDIES[study], setting, Store(directory, RunOptions(device="cpu")))


def only(shown: Shown, kind: type) -> list[Any]:
    return [part for part in shown.parts if isinstance(part, kind)]


def test_doubles_are_counted_by_domain(setting: Setting, tmp_path: Path) -> None:
    shown = doubles.show(found_of("duplicates", setting, tmp_path))
    (table,) = only(shown, TablePart)
    assert [row[1:] for row in table.rows] == [("16", "0", "0", "0"), ("16", "4", "3", "6")]
    assert not only(shown, WordsPart)
    assert shown.data[setting.domains[1].name] == {"pairs": 16, "caption": 4, "picture": 3, "either": 6}


def test_without_doubles_both_settings_are_the_same_training(setting: Setting, tmp_path: Path) -> None:
    shown = doubles.show(found_of("duplicates", replace(setting, domains=setting.domains[:1]), tmp_path))
    (words,) = only(shown, WordsPart)
    assert "the same training" in words.sentences[0]


def test_geometry_is_that_of_the_training_captions(
    setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    findings = found_of("geometry", setting, tmp_path)
    shown = geometry.show(findings)
    plain = setting.domains[0]
    (table,) = only(shown, TablePart)
    data = shown.data["domains"][plain.name]
    captions = [record.captions[0] for record in scene_records("park", "train", families=4, members=4, seed=1)]
    text = _encoded(setting, captions)  # [T, D]
    similarity = (text @ text.T).fill_diagonal_(-2)
    pairwise = (text @ text.T)[~torch.eye(TRAIN, dtype=torch.bool)].mean().item()
    assert data["pairwise"] == pytest.approx(pairwise, abs=1e-5)
    assert data["hardest"] == pytest.approx(similarity.amax(1).mean().item(), abs=1e-5)
    words = sum(len(caption.split()) for caption in captions) / TRAIN
    assert table.rows[0] == (plain.name, "16", "12", f"{words:.0f}", f"{pairwise:.2f}", f"{data['hardest']:.2f}")
    assert "Ours are of training captions. The paper's, of its Table A1, are of test captions" in table.notes[0]
    assert ("paper: DOCCI", "9,450", "5,100", "123", "0.84", "0.93") in table.rows
    # Micro-batches of 16 without doubles: all are each other's negatives, so shares are those of all pairs.
    off = similarity[similarity > -2]
    shares = [(off < 0.8).float().mean(), ((off >= 0.8) & (off < 0.9)).float().mean(), (off >= 0.9).float().mean()]
    assert data["negatives"]["shares"] == pytest.approx([share.item() for share in shares], abs=1e-5)
    assert len(data["batch"]) == 16
    # The mean is the one that a matched margin is made of.
    config = replace(setting.base, data=plain.data)
    assert data["pairwise"] == pytest.approx(mean_similarity(config, tmp_path / "measures", "cpu"), abs=1e-6)
    parts = {part.name: part for part in only(shown, FigurePart)}
    assert len(parts) == 4 + len(setting.domains)
    assert len(parts["geometry-distributions"].figure.axes) == 2
    assert len(parts["geometry-batch"].figure.axes) == 2 + 1  # and the scale of colours
    assert "share of in-batch negatives (%)" in parts["geometry-negatives"].figure.axes[0].get_xlabel()

    def encode_again(*args: Any, **options: Any) -> Tensor:
        raise AssertionError("the captions were encoded already")

    monkeypatch.setattr(geometry, "encode_captions", encode_again)
    assert geometry.show(findings).data == shown.data


def _encoded(setting: Setting, captions: list[str]) -> Tensor:
    model = load(setting.base.model)
    with torch.no_grad():
        return torch.cat([model.encode_texts(model.tokenize([caption])).vectors for caption in captions])


def test_near_duplicates_show_captions_beside_their_companions(setting: Setting, tmp_path: Path) -> None:
    config = replace(setting.base, data=setting.domains[0].data)
    found = geometry._look(config, setting.domains[0].galleries[0], load(config.model), tmp_path)
    assert 1 <= len(found.near) <= geometry.ROWS
    said = {record.captions[0][:40] for record in found.records}
    assert {joined(row.query.text)[:40] for row in found.near} <= said
    assert all(row.query.picture is not None for row in found.near)


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory, model_directory: Path) -> Path:
    """A model that ranks otherwise."""
    torch.manual_seed(3)
    model = load(model_directory)
    with torch.no_grad():
        for weight in model.backbone.visual_projection.parameters():
            weight.normal_()
    directory = tmp_path_factory.mktemp("models") / "other"
    save(model, directory)
    return directory


def test_retrievals_that_differ_are_counted_and_drawn(
    setting: Setting, tmp_path: Path, model_directory: Path, other_model: Path
) -> None:
    findings = found_of("retrievals", setting, tmp_path)
    plain, double = setting.domains
    for place, job in findings.jobs.items():
        if place.domain == plain.name or place.row == "InfoNCE":
            home = findings.store.home(job)
            shutil.copytree(model_directory if place.row == "InfoNCE" else other_model, home / "best")
            (home / "result.json").write_text("{}")
    shown = retrievals.show(findings)
    (table,) = only(shown, TablePart)
    assert table.headers[1:] == ("both", "only InfoNCE", "only HN-CLIP", "neither")
    first, second = table.rows
    counts = [int(cell) for cell in first[1:]]
    assert sum(counts) == TEST
    assert counts[1] + counts[2] > 0
    assert second == (double.name, "–", "–", "–", "–")
    assert list(shown.data["HN-CLIP against InfoNCE"][plain.name].values()) == counts
    assert any("runs are missing" in note for note in table.notes)
    (part,) = only(shown, FigurePart)
    labels = [axes.get_xlabel() for axes in part.figure.axes]
    assert any("InfoNCE" in label for label in labels)
    assert any("HN-CLIP" in label for label in labels)


def test_rows_that_agree_are_counted_but_not_drawn(setting: Setting, tmp_path: Path, model_directory: Path) -> None:
    alone = replace(setting, domains=setting.domains[:1])
    findings = found_of("retrievals", alone, tmp_path)
    for job in findings.jobs.values():
        home = findings.store.home(job)
        shutil.copytree(model_directory, home / "best")
        (home / "result.json").write_text("{}")
    shown = retrievals.show(findings)
    (table,) = shown.parts
    assert isinstance(table, TablePart)
    both, one, other, neither = map(int, table.rows[0][1:])
    assert (one, other, both + neither) == (0, 0, TEST)
    assert shown.data["HN-CLIP against InfoNCE"][alone.domains[0].name]["both"] == both


def test_without_runs_there_are_no_retrievals(setting: Setting, tmp_path: Path) -> None:
    shown = retrievals.show(found_of("retrievals", setting, tmp_path))
    (words,) = shown.parts
    assert isinstance(words, WordsPart)
    assert "4 of 4 runs are missing" in words.sentences[0]


def test_efficiency_is_measured_once_on_a_machine(
    setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    findings = found_of("efficiency", replace(setting, domains=setting.domains[:1]), tmp_path)
    monkeypatch.setattr(efficiency, "TURNS", 1)
    monkeypatch.setattr(efficiency, "MANY", 2)
    shown = efficiency.show(findings)
    (table,) = only(shown, TablePart)
    rows = {row[0]: row[1:] for row in table.rows}
    assert {name: row[:2] for name, row in rows.items()} == {
        "InfoNCE": ("none", "none"),
        "FineLIP": ("none", "none"),
        "GOAL": ("1 picture, 1 text", "regions"),
        "StructXLIP": ("3 pictures, 1 text", "regions, text"),
        "HN-CLIP": ("none", "none"),
    }
    assert rows["HN-CLIP"][3:] == ("1.00", "53", "1")
    assert rows["GOAL"][4:] == ("about 22", "2.4")
    assert rows["FineLIP"][4:] == ("–", "–")
    speeds = {found["row"]: found["pairs_per_second"] for found in shown.data["rows"]}
    assert all(speed > 0 for speed in speeds.values())
    # These scenes have no regions, which GOAL needs: then no row gets the real captions.
    assert {found["source"] for found in shown.data["rows"]} == {"synthetic batch"}
    assert "synthetic batch" in table.notes[0]
    turns = {found["row"]: found["turns"] for found in shown.data["rows"]}
    assert all(turns.values())
    ratio = next(found["over_hn_clip"] for found in shown.data["rows"] if found["row"] == "GOAL")
    assert ratio == pytest.approx(
        sum(one / two for one, two in zip(turns["GOAL"], turns["HN-CLIP"])) / len(turns["GOAL"])
    )

    def measure_again(*args: Any, **options: Any) -> dict[str, step_time.StepTime]:
        raise AssertionError("measured already")

    monkeypatch.setattr(efficiency, "measure_steps", measure_again)
    assert efficiency.show(findings).data == shown.data
    monkeypatch.setattr(efficiency, "machine", lambda device: {"processor": "another"})
    with pytest.raises(AssertionError, match="measured already"):
        efficiency.show(findings)
