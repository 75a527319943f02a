"""`hnclip eval`, `hnclip compare`, `hnclip diagnose`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from pydantic import Field
from pydantic.dataclasses import dataclass

from hnclip.cli.options import (
    ModelOnData,
    Printed,
    Recipe,
    Repeatable,
    SeveralData,
    arguments_of,
    several,
    sources,
)
from hnclip.config import Count, NonNegative
from hnclip.util.optional import large_import

if TYPE_CHECKING:
    from hnclip.analysis.diagnose import DiagnoseResult


@dataclass(frozen=True)
class Eval(ModelOnData):
    """Retrieval metrics of one or more models on one or more data sets: both directions, with bootstrap intervals.
    Every model is compared with the first."""

    data: SeveralData = ("scenes/park",)
    """Benchmarks and data as for `hnclip train`, separated by spaces or commas (hnclip docs data)."""
    model: Repeatable = ()
    """A Hugging Face directory or hub name, a checkpoint file in OpenAI's layout, IMAGE+TEXT towers, an adapter, a run
    (its best and its last epoch), or bundled, if none is given (hnclip docs models). Several are separated by
    spaces."""
    split: str | None = None
    """test, validation, train, all, or another split of the data; test if not given, or all if there are no splits."""
    out: Repeatable = ()
    """Also write the results to these files: .json, .md, .tex, .txt or .html."""
    queries: Path | None = None
    """Also write every query with its rank and top candidates to this directory, one file per model and data set."""
    top: Count = 10
    """Candidates per query in those files."""
    paper: bool = True
    """Show the paper's published numbers next to the results, if it has the benchmark."""

    def run(self) -> Printed:
        with large_import():
            from hnclip.api import evaluate_all, open_models
            from hnclip.report.document import check_format
            from hnclip.report.results import evaluation_report

        files = [Path(path) for path in several(self.out)]
        for path in files:
            check_format(path)
        compute = self.compute
        models = [
            opened
            for name in several(self.model) or ["bundled"]
            for opened in open_models(name, self.opening, compute.device)
        ]
        results = evaluate_all(
            models,
            sources(self.data),
            split=self.split,
            read=self.read,
            queries=self.queries,
            top=self.top,
            batch=compute.batch,
        )
        report = evaluation_report(results, with_paper=self.paper)
        for path in files:
            report.write_file(path)
        return Printed(report.to_text(), report.data)


@dataclass(frozen=True)
class Compare(ModelOnData):
    """Compare two models on the same queries: the difference in recall, with the interval of a paired bootstrap."""

    a: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="A")]
    """A model as for `hnclip eval`, of a run its best epoch; or a file of `hnclip eval --queries`."""
    b: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="B")]
    """The model, or the file, that it is compared with."""
    data: SeveralData = ()
    """Data on which two models are compared, as for `hnclip eval`; scenes/park if not given."""
    k: Annotated[tuple[Count, ...], Field(min_length=1)] = (1, 5, 10)
    """Values of K for R@K."""
    split: str | None = None
    """As for `hnclip eval`."""

    def __post_init__(self) -> None:
        files = [name.endswith(".jsonl") for name in (self.a, self.b)]
        if any(files) and (self.data or not all(files)):
            raise ValueError("compare two files of queries, or two models on data")

    def run(self) -> Printed:
        with large_import():
            from hnclip.evaluation.compare import compare_queries, compare_ranks, read_queries
            from hnclip.report.results import comparison_report

        if self.a.endswith(".jsonl"):
            a, b = read_queries(Path(self.a)), read_queries(Path(self.b))
            try:
                found = compare_queries(a, b, ks=self.k)
            except ValueError as error:
                raise ValueError(f"{error} (a is {self.a}, b is {self.b})") from error
            return Printed(comparison_report(found, self.a, self.b).to_text(), [one.to_dict() for one in found])

        from hnclip.api import evaluate_all, open_models

        compute, data = self.compute, sources(self.data) or ["scenes/park"]
        models = [open_models(name, self.opening, compute.device)[0] for name in (self.a, self.b)]
        results = evaluate_all(models, data, split=self.split, read=self.read, batch=compute.batch)
        texts, content = [], []
        for ours, theirs in zip(results[: len(data)], results[len(data) :]):
            compared = compare_ranks(ours.ranks, theirs.ranks, groups=theirs.groups, ks=self.k)
            report = comparison_report(compared, ours.model, theirs.model)
            texts.append(f"{ours.data}, {ours.split}\n\n{report.to_text()}")
            content += [{"data": ours.data, "split": ours.split, **one.to_dict()} for one in compared]
        return Printed("\n\n".join(texts), content)


@dataclass(frozen=True)
class Diagnose(ModelOnData):
    """Analyse data with a model before training: how similar captions are, which records are duplicates, whether the
    model knows the images, and whether InfoNCE is saturated. Writes a report that ends with advice for a run."""

    data: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DATA")]
    """As for `hnclip train` (hnclip docs data). Without images, only the captions are analysed."""
    model: str = "bundled"
    """As for `hnclip eval` (hnclip docs models)."""
    out: Path = Path("runs/diagnose")
    """Directory of the report, and of the embeddings, which later calls reuse."""
    split: str | None = None
    """Split to analyse; the training split if not given, or all records if there are no splits."""
    images: bool = True
    """Also encode the images, for retrieval, losses and gradients."""
    gradients: bool = False
    """Measure the gradients of both losses with respect to all parameters, at the model's weights."""
    batches: Count = 16
    """Batches on which gradients are measured."""
    recipe: Recipe = "demo"
    """Settings of the planned run, above all its batch sizes."""
    negatives: Literal["micro", "batch", "memory"] = "micro"
    """Negatives of the planned run, as --optim.negatives of `hnclip train`."""
    gamma: NonNegative = 0.5
    """γ of the planned run."""
    threshold: float = 0.98
    """Captions with at least this cosine are reported as suspected duplicates."""

    def run(self) -> DiagnoseResult:
        with large_import():
            from hnclip.analysis.diagnose import diagnose as run

        return run(**arguments_of(self))
