"""`hnclip train` and `hnclip demo`."""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import field, fields, replace
from io import StringIO
from pathlib import Path
from typing import Annotated, Any

import tyro
from pydantic.dataclasses import dataclass

from hnclip.cli.options import ModelOpening, Output, OutputGroup, Printed, Recipe, parse_options
from hnclip.config import (
    AdaptConfig,
    Fidelity,
    GlobalLoss,
    ObjectiveConfig,
    Opening,
    OptimConfig,
    ReadConfig,
    RunOptions,
    Selection,
    SpeedConfig,
    TrainConfig,
    option_words,
    read_config,
    with_fields,
)
from hnclip.data.sources import is_own_data
from hnclip.objectives.registry import MethodChoice
from hnclip.recipes import NEEDS_MODEL, change_method, make_config
from hnclip.util.optional import large_import
from hnclip.util.text import counted, duration

log = logging.getLogger("hnclip")

# Options that are fields of a section under a short name.
SHORT = {
    **dict.fromkeys(("global_loss", "fidelity", "gamma"), "objective"),
    **dict.fromkeys(("epochs", "lr", "micro_batch"), "optim"),
}


@dataclass(frozen=True)
class MethodVariant:
    """What a recipe is combined with."""

    fidelity: Fidelity | None = None
    """Methods other than hn_clip: as released, or with its errors corrected (hnclip docs methods)."""
    config: Path | None = None
    """Start from a configuration file instead of a recipe, for example the config.json of an earlier run."""


@dataclass(frozen=True)
class Execution(RunOptions):
    """Where and how the run is executed; these may change when it is resumed."""

    out: tyro.conf.Fixed[Path] = Path()  # an option of its own
    speed: tyro.conf.Fixed[SpeedConfig] = field(default_factory=SpeedConfig)


@dataclass(frozen=True)
class Base:
    """The options that decide the defaults of the others, those of their sections included."""

    model: str | None = None
    method: MethodChoice | None = None
    global_loss: GlobalLoss | None = None
    fidelity: Fidelity | None = None
    gamma: float | None = None
    epochs: int | None = None
    lr: float | None = None
    micro_batch: int | None = None
    recipe: Recipe | None = None
    config: Path | None = None
    resume: Path | None = None
    adapt: Annotated[str | None, tyro.conf.arg(name="adapt.method")] = None

    def defaults(self) -> tuple[TrainConfig, RunOptions]:
        """The defaults from a saved run, a configuration file or a recipe."""
        if self.resume is not None:
            with large_import():
                from hnclip.training.runs import saved_config, saved_options

            return saved_config(self.resume), saved_options(self.resume)
        method, loss, fidelity = self.method, self.global_loss, self.fidelity
        if self.config is not None:
            config = change_method(read_config(TrainConfig, self.config), method, loss, fidelity)
        else:
            config = make_config(self.recipe, self.model, method, loss, fidelity, adapt=self.adapt)
        given = {f"{section}.{name}": getattr(self, name) for name, section in SHORT.items()}
        return with_fields(config, {name: value for name, value in given.items() if value is not None}), RunOptions()


