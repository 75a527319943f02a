"""The document of the miniature, from a few studies with invented ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_studies import findings, queries, result

from hnclip.studies import miniature_report
from hnclip.studies.checks import Judgement
from hnclip.studies.claims import CLAIMS, FINE_TUNING
from hnclip.studies.miniature import entries
from hnclip.studies.miniature_report import PHOTOS, Miniature, write_document
from hnclip.studies.outcome import show


@pytest.fixture
def small(tmp_path: Path) -> Miniature:
    return made(tmp_path)


def made(tmp_path: Path) -> Miniature:
    """The study of γ, which has a figure, and of negatives, which has settings of its own."""
    outcomes, settings = [], []
    for study, setting in entries():
        if study.name in ("gamma", "negatives"):
            rows = [row.name for row in study.rows]
            found = findings(
                tmp_path / study.name, study, lambda row, *place, rows=rows: result(queries(0.5, rows.index(row)))
            )
            outcomes.append(show(found))
            settings.append(setting)
    verdicts = ("holds", "does not hold", "undecided")
    judgements = tuple(
        (claim, Judgement(verdicts[number % 3], f"measured {number}", f"why {number}", complete=number % 2 == 0))
        for number, claim in enumerate(CLAIMS)
    )
    return Miniature(tuple(outcomes), tuple(settings), judgements, runs=7, seconds=120.0)


def test_every_claim_is_in_the_document_with_its_verdict(small: Miniature, tmp_path: Path):
    document, *figures = write_document(small, tmp_path / "docs")
    text = document.read_text(encoding="utf-8")
    for number, (claim, found) in enumerate(small.judgements):
        row = next(line for line in text.splitlines() if f"measured {number} " in line)
        assert claim.text in row
        assert f"why {number} " in row
        # For want of runs, not of size.
        sized = found.verdict == "undecided" and found.complete
        assert f"| {found.verdict}{' at this size' if sized else ''} |" in row
    assert {found.complete for _, found in small.judgements if found.verdict == "undecided"} == {True, False}
    assert "7 runs, together about 2 min" in text
    assert "single-threaded" not in text
    fine_tuning = [claim for claim, _ in small.judgements].index(FINE_TUNING)
    measured = f"fine-tuning with InfoNCE moves average R@1 by, in points, measured {fine_tuning}."
    assert f"but not the words of these domains: {measured}" in text
    assert "`--optim.epochs 4 --optim.accumulate 8`" in text
    assert figures
    for figure in figures:
        assert f"(miniature/{figure.name})" in text


def test_written_again_it_is_the_same_but_for_figures_that_are_gone(small: Miniature, tmp_path: Path):
    first = {path.name: path.read_bytes() for path in write_document(small, tmp_path)}
    (tmp_path / "miniature" / "old.svg").touch()
    assert {path.name: path.read_bytes() for path in write_document(made(tmp_path), tmp_path)} == first
    assert not (tmp_path / "miniature" / "old.svg").exists()


def test_the_section_on_photographs_is_kept_until_there_is_another(small: Miniature, tmp_path: Path):
    write_document(small, tmp_path, "## Photographs\n\nfirst")
    document, *_ = write_document(small, tmp_path)
    assert document.read_text(encoding="utf-8").count("## Photographs\n\nfirst") == 1
    write_document(small, tmp_path, "## Photographs\n\nsecond")
    text = document.read_text(encoding="utf-8")
    assert "first" not in text.partition(PHOTOS[0])[2]
    assert "second" in text


def test_the_terminal_counts_verdicts(small: Miniature):
    *lines, counts = small.to_text().splitlines()
    expected = [sum(line.strip().startswith(verdict) for line in lines) for verdict in miniature_report._COUNTED]
    assert counts == "{} hold, {} do not hold, {} are undecided".format(*expected)
    assert sum(expected) == len(CLAIMS)
    assert small.to_dict()["claims"][1]["verdict"] == "does not hold"
