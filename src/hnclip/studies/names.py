"""Studies by the names that the command line takes."""

from __future__ import annotations

from difflib import get_close_matches
from typing import NamedTuple

from hnclip.studies.catalogue import STUDIES
from hnclip.studies.study import Study


class Listed(NamedTuple):
    """What `hnclip study list` says of a study."""

    name: str
    title: str
    question: str


ADAPTIVITY, MINIATURE, ALL, LIST = "adaptivity", "miniature", "all", "list"
# Not made of rows: they have files of their own.
OTHERS = (
    Listed(ADAPTIVITY, "What is left for adaptivity", "Margins of four kinds on frozen towers, each at its best."),
    Listed(
        MINIATURE, "The paper in miniature", "Every study once, on generated scenes, with the paper's claims beside."
    ),
)


def listed() -> list[Listed]:
    """Everything that has a name."""
    return [*(Listed(study.name, study.title, study.question) for study in STUDIES.values()), *OTHERS]


def listing() -> str:
    """For people.

    >>> print(listing().splitlines()[0])
    main          Main comparison. Does HN-CLIP retrieve better than other ways of fine-tuning the same model?
    """
    found = listed()
    width = max(len(study.name) for study in found)
    return "\n".join(f"{study.name:<{width}}  {study.title}. {study.question}" for study in found)


def studies_named(names: str) -> list[Study]:
    """`main`, `main,gamma`, or `all`: those of the catalogue, each once."""
    if names == ALL:
        return list(STUDIES.values())
    found = []
    for name in dict.fromkeys(part.strip() for part in names.split(",")):
        if name in (ALL, LIST, *(other.name for other in OTHERS)):
            raise ValueError(f"{name} stands alone: leave the other studies out")
        if name not in STUDIES:
            known = [*STUDIES, *(other.name for other in OTHERS)]
            close = get_close_matches(name, known, 1)
            meant = f" Did you mean {close[0]}?" if close else ""
            raise ValueError(f"there is no study {name!r}.{meant} There are {', '.join(known)}, and all; or list")
        found.append(STUDIES[name])
    return found
