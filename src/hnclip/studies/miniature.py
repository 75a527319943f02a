"""The paper in miniature: every study once, on generated scenes with the bundled model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hnclip.config import with_fields
from hnclip.recipes import miniature
from hnclip.studies.catalogue import STUDIES
from hnclip.studies.plan import Setting
from hnclip.studies.study import Domain, Study

STYLES = ("park", "shelf")
# Adapters start from nothing and train at a higher rate: of 3e-4, 1e-3, 3e-3 and 1e-2 the best for LoRA with InfoNCE on
# the validation splits of both styles.
RATES = {"lora": 1e-3, "dora": 1e-3}


@dataclass(frozen=True)
class Special:
    """A study of the miniature, and what is different for it.

    Args:
        set: fields of the recipe.
        size: which scenes, `small` or `doubles`.
        styles: the domains.
    """

    study: str
    set: Mapping[str, Any] = field(default_factory=dict)
    size: str = "small"
    styles: tuple[str, ...] = STYLES


# Both styles for what the paper has, one for the controls. 15 against 127 negatives takes batches of 128, and twice the
# epochs to have some steps of them; so few steps as there are can all be measured.
_DIFFERENT = (
    Special("gradients", {"probe_gradients": 1}),
    Special("rivals", styles=("park",)),
    Special("negatives", {"optim.accumulate": 8, "optim.epochs": 4}, styles=("park",)),
    Special("duplicates", size="doubles", styles=("park",)),
    Special("selection", styles=("park",)),
)


def entries() -> list[tuple[Study, Setting]]:
    """All studies with what they run on."""
    different = {entry.study: entry for entry in _DIFFERENT}
    found = []
    for name, study in STUDIES.items():
        entry = different.get(name, Special(name))
        sources = [f"scenes/{style}/{entry.size}" for style in entry.styles]
        domains = tuple(Domain(source, (source,)) for source in sources)
        found.append((study, Setting(with_fields(miniature(), entry.set), domains, rates=RATES)))  # type: ignore[arg-type]
    return found
