"""Shows that read logs and evaluations of runs: convergence, samples, gradients. The runs here are written by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import small_studies
import torch

from hnclip.analysis.figures import convergence_grid_figure
from hnclip.evaluate.ranks import Ranks
from hnclip.evaluate.retrieval import EvaluationResult
from hnclip.studies.catalogue import STUDIES
from hnclip.studies.findings import Findings
from hnclip.studies.outcome import Outcome
from hnclip.studies.outcome import show as show_all
from hnclip.studies.parts import FigurePart, Shown, TablePart, WordsPart
from hnclip.studies.plan import Job
from hnclip.studies.saved_result import write_result
from hnclip.studies.shows import convergence, gradients, samples

DOMAINS = ("park", "shelf")


def runs_of(
    study: str, directory: Path, *, seeds: tuple[int, ...] = (1,), domains: tuple[str, ...] = DOMAINS
) -> Findings:
    """A study none of whose runs is there yet."""
    return small_studies.findings(directory, STUDIES[study], lambda *place: None, domains=domains, seeds=seeds)


def evaluation(epoch: int, forward: float, backward: float) -> dict[str, Any]:
    sides = {"text_to_image": {"R@1": forward}, "image_to_text": {"R@1": backward}}
    return {"kind": "evaluation", "epoch": epoch, **sides, "mean_R@1": (forward + backward) / 2}


def finish(findings: Findings, job: Job, log: list[Mapping[str, Any]], recall: float = 0.0) -> None:
    """Make a run look finished: its log, its result, and the same recall on every gallery."""
    home = findings.store.home(job)
    home.mkdir(parents=True)
    (home / "result.json").write_text("{}")
    (home / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in log))
    metrics = {key: value for key, value in evaluation(0, recall + 1, recall - 1).items() if "_" in key}
    for gallery in job.galleries:
        ones = torch.ones(8, dtype=torch.int64)
        ranks, groups = Ranks(ones, ones.clone(), torch.arange(8)), torch.arange(8)
        ids = tuple(map(str, range(8)))
        result = EvaluationResult(ranks, groups, ids, metrics, data=gallery.name, split="test")
        write_result(findings.store.result_path(job, gallery), result)


def only(shown: Shown, kind: type) -> list[Any]:
    return [part for part in shown.parts if isinstance(part, kind)]


@pytest.mark.parametrize(
    ("study", "show"),
    [("convergence", convergence.show), ("samples", samples.show), ("gradients", gradients.show)],
)
def test_without_runs_a_show_says_how_many_are_missing(
    study: str, show: Callable[[Findings], Shown], tmp_path: Path
) -> None:
    shown = show(runs_of(study, tmp_path))
    (words,) = only(shown, WordsPart)
    assert len(shown.parts) == 1
    runs = sum(2 if row.trained else 1 for row in STUDIES[study].rows)  # an untrained model is of no domain
    assert f"{runs} of {runs} runs are missing" in words.sentences[0]


def test_convergence_is_the_mean_over_seeds_and_says_who_reaches_infonce(tmp_path: Path) -> None:
    findings = runs_of("convergence", tmp_path, seeds=(1, 2))
    # After epochs 0, 1 and 2, averages of both directions of seed 1; seed 2 is 4 points higher.
    logs = {"InfoNCE": (10, 30, 20), "GOAL": (10, 20, 30), "HN-CLIP": (10, 40, 50), "StructXLIP": (10, 20, 29.5)}
    for place, job in findings.jobs.items():
        if place.domain == "park" and place.row in logs:
            lift = 4 * (place.seed - 1)
            values = enumerate(logs[place.row])
            finish(findings, job, [evaluation(epoch, value + lift + 5, value + lift - 5) for epoch, value in values])
    shown = convergence.show(findings)
    (table,) = only(shown, TablePart)  # nothing of the second domain
    assert table.headers == ("method", "epoch 0", "epoch 1", "epoch 2", "epochs to 32.0")
    assert {row[0]: row[1:] for row in table.rows} == {
        "InfoNCE": ("12.0", "32.0", "22.0", "1"),
        "FineLIP": ("–", "–", "–", "–"),
        "GOAL": ("12.0", "22.0", "32.0", "2"),
        "StructXLIP": ("12.0", "22.0", "31.5", "never"),
        "HN-CLIP": ("12.0", "42.0", "52.0", "1"),
    }
    assert any("12 of 20 runs are missing" in note for note in table.notes)
    found = shown.data["park"]
    assert found["best_of_peer"] == 32
    assert found["rows"]["GOAL"]["epochs"][2]["text_to_image"]["R@1"] == pytest.approx(37)
    (part,) = only(shown, FigurePart)
    assert len(part.figure.axes) == 3
    (line,) = [line for line in part.figure.axes[0].lines if list(line.get_ydata()) == [12, 42, 52]]
    assert [len(axes.lines) for axes in part.figure.axes] == [4, 4, 4]
    assert list(part.figure.axes[1].lines[-1].get_ydata()) == [17, 47, 57]  # text→image
    assert list(line.get_xdata()) == [0, 1, 2]


def test_the_model_before_training_is_no_epoch_of_training() -> None:
    entries = [evaluation(0, 50, 50), evaluation(1, 30, 40), evaluation(2, 40, 50), evaluation(3, 60, 60)]
    assert convergence.epochs_to(entries, 45) == 2
    assert convergence.epochs_to(entries[:2], 45) is None
    assert convergence.epochs_to([evaluation(1, 0.1, 0.2), evaluation(2, 1, 1)], 0.15) == 1  # whatever their last bits


def test_an_epoch_that_a_seed_lacks_does_not_count(tmp_path: Path) -> None:
    findings = runs_of("convergence", tmp_path, seeds=(1, 2), domains=("park",))
    for place, job in findings.jobs.items():
        if place.row == "InfoNCE":
            finish(findings, job, [evaluation(epoch, 20, 20) for epoch in range(1 + place.seed)])
    (table,) = only(convergence.show(findings), TablePart)
    assert table.headers[1:-1] == ("epoch 0", "epoch 1")


def test_the_convergence_grid_has_a_column_per_domain_and_names_units() -> None:
    runs = {name: [evaluation(0, 10, 20), evaluation(1, 30, 40)] for name in "ab"}
    figure = convergence_grid_figure({"park": runs, "shelf": {"b": runs["b"]}})
    panels = figure.axes
    assert len(panels) == 6
    assert [axes.get_title() for axes in panels[:2]] == ["park", "shelf"]
    assert all("R@1 (%)" in axes.get_ylabel() for axes in panels[::2])
    assert [axes.get_xlabel() for axes in panels[4:]] == ["epoch (0: before training)"] * 2
    # The same run looks the same in both columns, whatever is missing.
    assert panels[1].lines[0].get_color() == panels[0].lines[1].get_color() != panels[0].lines[0].get_color()
    assert [list(axes.lines[-1].get_ydata()) for axes in panels[1::2]] == [[15, 35], [10, 30], [20, 40]]
    with pytest.raises(ValueError, match="empty"):
        convergence_grid_figure({})


def test_samples_finds_the_smallest_share_that_is_enough() -> None:
    curves = {"a": {0.05: 10.0, 0.2: 30.0, 1.0: 40.0}, "b": {0.05: 20.0, 1.0: 30.0}, "c": {1.0: 25.0}}
    assert samples.needs(curves) == {"a": ("b", 30.0, 0.2), "b": ("a", 40.0, None), "c": ("a", 40.0, None)}
    assert samples.needs({"a": {0.2: 10.0, 1.0: 20.0}, "b": {0.2: 50.0}}) == {"b": ("a", 20.0, 0.2)}
    assert samples.needs({"a": {1.0: 50.1}, "b": {0.2: 50.1 - 1e-14}})["b"].share == 0.2  # as good, but for a last bit


def test_samples_shows_measured_and_published_curves(tmp_path: Path) -> None:
    study = STUDIES["samples"]
    findings = runs_of("samples", tmp_path)
    heights = {"InfoNCE": 50, "GOAL": 40, "HN-CLIP": 45}
    for place, job in findings.jobs.items():
        row = study.row(place.row)
        if place.domain == "park" and row.series is not None and place.row != "GOAL, 5 %":
            finish(findings, job, [], heights[row.series] + 10 * (row.x or 0))
        elif place.domain == "park" and not row.trained:
            finish(findings, job, [], 58.125)
    shown = samples.show(findings)
    measured, docci, dci = only(shown, TablePart)
    assert measured.headers == ("method", "5 %", "20 %", "50 %", "100 %", "strongest other, 100 %", "reached with")
    assert measured.rows == (
        ("zero-shot (no training)", *("58.12",) * 4, "–", "–"),
        ("InfoNCE", "50.50", "52.00", "55.00", "60.00", "HN-CLIP 55.00", "50 %"),
        ("GOAL", "–", "42.00", "45.00", "50.00", "InfoNCE 60.00", "none"),
        ("HN-CLIP", "45.50", "47.00", "50.00", "55.00", "InfoNCE 60.00", "none"),
    )
    assert any("14 of 25 runs are missing" in note for note in measured.notes)
    # The paper, Table A9: GOAL on DCI with all data (77.29 + 74.84) / 2; HN-CLIP at 20 % (78.09 + 76.79) / 2.
    assert dci.headers[-2:] == ("GOAL, 100 %", "reached with")  # its only rival there, not the strongest of its tables
    assert dci.rows[-1] == ("HN-CLIP", "74.09", "77.44", "78.84", "79.77", "76.06", "20 %")
    assert dci.rows[0][0] == "GOAL"
    assert dci.rows[0][-2:] == ("–", "–")
    assert "paper" in docci.title
    (part,) = only(shown, FigurePart)
    (axes,) = part.figure.axes
    assert axes.get_xlabel() == "training pairs used (%)"
    assert axes.get_ylabel() == "average R@1 (%)"
    assert [len(line.get_xdata()) for line in axes.lines] == [4, 3, 4, 2]  # the last is the reference
    assert shown.data["park"]["needs"]["InfoNCE"]["share"] == 0.5
    assert shown.data["park"]["untrained"] == {"zero-shot": 58.125}


def measurement(epoch: int, infonce: float, norm: float, cosine: float | None, hn_norm: float = 10.0) -> dict[str, Any]:
    return {
        "kind": "gradients",
        "epoch": epoch,
        "step": epoch,
        "infonce": infonce,
        "hn": 5.0,
        "infonce_norm": norm,
        "hn_norm": hn_norm,
        "ratio": hn_norm / norm if norm else None,
        "cosine": cosine,
        "infonce_saturated": 0.5,
        "hn_saturated": 0.0,
        "dtype": "float32",
        "towers": "float32",
        "negatives": "micro",
        "gamma": 0.5,
    }


def test_gradients_are_counted_by_run_and_over_all(tmp_path: Path) -> None:
    findings = runs_of("gradients", tmp_path)
    log = [
        measurement(1, 1e-4, 0.1, 0.5),
        measurement(1, 1.0, 1.0, 0.7),
        measurement(2, 0.0, 0.0, None),
        measurement(2, 1e-5, 0.01, -0.1),
    ]
    for place, job in findings.jobs.items():
        if place.domain == "park" and place.row in ("HN-CLIP, 5 %", "HN-CLIP, 100 %"):
            finish(findings, job, log if place.row == "HN-CLIP, 5 %" else log[:2])
    shown = gradients.show(findings)
    (table,) = only(shown, TablePart)
    rows = {row[0]: row[1:] for row in table.rows if row}
    # Ratios 100, 10 and 1,000; cosines 0.5, 0.7 and −0.1.
    assert rows["park, 5 %"] == ("4", "50 %", "75 %", "0 %", "25 %", "0 %", "1e+02", "0.50", "67 %")
    assert rows["park, 100 %"] == ("2", "50 %", "50 %", "0 %", "0 %", "0 %", "55", "0.60", "100 %")
    assert rows["park, 20 %"] == ("–",) * 9
    assert rows["all"][0] == "6"
    assert "6 of 8 runs are missing" in " ".join(table.notes)
    paper = rows["paper: DOCCI, 100 %"]
    assert (paper[1], paper[4]) == ("80 %", "47 %")
    assert rows["paper: DOCCI and DCI, all shares"][-2:] == ("0.58", "98 %")
    data = shown.data["runs"]["park, 5 %"]
    assert data["infonce_solved"] == 0.75
    assert data["infonce_solved_first_epoch"] == 0.5
    assert (data["measurements"], data["measurements_first_epoch"]) == (4, 2)
    assert data["infonce_zero"] == 0.25
    assert data["ratio"] == pytest.approx(100)
    assert data["cosine_positive"] == pytest.approx(2 / 3)
    (part,) = only(shown, FigurePart)
    assert len(part.figure.axes) == 4 * 2 * 3  # shares × domains × panels
    assert "seed" not in part.caption


def test_a_figure_of_gradients_says_that_it_is_of_the_first_seed(tmp_path: Path) -> None:
    findings = runs_of("gradients", tmp_path, seeds=(1, 2), domains=("park",))
    for job in findings.jobs.values():
        finish(findings, job, [measurement(1, 1.0, 1.0, 0.5)])
    shown = gradients.show(findings)
    assert "The first seed of each; the table has all together." in only(shown, FigurePart)[0].caption
    assert shown.data["runs"]["park, 5 %"]["measurements"] == 2


def test_outcomes_of_these_shows_have_every_form(tmp_path: Path) -> None:
    findings = runs_of("convergence", tmp_path, domains=("park",))
    for job in findings.jobs.values():
        finish(findings, job, [evaluation(0, 10, 20), evaluation(1, 30, 40)])
    outcome: Outcome = show_all(findings)
    assert "epochs to 35.0" in outcome.to_text()
    assert "![Validation R@1 per epoch](convergence.svg)" in outcome.to_markdown()
    assert "\\includegraphics[width=\\linewidth]{convergence}" in outcome.to_latex()
    assert json.loads(json.dumps(outcome.to_dict()))["convergence"]["park"]["peer"] == "InfoNCE"