@dataclass(frozen=True)
class Train:
    """Fine-tune a model on image–caption pairs. The first options are those that most runs need; below, every field of
    the configuration is an option."""

    data: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DATA")] = "scenes/park"
    """A folder of images with captions, a CSV, TSV, JSON, JSONL or Parquet file, Karpathy's JSON, WebDataset shards,
    a Hugging Face data set, a benchmark as NAME=FOLDER, or generated scenes/park, scenes/shelf (hnclip docs data)."""
    model: str = "bundled"
    """A Hugging Face directory or hub name, a checkpoint file in OpenAI's layout, IMAGE+TEXT towers, an adapter, a run,
    or bundled (hnclip docs models). Required for your own data."""
    out: Path = Path("runs/train")
    """Directory of the run: configuration, metrics, checkpoint, best and last model."""
    method: MethodChoice | None = None
    """A method's terms and its own global loss (hnclip docs methods); hn_clip if not given."""
    global_loss: GlobalLoss | None = None
    """Exchange the global loss of the method: `--method goal --global-loss hn` is GOAL with L_HN."""
    gamma: float = 0.5
    """γ, the strength of the similarity margin of hn. With 0, hn is plain InfoNCE."""
    epochs: int = 10
    """Passes over the training data."""
    lr: float = 2e-6
    """Highest learning rate."""
    micro_batch: int = 16
    """Pairs encoded at once; --optim.accumulate of them are a batch."""
    recipe: Recipe | None = None
    """Base settings, which other options override; if not given, demo for the bundled model, paper for any other, lora
    or dora with --adapt.method. A recipe named after a method has its released hyper-parameters; paper/… are the
    paper's settings with Long-CLIP-L and the training data of one of its benchmarks."""
    resume: Path | None = None
    """Continue the run in this directory from its last checkpoint, with its own configuration; only options of
    execution, --speed.* and messages may be given with it."""
    variant: tyro.conf.OmitArgPrefixes[MethodVariant] = field(default_factory=MethodVariant)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    adapt: AdaptConfig = field(default_factory=AdaptConfig)
    opening: ModelOpening = field(default_factory=Opening)
    selection: tyro.conf.OmitArgPrefixes[Selection] = field(default_factory=Selection)
    read: ReadConfig = field(default_factory=ReadConfig)
    execution: tyro.conf.SuppressFixed[tyro.conf.OmitArgPrefixes[Execution]] = field(default_factory=Execution)
    speed: SpeedConfig = field(default_factory=SpeedConfig)
    output: OutputGroup = field(default_factory=Output)

    def __post_init__(self) -> None:
        self.config()  # refuses options that contradict each other

    @classmethod
    def parse(cls, words: Sequence[str]) -> Train:
        """Two passes: options that decide the defaults of others, then all, so that the help shows these defaults."""
        first = [word for word in words if word not in ("-h", "--help")]
        try:
            with redirect_stderr(StringIO()):
                base, _ = parse_options(Base, "train", first, return_unknown_args=True, add_help=False)
        except SystemExit:  # the second pass says what is wrong
            base = Base()
        usual = cls.with_defaults(*base.defaults())
        options: Train = parse_options(cls, "train", words, default=usual)
        if options.resume is not None:
            may_change = {name: getattr(options, name) for name in ("resume", "execution", "speed", "output")}
            if options != replace(usual, **may_change):
                raise ValueError(
                    "--resume continues with the run's own configuration: only --device, --threads, --speed.*, "
                    "--save-minutes, --evaluate-batch and --tensorboard may change"
                )
            return options
        for name, section in SHORT.items():
            if getattr(base, name) not in (None, getattr(getattr(options, section), name)):
                flag = name.replace("_", "-")
                raise ValueError(f"--{flag} and --{section}.{flag} are the same: give one of them")
        if options.model == "bundled" and not (base.model or base.config) and is_own_data(options.data):
            raise ValueError(NEEDS_MODEL)
        return options

    @classmethod
    def with_defaults(cls, config: TrainConfig, run: RunOptions) -> Train:
        """The options of a configuration."""
        return cls(
            data=config.data,
            model=config.model,
            out=run.out,
            gamma=config.objective.gamma,
            epochs=config.optim.epochs,
            lr=config.optim.lr,
            micro_batch=config.optim.micro_batch,
            objective=config.objective,
            optim=config.optim,
            adapt=config.adapt,
            opening=Opening(**_fields(Opening, config)),
            selection=Selection(**_fields(Selection, config)),
            read=config.read,
            execution=Execution(**_fields(RunOptions, run)),
            speed=run.speed,
        )

    def config(self) -> TrainConfig:
        return TrainConfig(
            model=self.model,
            data=self.data,
            objective=self.objective,
            optim=self.optim,
            adapt=self.adapt,
            read=self.read,
            **vars(self.opening),
            **vars(self.selection),
        )

    def run_options(self) -> RunOptions:
        return RunOptions(**{**_fields(RunOptions, self.execution), "out": self.out, "speed": self.speed})

    def run(self) -> Printed | None:
        with large_import():
            from hnclip import api

        if self.resume is not None:
            result = api.resume(self.resume, self.run_options())
        else:
            result = api.train(config=self.config(), options=self.run_options())
        if os.environ.get("RANK", "0") != "0":  # of the processes of torchrun, rank 0 prints the result
            return None
        return Printed("\n".join(_summary(result)), {**vars(result), "out": str(result.out)})


def _fields(kind: Any, values: Any) -> dict[str, Any]:
    return {spec.name: getattr(values, spec.name) for spec in fields(kind)}


def _summary(result: Any) -> list[str]:
    """What a run came to, and the commands that use it."""
    from hnclip.training.log import read_metrics
    from hnclip.training.runs import saved_config

    lines = [f"trained {counted(result.steps, 'step')} in {duration(result.seconds)}"]
    for name, found in (("best", result.best), ("last", result.last)):
        recall = found["mean_R@1"]
        lines.append(f"  {name}: epoch {found['epoch']}, validation R@1 {recall:.1f}   {result.out / name}")
    if measured := read_metrics(result.out, "gradients"):
        from hnclip.analysis.gradients import gradient_summary

        lines.append(f"gradients, in {result.out / 'metrics.jsonl'}:\n{gradient_summary(measured).to_text()}")
    if result.best["epoch"] == 0:
        lines.append(
            "no epoch was better on the validation split than the model before training (epoch 0), which is best/"
        )
    out, config = shlex.quote(str(result.out)), saved_config(result.out)
    has_test = any(entry["test_split"] for entry in read_metrics(result.out, "data"))
    words = [config.data, *([] if has_test else ["--split", "validation"])]
    words += option_words(config.read, ReadConfig(), "read.")
    return [
        *lines,
        f"evaluate: hnclip eval {shlex.join(words)} --model {out}",
        f"search:   hnclip index IMAGES --model {out} --out images.hnc",
    ]


@dataclass(frozen=True)
class Demo:
    """Fine-tune the bundled model on generated scenes with InfoNCE and with HN-CLIP, compare them on the test split,
    and write a report. Takes a few minutes on two cores; the same command resumes an interrupted demo."""

    out: Path = Path("runs/demo")
    """Directory of both runs and the report."""
    seed: int = 42
    output: OutputGroup = field(default_factory=Output)

    def run(self) -> Printed:
        from hnclip.demo import demo as run

        report = run(self.out, seed=self.seed)
        log.info(f"report: {self.out / 'report.html'}")
        return Printed(report.to_text(), report.data)
