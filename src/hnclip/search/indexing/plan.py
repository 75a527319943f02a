"""What a run has to do: which pictures have to be looked at, and which are no longer there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from hnclip.core import InvalidImage, Problem
from hnclip.data.decoding import in_order
from hnclip.search.index.catalogue import texts_hash
from hnclip.search.index.changes import Known
from hnclip.search.index.places import source_at
from hnclip.search.indexing.pictures import Unusable, unusable
from hnclip.search.indexing.source import Entry, IndexSource, lies_in

TOGETHER = 512  # entries that a thread compares at a time

Noted = dict[str, tuple[Problem, str]]  # problems with their stamps, by name


@dataclass
class Plan:
    """
    Args:
        work: numbers of entries to look at: new ones, and those with another stamp, place or captions.
        steps: pictures and captions of these.
        unchanged, bad: entries that are as they were, good or bad, or that cannot be seen in a folder that is hidden.
        gone: names of items that are no longer in the source.
        problems: of what is still bad, of rows of the source, and of items that are out of reach: these stay.
    """

    work: list[int] = field(default_factory=list)
    steps: int = 0
    unchanged: int = 0
    bad: int = 0
    gone: list[str] = field(default_factory=list)
    problems: Noted = field(default_factory=dict)


def make_plan(
    source: IndexSource,
    known: Mapping[str, Known],
    problems: Noted,
    pool: ThreadPoolExecutor,
    advance: Callable[[int], None],
) -> Plan:
    """Compare a source with an index, by names, stamps and captions; nothing is read.

    Args:
        known: what the index has, by name.
        problems: what it could not use.
        advance: told how many entries were compared.
    """
    plan = Plan(problems=noted(source.problems))
    there = set[str]()

    def compare(numbers: range) -> list[tuple[int, Entry, bool | None]]:
        """Entries with whether they are as they were: good, bad, or (None) to be looked at."""
        found = [(number, source.entry(number)) for number in numbers]
        return [(number, entry, _as_it_was(entry, known, problems)) for number, entry in found]

    parts = (range(start, min(start + TOGETHER, len(source))) for start in range(0, len(source), TOGETHER))
    for part in in_order(pool, compare, parts, 64):
        for number, entry, state in part:
            there.add(entry.name)
            if state is None:
                plan.work.append(number)
                plan.steps += 1 + len(entry.captions)
            elif state:
                plan.unchanged += 1
            else:
                plan.bad += 1
                plan.problems[entry.name] = problems[entry.name]
        advance(len(part))
    for name in known:
        if name in there:
            continue
        if lies_in(name, source.hidden):
            plan.unchanged += 1
        else:
            _end(plan, name, known[name], source.root)
    return plan


def noted(problems: Iterable[Problem]) -> Noted:
    """Problems that are found anew every time, all of one place together."""
    found: Noted = {}
    for problem in problems:
        if problem.where in found:
            first = found[problem.where][0]
            problem = Problem(first.kind, first.where, f"{first.detail}; {problem.detail}")
        found[problem.where] = problem, ""
    return found


def _as_it_was(entry: Entry, known: Mapping[str, Known], problems: Noted) -> bool | None:
    before = known.get(entry.name)
    bad = problems.get(entry.name) if before is None else None
    if before is None and bad is None:
        return None
    try:
        stamp = entry.stamp()
    except InvalidImage:
        return None
    if before is None:
        return False if bad is not None and bad[1] == stamp else None
    same = (before.stamp, before.place, before.captions) == (stamp, entry.place, texts_hash(entry.captions))
    return True if same else None


def _end(plan: Plan, name: str, item: Known, root: Path | None) -> None:
    """An item that the source no longer names: it goes, unless its place is only out of reach."""
    found = _out_of_reach(name, item, root)
    if found is None:
        plan.gone.append(name)
    else:
        plan.bad += 1
        plan.problems[name] = found.problem, ""


def _out_of_reach(name: str, item: Known, root: Path | None) -> Unusable | None:
    image = source_at(item.place, root)
    if image is None:
        return None
    try:
        image.stamp()
    except InvalidImage as error:
        found = unusable(Entry(name, image, item.place, ()), error)
        return found if found.out_of_reach else None
    return None
