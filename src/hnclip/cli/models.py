"""`hnclip convert` and `hnclip interpolate`."""

from __future__ import annotations

import logging
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

import tyro

from hnclip.cli.options import (
    Compute,
    ComputeGroup,
    ModelOpening,
    Output,
    OutputGroup,
    Printed,
    SeveralData,
    check_free,
    sources,
)
from hnclip.config import Opening, ReadConfig
from hnclip.util.console import progress

log = logging.getLogger("hnclip")


@dataclass(frozen=True)
class Convert:
    """Read a model of any supported layout, print what was recognised, and write it in another layout."""

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """As for `hnclip eval` (hnclip docs models); an adapter is merged, and a run is its best epoch."""
    out: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT")]
    """Directory to write; it must be empty or not exist, unless --replace is given."""
    to: Literal["hf", "onnx", "immich"] = "hf"
    """hf: Hugging Face directory for transformers and sentence-transformers. onnx: both towers as ONNX. immich: the
    same in the layout of the immich photo app, for models as wide as one that immich knows."""
    replace: bool = False
    """Replace the contents of the directory."""
    opening: ModelOpening = field(default_factory=Opening)
    output: OutputGroup = field(default_factory=Output)

    def run(self) -> Printed:
        check_free(self.out, self.replace)

        from hnclip.models.load import load, save

        model = load(self.model, **vars(self.opening))
        log.info(f"recognised: {model.source}")
        if model.untrained_projections:
            log.info("the projections of the joined towers are untrained; train them with hnclip train --model")
        result = {"model": self.model, "recognised": model.source, "out": str(self.out), "to": self.to}
        if self.to == "hf":
            save(model, self.out)
        else:
            from hnclip.export import export_onnx, immich_name

            result |= vars(export_onnx(model, self.out, layout=self.to))
            result |= {"immich_name": immich_name(model)} if self.to == "immich" else {}
        sizes = {"context": model.context, "image_size": model.image_size}
        return Printed(f"written: {self.out}", {**result, **sizes})


@dataclass(frozen=True)
class Interpolate:
    """Interpolate the weights of a base model and its fine-tuned version (WiSE-FT): (1 − α)·base + α·tuned.

    With one --alpha and --out, writes that model. With several, evaluates each on the validation split of all DATA,
    prints the tables, and with --out writes the one with the best mean R@1."""

    base: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="BASE")]
    """The model before fine-tuning."""
    tuned: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="TUNED")]
    """The model after fine-tuning, for example its run."""
    data: SeveralData = ("scenes/park",)
    """Data to evaluate on: those of the fine-tuning, and those that must not be forgotten."""
    alpha: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    """Values of α: 0 is the base model, 1 the tuned model."""
    out: Path | None = None
    """Directory to write; it must be empty or not exist, unless --replace is given."""
    replace: bool = False
    """Replace the contents of the directory."""
    compute: ComputeGroup = field(default_factory=Compute)
    opening: ModelOpening = field(default_factory=Opening)
    read: ReadConfig = field(default_factory=ReadConfig)
    output: OutputGroup = field(default_factory=Output)

    def __post_init__(self) -> None:
        if not self.alpha or not all(0 <= alpha <= 1 for alpha in self.alpha):
            raise ValueError(f"--alpha must be numbers between 0 (the base) and 1 (the tuned model), got {self.alpha}")
        if not self.data:
            raise ValueError("--data needs the name of at least one data set")
        if len(self.alpha) == 1 and self.out is None:
            raise ValueError("one --alpha without --out would do nothing: give --out, or several values to compare")

    def run(self) -> Printed:
        if self.out is not None:
            check_free(self.out, self.replace)

        from hnclip.evaluation.retrieval import drop_unusable, evaluate_task, open_task
        from hnclip.models.load import load, save
        from hnclip.models.model_card import Training
        from hnclip.models.parameters import interpolate as set_weights
        from hnclip.models.parameters import match_base
        from hnclip.report.document import Report, Section
        from hnclip.report.results import recall_table
        from hnclip.util.device import find_device

        device, data = find_device(self.compute.device), sources(self.data)
        base = load(self.base, **vars(self.opening)).to(device)
        tuned, mixed = load(self.tuned).to(device), load(self.tuned).to(device)
        match_base(base, tuned)
        best = self.alpha[0]
        results: dict[float, dict[str, Any]] = {}
        if len(self.alpha) > 1:
            with progress("encoding batches") as bar:
                opened = {source: open_task(source, "validation", self.read) for source in data}
                tasks = {source: drop_unusable(task, mixed, self.read) for source, task in opened.items()}
                for alpha in self.alpha:
                    model = set_weights(mixed, base, tuned, alpha)
                    results[alpha] = {
                        source: evaluate_task(
                            "",
                            model,
                            task,
                            self.read,
                            intervals=False,
                            batch=self.compute.batch,
                            progress=bar.iterate,
                        ).metrics
                        for source, task in tasks.items()
                    }
            best = max(results, key=lambda alpha: fmean(found["mean_R@1"] for found in results[alpha].values()))
        lines = []
        if results:
            tables = {
                source: recall_table({f"α {alpha:g}": found[source] for alpha, found in results.items()})
                for source in data
            }
            sections = [Section(f"{source}, validation split", [table]) for source, table in tables.items()]
            lines += [Report("Interpolated models", [], sections).to_text(), f"best mean R@1: α {best:g}"]
        if self.out is not None:
            set_weights(mixed, base, tuned, best)
            words = ["hnclip", "interpolate", self.base, self.tuned, "--alpha", f"{best:g}", "--out", "mixed"]
            mixed.provenance = Training(
                base=f"{self.base}, interpolated with {self.tuned}",
                data=f"{', '.join(data)} (validation, to choose α)" if results else "none",
                objective={"alpha": best},
                command=shlex.join(words),
                metrics={f"validation of {source}": found for source, found in results.get(best, {}).items()},
            )
            save(mixed, self.out)
            lines.append(f"written: {self.out}")
        out = None if self.out is None else str(self.out)
        return Printed("\n".join(lines), {"alpha": best, "out": out, "split": "validation", "results": results})
