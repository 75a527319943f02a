"""`docs/miniature.md`: every study on generated scenes, and the paper's claims held against it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hnclip.data.scenes import FAMILIES, MEMBERS, SMALL
from hnclip.recipes import miniature
from hnclip.studies.checks import Evidence, Judgement, Verdict
from hnclip.studies.claims import CLAIMS, FINE_TUNING, Claim
from hnclip.studies.findings import findings_of
from hnclip.studies.miniature import RATES
from hnclip.studies.outcome import FIGURE, Outcome, show
from hnclip.studies.plan import Setting, plan_entries
from hnclip.studies.store import Store
from hnclip.studies.study import Study
from hnclip.util.files import replace_directory, replace_file
from hnclip.util.tables import markdown_table
from hnclip.util.text import duration, option_words

log = logging.getLogger(__name__)

DOCUMENT = "miniature.md"
PHOTOS_TITLE = """## On photographs, with pre-trained towers: what is left for adaptivity

By `hnclip study adaptivity`; where towers and captions come from, and what was decided beforehand:
[studies.md](studies.md#what-is-left-for-adaptivity-on-frozen-towers)."""
PHOTOS = ("<!-- photos -->", "<!-- end of photos -->")  # what another study measured, kept when this one writes


@dataclass(frozen=True)
class Miniature:
    """Every study with what its runs came to, and the claims with their verdicts."""

    outcomes: tuple[Outcome, ...]
    settings: tuple[Setting, ...]
    judgements: tuple[tuple[Claim, Judgement], ...]
    runs: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "runs": self.runs,
            "seconds": self.seconds,
            "claims": [
                {"claim": claim.text, "where": claim.where, "study": claim.study, **found._asdict()}
                for claim, found in self.judgements
            ],
            "studies": [outcome.to_dict() for outcome in self.outcomes],
        }

    def to_text(self) -> str:
        """For a terminal: the verdicts. The tables are in the document."""
        verdicts = [found.verdict for _, found in self.judgements]
        counts = [f"{verdicts.count(verdict)} {words}" for verdict, words in _COUNTED.items()]
        lines = [f"{found.verdict:>13}  {claim.text}" for claim, found in self.judgements]
        return "\n".join([*lines, "", ", ".join(counts)])


_COUNTED: dict[Verdict, str] = {"holds": "hold", "does not hold": "do not hold", "undecided": "are undecided"}


def judge_miniature(store: Store, entries: Sequence[tuple[Study, Setting]]) -> Miniature:
    """Show every study and judge every claim by the runs that there are."""
    jobs = plan_entries(entries)
    outcomes, evidence = [], {}
    for study, setting in entries:
        log.info(f"{study.name}: {study.title}")
        findings = findings_of(study, setting, store, jobs)
        outcomes.append(show(findings))
        evidence[study.name] = Evidence(findings, outcomes[-1].to_dict())
    judgements = tuple((claim, claim.check(evidence[claim.study])) for claim in CLAIMS)
    done = [job for job in jobs if job.trained and store.is_trained(job)]
    seconds = sum(store.training(job)["seconds"] for job in done)
    return Miniature(tuple(outcomes), tuple(setting for _, setting in entries), judgements, len(done), seconds)


def write_document(result: Miniature, docs: Path, photos: str | None = None) -> list[Path]:
    """Write `miniature.md` into a directory, and its figures into `miniature/` beside it.

    Args:
        photos: the section on photographs; when left out, the one that the document has already.
    """
    document, figures = docs / DOCUMENT, docs / Path(DOCUMENT).stem
    if photos is None and document.exists():
        _, mark, rest = document.read_text(encoding="utf-8").partition(PHOTOS[0])
        photos = rest.partition(PHOTOS[1])[0].strip() if mark else None
    with replace_directory(figures) as partial:
        for outcome in result.outcomes:
            outcome.write_figures(partial, endings=(FIGURE,))
    with replace_file(document) as partial_file:
        partial_file.write_text(_document(result, f"{figures.name}/", photos), encoding="utf-8")
    return [document, *sorted(figures.iterdir())]


