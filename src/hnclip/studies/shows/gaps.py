"""What shows say where something is missing, and names of files."""

from __future__ import annotations

from hnclip.studies.findings import Findings
from hnclip.studies.notes import missing_note
from hnclip.studies.parts import WordsPart


def nothing_yet(findings: Findings) -> WordsPart:
    """Instead of tables and figures, where there is nothing to make them of."""
    return WordsPart(missing_note(findings) or ("Its runs measured nothing of this.",))


def file_name(*names: str) -> str:
    """Names as the name of a file.

    >>> file_name("convergence", "scenes/park")
    'convergence-scenes-park'
    """
    return "-".join("".join(letter if letter.isalnum() else "-" for letter in name).strip("-") for name in names)
