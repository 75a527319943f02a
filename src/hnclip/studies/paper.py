"""Which numbers of the paper stand for which rows of a study, and whether a study runs on what the paper ran on.

Printed numbers are shown below measured ones, on the paper's own benchmarks only, and are never marked or compared.
"""

from __future__ import annotations

from hnclip.evaluation.published import PublishedResult, published
from hnclip.evaluation.published import same_benchmark as same
from hnclip.recipes import PAPER_GALLERIES
from hnclip.studies.results import Column
from hnclip.studies.spec import Setting, Study, Variant
from hnclip.util.tables import MISSING

# Images per second of a training step (Table A3): Long-CLIP-L on DCI, one Ascend 910B. FineLIP has none.
STEPS = {"InfoNCE": "55.5", "GOAL": "about 22", "StructXLIP": "about 10", "HN-CLIP": "53"}
# Measurements of gradients (abstract, section 2.4, appendix C), in the columns of the table of gradients. The ratios
# are medians by epoch, those of the table by run.
GRADIENTS = (
    ("paper: DOCCI, 100 %", "148", "80 %", MISSING, "at most 74 %", "47 %", MISSING, "1e2–1e6", "0.47 (mean)", MISSING),
    ("paper: DOCCI and DCI, all shares", *[MISSING] * 4, "21 %", MISSING, "1e2–1e6", "0.58", "98 %"),
)
_BACKBONE = "longclipl"
_SEEDS = "mean of "  # how the setting of a replicated row begins
_PRINTED = ", printed as "  # follows the setting of an untrained model that a table repeats for every source


def paper_rows(study: Study, column: Column) -> list[PublishedResult]:
    """The paper's rows for a column whose gallery is one of its benchmarks and whose domain is what the paper trained
    on, in the order of the study's rows and tables, without numbers that an earlier table has; none for other data."""
    if column.gallery.whole:
        return []
    results = [
        result
        for table in study.tables
        for result in published(column.gallery.name, table=table)
        if result.trained_on is None or same(result.trained_on, column.domain.name)
    ]
    found: list[PublishedResult] = []
    for row in study.rows:
        for result in results:
            known = [other for other in found if _stands_for(other, row)]
            if _stands_for(result, row) and not any(_repeats(result, other) for other in known):
                found.append(result)
    return found


def runs_on_paper_data(setting: Setting) -> bool:
    """Whether model and domains are the paper's, so that a number of the paper can be compared with a measured one."""
    model = "".join(letter for letter in setting.base.model.lower() if letter.isalnum())
    return _BACKBONE in model and all(domain.name in PAPER_GALLERIES for domain in setting.domains)


def _stands_for(result: PublishedResult, row: Variant) -> bool:
    # A replicated row is the same row, and an untrained model is the same for whatever source a table prints it.
    plain = "" if result.setting.startswith(_SEEDS) else result.setting.partition(_PRINTED)[0]
    return (result.method, plain) == row.published


def _repeats(result: PublishedResult, other: PublishedResult) -> bool:
    return all(
        other.recall[way].get(k) == value for way, values in result.recall.items() for k, value in values.items()
    )
