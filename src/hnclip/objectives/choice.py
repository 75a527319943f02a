"""What a framework is built from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hnclip.objectives.global_term import GlobalTerm


@dataclass(frozen=True)
class Choice:
    """A configuration as a framework sees it.

    Args:
        global_term: what is injected; None leaves the term out.
        weights: of the framework's own terms, by name, all of them. 0 leaves a term out, and what only it needs.
        official: names of the switches that stand at official; the others stand at corrected.
    """

    global_term: GlobalTerm | None
    weights: Mapping[str, float]
    official: frozenset[str] = frozenset()
