"""What shows say where something is missing."""

from __future__ import annotations

from hnclip.studies.findings import Findings
from hnclip.studies.notes import missing_note
from hnclip.studies.parts import WordsPart


def nothing_yet(findings: Findings) -> WordsPart:
    """Instead of tables and figures, where there is nothing to make them of."""
    return WordsPart(missing_note(findings) or ("Its runs measured nothing of this.",))
