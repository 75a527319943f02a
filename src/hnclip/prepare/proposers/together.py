"""Several proposers as one."""

from __future__ import annotations

from dataclasses import dataclass

from PIL import Image

from hnclip.prepare.proposal import Proposal, Proposer
from hnclip.prepare.proposers.boxes import distinct


@dataclass(frozen=True)
class Together:
    """What each of them proposes, in their order. Of boxes that are nearly the same the first stays."""

    proposers: tuple[Proposer, ...]

    @property
    def name(self) -> str:
        return "+".join(proposer.name for proposer in self.proposers)

    @property
    def version(self) -> str:
        return " + ".join(proposer.version for proposer in self.proposers)

    def __call__(self, image: Image.Image) -> list[Proposal]:
        return distinct(proposal for proposer in self.proposers for proposal in proposer(image))
