"""Who finds regions: SAM where its weights are, else segments of even colour and the cells of grids."""

from __future__ import annotations

from pathlib import Path

from hnclip.prepare.manifest import TRUTH
from hnclip.prepare.proposal import Proposer
from hnclip.prepare.proposers.felzenszwalb import Felzenszwalb
from hnclip.prepare.proposers.grid import Grid
from hnclip.prepare.proposers.together import Together

PROPOSERS = ("auto", "sam", "felzenszwalb", "grid", "felzenszwalb+grid")

__all__ = ["PROPOSERS", "Felzenszwalb", "Grid", "Together", "proposer"]


def proposer(name: str, *, weights: Path | None = None, device: str = "auto") -> Proposer:
    """The proposer of a name; `auto` is `sam` where weights are given, else `felzenszwalb+grid`.

    One whose packages or weights are not there is refused now, not at its first picture.
    """
    if name not in PROPOSERS:
        raise ValueError(f"no proposer is called {name!r}: use {', '.join(PROPOSERS)} or {TRUTH}")
    if name == "auto":
        name = "felzenszwalb+grid" if weights is None else "sam"
    if name == "sam":
        if weights is None:
            raise ValueError(
                "sam needs weights: name a directory of them with --weights (as facebook/sam-vit-base has them on the "
                "hub), or use felzenszwalb+grid"
            )
        from hnclip.prepare.proposers.sam import Sam, opened_sam

        found = Sam(Path(weights).expanduser(), device=device)
        opened_sam(found.weights, device)
        return found
    if weights is not None:
        raise ValueError(f"{name} takes no weights: leave them out, or use sam")
    parts: dict[str, Proposer] = {"felzenszwalb": Felzenszwalb(), "grid": Grid()}
    chosen = [parts[part] for part in name.split("+")]
    together = chosen[0] if len(chosen) == 1 else Together(tuple(chosen))
    _ = together.version  # complains about packages that are not there
    return together
