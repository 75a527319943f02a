"""What a training step of each row costs, measured here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from hnclip.config import RunOptions, TrainConfig
from hnclip.measure import machine
from hnclip.objectives.base import Objective
from hnclip.objectives.registry import build_objective
from hnclip.studies.findings import Findings
from hnclip.studies.identity import run_identity
from hnclip.studies.paper_rows import MISSING
from hnclip.studies.parts import Shown, TablePart
from hnclip.studies.plan import Place
from hnclip.studies.step_time import StepTime, measure_steps
from hnclip.train.data import needed_views
from hnclip.util.device import find_device
from hnclip.util.files import replace_file

PEER = "HN-CLIP"
TURNS, MANY = 5, 25  # the second where a step is quick, and a passing disturbance weighs much
QUICK = 2.0  # seconds


class Paper(NamedTuple):
    """A row of the paper's table of training efficiency: images per second, and how many times longer than HN-CLIP."""

    speed: str
    times: str = MISSING


# HN-CLIP, table s-eff.
PAPER = {
    "InfoNCE": Paper("55.5"),
    "GOAL": Paper("about 22", "2.4"),
    "StructXLIP": Paper("about 10", "5.4"),
    "HN-CLIP": Paper("53", "1"),
}


def show(findings: Findings) -> Shown:
    """Inputs beside picture and caption, what must be prepared, the measured speed, and the paper's."""
    domain, seed = findings.domains[0], findings.seeds[0]
    places = {row.name: Place(row.name, domain.name, seed) for row in findings.study.rows}
    configs = {name: findings.jobs[place].config for name, place in places.items() if place in findings.jobs}
    found = step_times(configs, findings.store.options, findings.store.directory / "measures")
    peer = found.get(PEER) or next(reversed(found.values()))
    body = []
    for name, config in configs.items():
        objective, paper = build_objective(config.objective), PAPER.get(name, Paper(MISSING))
        body.append(
            (
                name,
                extra_inputs(objective),
                ", ".join(sorted(needed_views(objective))) or "none",
                f"{found[name].pairs_per_second:.1f}",
                f"{found[name].times(peer):.2f}",
                *paper,
            )
        )
    table = TablePart(
        title=f"A training step on {domain.name}",
        headers=(
            "method",
            "inputs beside the pair",
            "preparation",
            "pairs/s",
            f"times {PEER if PEER in found else 'the last'}",
            "paper: images/s",
            f"paper: times {PEER}",
        ),
        rows=tuple(body),
        notes=(_measured(peer), "The paper's are of Long-CLIP-L on DCI, on one Ascend 910B."),
    )
    rows = [
        {
            "row": name,
            "pairs_per_second": one.pairs_per_second,
            "over_hn_clip": one.times(found[PEER]) if PEER in found else None,
            **one.to_dict(),
        }
        for name, one in found.items()
    ]
    return Shown((table,), {"rows": rows})


def extra_inputs(objective: Objective) -> str:
    """What a step reads beside picture and caption."""
    counts = {"picture": len(objective.image_views) - 1, "text": len(objective.text_views) - 1}
    return ", ".join(f"{count} {what}{'s' * (count > 1)}" for what, count in counts.items() if count) or "none"


def step_times(configs: Mapping[str, TrainConfig], options: RunOptions, directory: Path) -> dict[str, StepTime]:
    """A micro-batch of each, in turns; read where this machine has measured them before.

    Args:
        directory: where times are kept.
    """
    first = next(iter(configs.values()))
    here = machine(find_device(options.device))
    content = ({name: str(run_identity(config)) for name, config in configs.items()}, here)
    path = directory / f"step-times-{sha256(repr(content).encode()).hexdigest()[:10]}.json"
    if path.exists():
        saved = json.loads(path.read_text(encoding="utf-8"))["rows"]
        return {name: StepTime.from_dict(values) for name, values in saved.items()}
    measure = partial(measure_steps, configs, options, pairs=first.optim.micro_batch)
    found = measure(turns=TURNS)
    synthetic = len({one.source for one in found.values()}) > 1  # some lack what only they need, as regions
    quick = max(one.seconds_per_step for one in found.values()) < QUICK
    if synthetic or quick:
        found = measure(turns=MANY if quick else TURNS, synthetic=synthetic)
    with replace_file(path) as file:
        rows = {name: one.to_dict() for name, one in found.items()}
        file.write_text(json.dumps({"machine": here, "rows": rows}, indent=2) + "\n", encoding="utf-8")
    return found


def _measured(found: StepTime) -> str:
    here = found.machine
    what = {"real data": "the run's own model and data"}.get(found.source, found.source)
    scaled = f", {found.measured_pairs} pairs of a step of {found.step_pairs}" if found.is_scaled else ""
    threads = f"{here['threads']} thread{'s' * (here['threads'] != 1)}"
    return (
        f"Measured with {what}{scaled}, in {found.precision} on {here['processor']} ({here['device']}, {threads}), "
        f"median of {len(found.turns)} turns; a ratio is the median of those within the turns. Neither reading "
        "pictures nor preparation is in it."
    )
