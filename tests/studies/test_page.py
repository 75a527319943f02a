"""Reports and docs/results.md: read from the store alone, short, and with everything that the paper prints."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from small_studies import evaluation, queries, study_results

from hnclip.evaluation.retrieval import EvaluationResult
from hnclip.studies import analyses
from hnclip.studies.catalogue import STUDIES
from hnclip.studies.claims import CLAIMS
from hnclip.studies.page import study_report, write_results
from hnclip.studies.results import StudyResults

DOMAINS = ("scenes/park/small", "scenes/shelf/small")


def logs(row: str, domain: str, seed: int) -> list[dict[str, Any]]:
    entries = [evaluation(n, 10.0 * n + len(row), kind) for n in range(3) for kind in ("evaluation", "watched")]
    norms = {"infonce": 0.5, "hn": 2.0, "infonce_norm": 0.1, "hn_norm": 1.0, "ratio": 10.0, "cosine": 0.5}
    shares = {"infonce_saturated": 0.2, "hn_saturated": 0.0}
    kinds = {"dtype": "float32", "towers": "float32", "negatives": "micro", "gamma": 0.5}
    probed = [{"kind": "gradients", "epoch": n, "step": n, **norms, **shares, **kinds} for n in (1, 2)]
    return [*entries, *probed]


def measured(kind: str, domain: str) -> dict[str, Any]:
    image = analyses._image_json(Image.new("RGB", (8, 8)))
    counts = [0] * 2000
    counts[1800] = 10
    item = ["label", [["a caption", True]], image]
    rows = STUDIES["efficiency"].rows
    return {
        "geometry": {
            **{"train": 10, "test": {domain: 5}, "words": 20.0, "batch": [[0.0, 0.5], [0.5, 0.0]]},
            **{key: {"mean": 0.8, "counts": counts} for key in ("pairwise", "hardest")},
            "negatives": {"edges": [0.8], "shares": [0.4, 0.6], "labels": ["below 0.8", "0.8 and above"]},
            "near_duplicates": [[item, item]],
        },
        "duplicates": {"pairs": 10, "caption": 1, "image": 2, "either": 3},
        "retrievals": {
            "counts": [1, 2, 3, 4],
            "examples": [{"caption": "c", "right": image, "answers": [[image, True], [image, False]]}],
        },
        "step_time": {
            "machine": {"processor": "P", "device": "cpu", "threads": 1},
            "precision": "fp32",
            "pairs": 8,
            "seconds": {f"{row.name}/{domain}/1": [1.0, 1.1] for row in rows},
        },
    }[kind]


def evaluate(row: str, domain: str, gallery: str, seed: int) -> EvaluationResult:
    found = queries(0.3 + len(row) / 100, seed + len(row + domain), images=40)
    part = replace(queries(0.4, seed, images=10), ids=found.ids[:10])
    return replace(found, held_out=part) if "all pairs" in gallery else found


@pytest.fixture(scope="module")
def complete() -> list[StudyResults]:
    """All studies, complete, in a store whose model and data do not exist."""
    more: dict[str, Any] = {"domains": DOMAINS, "logs": logs, "measured": measured}
    return [study_results(one, evaluate, seeds=(1, 2, 3)[: one.seeds], **more) for one in STUDIES.values()]


def test_the_page_has_all_studies_and_claims_on_300_lines(complete: list[StudyResults], tmp_path: Path) -> None:
    page, *figures = write_results(complete, tmp_path, "hnclip study all --seeds 1")
    text = page.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 300
    assert all(f"### {study.title}" in text for study in STUDIES.values())
    assert all(claim.text in text for claims in CLAIMS.values() for claim in claims)
    assert {*re.findall(r"\(results/(.*?)\)", text)} == {path.name for path in figures}
    assert "Incomplete" not in text


def test_reports_of_all_studies_are_rendered_from_the_store_alone(
    complete: list[StudyResults], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("torch.nn.Module.forward", "hnclip.studies.analyses.open_start", "hnclip.data.sources.open_data"):
        monkeypatch.setattr(name, None)
    drawn = set()
    for results in complete:
        report, study = study_report(results), results.study.name
        files = report.write(tmp_path, study, formats=("txt", "md", "tex", "json"), figures=("svg",))
        drawn |= {path.stem for path in files if path.suffix == ".svg"}
        data = json.loads((tmp_path / f"{study}.json").read_text(encoding="utf-8"))
        assert all(math.isfinite(one["value"]) for one in data["measurements"])
        assert "Not shown" not in report.to_markdown()
    own = {f"{stem}-scenes-park-small" for stem in ("gradients", "samples", "retrievals", "geometry-pairs")}
    assert drawn >= {"gradients", "convergence", "gamma-curve", "geometry-batch"} | own  # the figures of the paper
