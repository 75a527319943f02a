"""The report of a study, and docs/results.md: all studies on one page of at most 300 lines.

Everything is read from the store: no model or data set is opened, and nothing is measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from hnclip.report.document import Block, Figure, Missing, Report, Section, Table
from hnclip.studies.analyses import duplicates, geometry, retrievals
from hnclip.studies.claims import CLAIMS, Claim
from hnclip.studies.figures import convergence, curve, epochs, gradients, samples, selection
from hnclip.studies.results import StudyResults
from hnclip.studies.step_timer import efficiency
from hnclip.studies.tables import MARKS, brief_recalls, held_out, missing_note, recalls, seeds, seeds_note
from hnclip.studies.verdicts import Judgement
from hnclip.util.files import replace_directory, replace_file
from hnclip.util.tables import MISSING, markdown_table
from hnclip.util.text import duration

PAGE, FIGURES = "results.md", "results"
MAKE_RESULTS = "hnclip study all --recipe results --docs docs"  # what `make results` does
PARTS: dict[str, Callable[[StudyResults], list[Block]]] = {
    "recalls": recalls,
    "seeds": seeds,
    "held_out": held_out,
    "epochs": epochs,
    "selection": selection,
    "curve": curve,
    "convergence": convergence,
    "samples": samples,
    "gradients": gradients,
    "geometry": geometry,
    "duplicates": duplicates,
    "retrievals": retrievals,
    "step_time": efficiency,
}
"""What a study's report can show, by the names in `Study.parts`."""


def study_report(results: StudyResults) -> Report:
    """The tables and figures of a study, and its measurements and claims as data."""
    study = results.study
    data = {
        "study": study.name,
        "title": study.title,
        "model": results.setting.base.model,
        "domains": [domain.name for domain in results.domains],
        "seeds": list(results.seeds),
        "missing": results.missing[0],
        "measurements": results.measurements(),
        "claims": [
            {"claim": claim.text, "source": claim.where, **claim.judge(results)._asdict()}
            for claim in CLAIMS.get(study.name, ())
        ],
    }
    blocks = [block for part in study.parts for block in _blocks(results, part)]
    return Report(study.title, [study.question, *missing_note(results)], [Section("", blocks)], data)


def _blocks(results: StudyResults, part: str) -> list[Block]:
    return PARTS[part](results) or [Missing(f"there are no results for “{part.replace('_', ' ')}”")]


def write_results(studies: Sequence[StudyResults], docs: Path, command: str) -> list[Path]:
    """Write `results.md` into a directory, and its figures into `results/`.

    Args:
        command: with which it was made.
    """
    blocks = {results.study.name: _brief(results) for results in studies}
    figures = [block for found in blocks.values() for block in found if isinstance(block, Figure)]
    with replace_directory(docs / FIGURES) as partial:
        for figure in figures:
            (partial / f"{figure.name}.svg").write_bytes(figure.render("svg"))
    with replace_file(docs / PAGE) as partial_file:
        partial_file.write_text("\n".join(_page(studies, blocks, command)) + "\n", encoding="utf-8")
    return [docs / PAGE, *(docs / FIGURES / f"{figure.name}.svg" for figure in figures)]


def _brief(results: StudyResults) -> list[Block]:
    """One table and one figure of a study."""
    parts = results.study.parts
    found = [block for part in parts if part != "recalls" for block in _blocks(results, part)]
    figures = [block for block in found if isinstance(block, Figure)]
    is_table = "recalls" in parts and "samples" not in parts
    tables = [brief_recalls(results)] if is_table else [block for block in found if not isinstance(block, Figure)]
    return [*tables[:1], *figures[:1]]


def _page(studies: Sequence[StudyResults], blocks: Mapping[str, Sequence[Block]], command: str) -> Iterator[str]:
    judged = [(claim, claim.judge(one)) for one in studies for claim in CLAIMS.get(one.study.name, ())]
    yield from ["# Results", "", _introduction(studies, command), "", "## Claims", "", _claims_note(judged), ""]
    rows = [
        [claim.text, claim.where or "a control", found.measured or MISSING, f"**{found.verdict}**: {found.reason}"]
        for claim, found in judged
    ]
    yield markdown_table(("claim", "source", "measured here", "verdict"), rows)
    yield from ["", "## Studies", "", _tables_note(studies[0])]
    for results in studies:
        title, (first, *_) = results.study.title, blocks[results.study.name]
        shown = f" *{first.title.removeprefix(f'{title}. ')}*" if isinstance(first, Table) and first.title else ""
        yield from ["", f"### {title}", results.study.question + shown]
        for block in blocks[results.study.name]:
            yield ""
            if isinstance(block, Table):
                yield markdown_table(block.flat_headers, block.rows)
            elif isinstance(block, Figure):
                yield f"![{block.title}]({FIGURES}/{block.name}.svg)"
            elif isinstance(block, Missing):
                yield f"*Not shown: {block.reason}*"


def _introduction(studies: Sequence[StudyResults], command: str) -> str:
    base, domains = studies[0].setting.base, ", ".join(domain.name for domain in studies[0].domains)
    jobs = {job.identity: (results.store, job) for results in studies for job in results.jobs.values()}
    runs = [run for store, job in jobs.values() if (run := store.training(job)) is not None]
    optim = base.optim
    made = f"`{command}`" + (" (`make results`)" if command == MAKE_RESULTS else "")
    sentences = [
        f"The studies of hnclip on {domains} with the model `{base.model}`, made by {made}; nothing on this page is "
        "typed by hand.",
        f"{len(runs)} runs, together {duration(sum(run['seconds'] for run in runs))} of training and validation. "
        f"Unless a study changes it, a run has {optim.epochs} epochs in batches of {optim.micro_batch} × "
        f"{optim.accumulate} at a learning rate of {optim.lr:g}, with negatives from the "
        f"{'micro-batch' if optim.negatives == 'micro' else optim.negatives}.",
        "Results of the paper's Long-CLIP-L on photographs are neither confirmed nor refuted by results on other data.",
    ]
    if missing := [f"{one.study.name} {one.missing[0]} of {one.missing[1]}" for one in studies if one.missing[0]]:
        sentences.append(f"**Incomplete.** Missing runs and measurements: {', '.join(missing)}.")
    return " ".join(sentences)


def _claims_note(judged: Sequence[tuple[Claim, Judgement]]) -> str:
    counts = Counter(found.verdict for _, found in judged)
    return (
        f"{', '.join(f'{count} {verdict}' for verdict, count in counts.most_common())}. Differences are points of "
        "R@1, average of both directions, with paired 95 % intervals; if there are many, the lowest and the highest "
        "are shown. A claim *holds* if all of them are above what is claimed, *does not hold* if one is below, and is "
        "*undecided* otherwise. A number that belongs to the paper's model, data or hardware is *not comparable*."
    )


def _tables_note(results: StudyResults) -> str:
    marks = MARKS.replace("{best}", "Bold").replace("{second}", "italic")
    return (
        "R@1 in percent, average of both directions; Δ is the difference from the row named under “minus”. "
        f"{marks} {results.study.title}: {seeds_note(results)} All tables and figures, with both directions and all "
        "ranks, are written by the command into `runs/studies`."
    )
