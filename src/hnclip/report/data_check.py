"""What `hnclip data check` found, as a report: problems by kind with what to do, sizes of captions and images."""

from __future__ import annotations

from hnclip.data.check import STATISTICS, CheckResult
from hnclip.data.validate import ADVICE, ERRORS
from hnclip.report.document import Block, Report, Section, Table, Text
from hnclip.util.text import counted, shorten

WIDTH = 100  # characters of a problem; longer ones are cut


def check_report(result: CheckResult, listed: int = 5) -> Report:
    """A section for each kind of problem, with the first `listed` of them."""
    numbers = ", ".join(counted(result.total[f"{noun}s"], noun) for noun in ("record", "caption", "image"))
    splits = "".join(f"; {name} {count:,}" for name, count in result.splits.items())
    sections = []
    for kind, problems in {**result.errors, **result.warnings}.items():
        members = sum(len(group.ids) for group in result.groups if group.kind == kind)
        extent = f"{members:,} records in {counted(len(problems), 'group')}" if members else f"{len(problems):,}"
        lines = [shorten(f"  {problem.where}: {problem.detail}", WIDTH) for problem in problems[:listed]]
        lines += [f"  and {len(problems) - listed:,} more"] * (len(problems) > listed)
        heading = f"{'ERROR' if kind in ERRORS else 'warning'}: {kind}, {extent}"
        sections.append(Section(heading, [Text(ADVICE[kind], *lines)]))
    rows = [
        [name, *(format(value, ".2f" if name == "megapixels" else ",.0f") for value in measured.values())]
        for name, measured in result.lengths.items()
    ]
    last: list[Block] = [Table(["", *STATISTICS], rows), Text(_verdict(result))]
    if result.unfinished:
        kinds = ", ".join(result.unfinished)
        last.insert(0, Text(f"There may be more of these, because there is too much to compare: {kinds}."))
    return Report(f"{result.name}: {numbers}{splits}", [], [*sections, Section("", last)], result.to_dict())


def _verdict(result: CheckResult) -> str:
    if result.left_out == result.total["records"]:
        return "Nothing to train on: no record can be used."
    if result.errors:
        records = f"{result.left_out:,} of {counted(result.total['records'], 'record')}"
        return f"Not ready: {records} will be skipped in training, and {counted(result.unread, 'row')} of the source."
    ready = "Ready to train" if "width" in result.lengths else "Ready to train, as far as captions show"
    return f"{ready}; look at the warnings first." if result.warnings else f"{ready}."
