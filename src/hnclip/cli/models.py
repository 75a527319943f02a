"""`hnclip convert` and `hnclip interpolate`."""

from __future__ import annotations

import logging
import shlex
from dataclasses import field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

import tyro
from pydantic import Field
from pydantic.dataclasses import dataclass

from hnclip.cli.options import (
    ModelOnData,
    ModelOpening,
    Output,
    OutputGroup,
    Printed,
    SeveralData,
    check_free,
    sources,
)
from hnclip.config import Opening

log = logging.getLogger("hnclip")


Share = Annotated[float, Field(ge=0, le=1)]


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
class Interpolate(ModelOnData):
    """Interpolate the weights of a base model and its fine-tuned version (WiSE-FT): (1 − α)·base + α·tuned.

    With one --alpha and --out, writes that model. With several, evaluates each on the validation split of all DATA,
    prints the tables, and with --out writes the one with the best mean R@1."""

    base: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="BASE")]
    """The model before fine-tuning."""
    tuned: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="TUNED")]
    """The model after fine-tuning, for example its run."""
    data: SeveralData = ("scenes/park",)
    """Data to evaluate on: those of the fine-tuning, and those that must not be forgotten."""
    alpha: Annotated[tuple[Share, ...], Field(min_length=1)] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    """Values of α: 0 is the base model, 1 the tuned model."""
    out: Path | None = None
    """Directory to write; it must be empty or not exist, unless --replace is given."""
    replace: bool = False
    """Replace the contents of the directory."""

    def __post_init__(self) -> None:
        if len(self.alpha) == 1 and self.out is None:
            raise ValueError("one --alpha without --out would do nothing: give --out, or several values to compare")

    def run(self) -> Printed:
        if self.out is not None:
            check_free(self.out, self.replace)

        from hnclip.api import evaluate_all
        from hnclip.models.load import load, save
        from hnclip.models.model_card import Training
        from hnclip.models.parameters import interpolate, match_base
        from hnclip.report.results import evaluation_report
        from hnclip.util.device import find_device

        device, data = find_device(self.compute.device), sources(self.data)
        base = load(self.base, **vars(self.opening)).to(device)
        tuned, mixed = load(self.tuned).to(device), load(self.tuned).to(device)
        match_base(base, tuned)
        best, lines = self.alpha[0], list[str]()
        metrics: dict[float, dict[str, Any]] = {}
        if len(self.alpha) > 1:
            names = {f"α {alpha:g}": alpha for alpha in self.alpha}
            models = [(name, partial(interpolate, mixed, base, tuned, alpha)) for name, alpha in names.items()]
            results = evaluate_all(models, data, split="validation", read=self.read, batch=self.compute.batch)
            for result in results:
                metrics.setdefault(names[result.model], {})[result.data] = result.metrics
            best = max(metrics, key=lambda alpha: fmean(found["mean_R@1"] for found in metrics[alpha].values()))
            lines += [evaluation_report(results).to_text(), f"best mean R@1: α {best:g}"]
        if self.out is not None:
            interpolate(mixed, base, tuned, best)
            words = ["hnclip", "interpolate", self.base, self.tuned, "--alpha", f"{best:g}", "--out", str(self.out)]
            mixed.provenance = Training(
                base=f"{self.base}, interpolated with {self.tuned}",
                data=f"{', '.join(data)} (validation, to choose α)" if metrics else "none",
                objective={"alpha": best},
                command=shlex.join(words),
                metrics={f"validation of {source}": found for source, found in metrics.get(best, {}).items()},
            )
            save(mixed, self.out)
            lines.append(f"written: {self.out}")
        out = None if self.out is None else str(self.out)
        return Printed("\n".join(lines), {"alpha": best, "out": out, "split": "validation", "results": metrics})