def _document(result: Miniature, figures: str, photos: str | None) -> str:
    about = result.outcomes[0].about
    parts = [
        "# The paper in miniature",
        "Every table and figure of the paper, and the controls that it lacks, on generated `scenes` with the bundled "
        "model. This page is written by `make miniature` (`hnclip study miniature --docs docs`); "
        "nothing in it is typed by hand.",
        _scale(result, about),
        "## Claim by claim",
        "A claim about retrieval *holds* where every paired 95 % interval of the difference lies above zero, *does "
        "not hold* where one lies below, and is *undecided at this size* otherwise. Differences are points of R@1, "
        "averaged over both directions; intervals are over queries, families of near-duplicates whole, and over seeds "
        "where there are several. Of many differences the lowest and the highest are shown. Measured quantities "
        "(similarities, gradients, times) are held against the paper's own number. Where a claim takes for granted "
        "what is not so here, or where runs are missing, nothing is decided, and the reason says which.",
        _claims([pair for pair in result.judgements if pair[0].where is not None], ("the paper's claim", "where")),
        "Questions that the paper does not ask, answered by the controls:",
        _claims([pair for pair in result.judgements if pair[0].where is None], ("question, as a claim",)),
    ]
    for outcome, setting in zip(result.outcomes, result.settings):
        parts.append(outcome.to_markdown(level=2, figures=figures).rstrip("\n"))
        if own := _own_settings(setting):
            parts.append(f"Settings of this study alone: `{own}`.")
    if photos is not None:
        parts += [PHOTOS[0], photos, PHOTOS[1]]
    return "\n\n".join(parts) + "\n"


def _scale(result: Miniature, about: dict[str, Any]) -> str:
    versions, base = about["versions"], miniature()
    libraries = ", ".join(f"{name} {versions[name]}" for name in ("python", "torch", "transformers"))
    pairs = SMALL["train"] * MEMBERS["train"]
    batch = base.optim.micro_batch * base.optim.accumulate
    optim = base.optim
    steps = -(-pairs // batch) * optim.epochs
    found = next((judged.measured for claim, judged in result.judgements if claim is FINE_TUNING), None)
    learnt = "" if found is None else f": fine-tuning with InfoNCE moves average R@1 by, in points, {found}"
    return (
        f"It took {result.runs} runs, together about {duration(result.seconds)} of training and validation, as logged "
        f"({libraries}). Unless a study says otherwise, a run has {pairs} training pairs, {optim.epochs} epochs and "
        f"batches of {optim.micro_batch} × {optim.accumulate}, {steps} steps in all, at a learning rate of "
        f"{optim.lr:g} ({RATES['lora']:g} for adapters); negatives are those of the micro-batch. The test gallery has "
        f"{FAMILIES['test'] * MEMBERS['test']:,} images in {FAMILIES['test']} families of near-duplicates. The bundled "
        f"model knows the drawings, but not the words of these domains{learnt}. What the paper reports of "
        "Long-CLIP-L on photographs is not refuted by what does not show here, nor confirmed by what does."
    )


def _own_settings(setting: Setting) -> str:
    """What a study has other than the recipe, as options of `hnclip train`; where it lies and how fast it is are not
    told."""
    base = miniature()
    same = {name: getattr(base, name) for name in ("data", "read")}
    return " ".join(option_words(replace(setting.base, **same), base))


def _claims(judged: Sequence[tuple[Claim, Judgement]], heads: tuple[str, ...]) -> str:
    rows = []
    for claim, found in judged:
        size = " at this size" if found.verdict == "undecided" and found.complete else ""
        first = [claim.text] if claim.where is None else [claim.text, claim.where]
        rows.append([*first, found.measured, f"{found.verdict}{size}", found.why])
    return markdown_table([*heads, "measured here", "verdict", "why"], rows, words=True)
