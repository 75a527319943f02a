"""Options of the commands, as dataclasses from which the command line is built."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from hnclip.config import Fidelity, GlobalLoss, Opening, ReadConfig, RunOptions, TrainConfig
from hnclip.encode.options import EncodeOptions
from hnclip.objectives.registry import MethodChoice

Recipe = Literal[
    "demo",
    "paper",
    "paper/docci",
    "paper/dci",
    "paper/urban-1k",
    "tiny",
    "results",
    "lora",
    "dora",
    "long_clip",
    "finelip",
    "goal",
    "smartclip",
    "structxlip",
]


Repeatable = Annotated[tuple[tuple[str, ...], ...], tyro.conf.UseAppendAction]
"""`--model X Y` and `--model X --model Y`: the values of each occurrence."""


@dataclass(frozen=True)
class Output:
    """Messages and results."""

    json: bool = False
    """Print the result as JSON; messages are then limited to warnings."""
    quiet: bool = False
    """Only warnings and errors, no progress."""
    log_file: Path | None = None
    """Also append all messages, with time and level, to this file."""


@dataclass(frozen=True)
class Train:
    """Fine-tune a model on image–caption pairs. Every field of the configuration is an option here."""

    training: Annotated[TrainConfig, tyro.conf.arg(name="")]
    run: Annotated[RunOptions, tyro.conf.arg(name="")]
    recipe: Recipe | None = None
    """Base settings, which other options override; if not given, demo for the bundled model, paper for any other, and
    lora or dora with --adapt.method. A recipe named after a method has its released hyper-parameters; paper/… are the
    paper's settings with Long-CLIP-L and the training data of one of its benchmarks."""
    objective: MethodChoice | None = None
    """Apply a method to the recipe: its terms and its own global loss, which --global replaces (docs/methods.md)."""
    global_loss: Annotated[GlobalLoss | None, tyro.conf.arg(name="global")] = None
    """Global loss, short for --objective.global-loss: `--objective goal --global hn` is GOAL with L_HN."""
    fidelity: Fidelity | None = None
    """Short for --objective.fidelity: a method as released, or with its errors corrected."""
    config: Path | None = None
    """Start from a configuration file instead of a recipe, for example the config.json of an earlier run."""
    resume: Path | None = None
    """Continue the run in this directory from its last checkpoint, with its own configuration; --device, --threads,
    --speed.*, --save-minutes, --evaluate-batch and --tensorboard may change."""
    output: Annotated[Output, tyro.conf.arg(name="")] = Output()


@dataclass(frozen=True)
class Eval:
    """Retrieval metrics of one or more models on one or more data sets: both directions, with bootstrap intervals.
    Every model is compared with the first."""

    opening: Annotated[Opening, tyro.conf.arg(name="")]
    read: ReadConfig
    model: Repeatable = ()
    """`bundled` (if not given), a Hugging Face directory or hub name, IMAGE+TEXT towers, an adapter, a checkpoint file
    in OpenAI's layout (docs/models.md), or a run directory (its best and its last epoch)."""
    data: Annotated[Repeatable, tyro.conf.arg(aliases=["--on"])] = ()
    """Benchmarks and data as for `hnclip train`, separated by spaces or commas (docs/data.md); scenes/park if not
    given."""
    split: str | None = None
    """test, validation, train, all, or another split of the data; test if not given, or all if there are no splits."""
    out: Repeatable = ()
    """Also write the results to these files: .json, .md, .tex or .txt."""
    queries: Path | None = None
    """Also write every query with its rank and top candidates to this directory, one file per model and data set."""
    top: int = 10
    """Candidates per query in those files."""
    paper: bool = True
    """Show the paper's published numbers next to the results, if it has the benchmark."""
    batch: int = 128
    """Images or captions encoded at once."""
    device: str = "auto"
    """auto uses an accelerator if there is one; or cpu, cuda, mps …"""
    output: Annotated[Output, tyro.conf.arg(name="")] = Output()

    def __post_init__(self) -> None:
        for name in ("batch", "top"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"--{name} must be at least 1, got {value}")


@dataclass(frozen=True)
class Compare:
    """Compare two models on the same queries, from the files of `hnclip eval --queries`: the difference in recall, with
    the interval of a paired bootstrap."""

    a: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="A")]
    """Query file of one model."""
    b: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="B")]
    """Query file of the model that it is compared with."""
    k: tuple[int, ...] = (1, 5, 10)
    """Values of K for R@K."""
    output: Annotated[Output, tyro.conf.arg(name="")] = Output()

    def __post_init__(self) -> None:
        if not self.k or min(self.k) < 1:
            raise ValueError(f"--k must be numbers from 1 on, got {self.k}")


@dataclass(frozen=True)
class Check:
    """Look for problems in data before training: missing or damaged images, empty, truncated or equal captions,
    near-duplicates, images in two splits. Exit code 1 if there are invalid records."""

    data: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DATA")]
    """As for `hnclip train` (docs/data.md)."""
    read: ReadConfig
    opening: Annotated[Opening, tyro.conf.arg(name="")]
    model: str | None = None
    """Count the tokens of this model, and the captions that it would truncate."""
    images: bool = True
    """Also decode the images."""
    listed: int = 5
    """Examples printed per problem; --json has all of them."""
    output: Annotated[Output, tyro.conf.arg(name="")] = Output()


@dataclass(frozen=True)
class Cache:
    """List the caches of decoded images, one for each image geometry of a model, with their sizes; or delete some."""

    cache: Annotated[str | None, tyro.conf.arg(name="read.cache")] = None
    """The cache directory; $HNCLIP_CACHE or ~/.cache/hnclip if not given."""
    delete: Literal["old", "all"] | None = None
    """old: those of earlier versions, which are not used any more. Images are decoded again when they are needed."""
    output: Annotated[Output, tyro.conf.arg(name="")] = Output()


@dataclass(frozen=True)
class Diagnose:
    """Analyse data with a model before training: how similar captions are, which records are duplicates, whether the
    model knows the images, and whether InfoNCE is saturated. Writes a report that ends with advice for a run."""

    data: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DATA")]
    """As for `hnclip train` (docs/data.md). Without images, only the captions are analysed."""
    opening: Annotated[Opening, tyro.conf.arg(name="")]
    read: ReadConfig
    model: str = "bundled"
    """As for `hnclip eval` (docs/models.md); for a run directory, its best epoch."""
    out: Path = Path("runs/diagnose")
    """Directory of the report, and of the embeddings, which later calls reuse."""
    split: str | None = None
    """Split to analyse; the training split if not given, or all records if there are no splits."""
    images: bool = True
    """Also encode the images, for retrieval, losses and gradients."""
    gradients: bool = False
    """Measure the gradients of both losses with respect to all parameters, at the model's weights."""
    batches: int = 16
    """Batches on which gradients are measured."""
    recipe: Literal["demo", "paper", "tiny", "lora", "dora"] = "demo"
    """Settings of the planned run, above all its batch sizes."""
    negatives: Literal["micro", "batch", "memory"] = "micro"
    """Negatives of the planned run, as --optim.negatives of `hnclip train`."""
    gamma: float = 0.5
    """γ of the planned run."""
    threshold: float = 0.98
    """Captions with at least this cosine are reported as suspected duplicates."""
    batch: int = 128
    """Images or captions encoded at once."""
    device: str = "auto"
    """auto uses an accelerator if there is one; or cpu, cuda, mps …"""
    output: Annotated[Output, tyro.conf.arg(name="")] = Output()

    def __post_init__(self) -> None:
        for name in ("batch", "batches"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"--{name} must be at least 1, got {value}")
        if not 0 < self.threshold <= 1:
            raise ValueError(f"--threshold must be a cosine similarity above 0 and at most 1, got {self.threshold}")
        if self.gamma < 0:
            raise ValueError(f"--gamma must not be negative, got {self.gamma}")


@dataclass(frozen=True)
class Convert:
    """Load a model in any supported layout, print what was recognised, and write it in another layout."""

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """`bundled`, a Hugging Face directory or hub name, IMAGE+TEXT towers, an adapter (it is merged), or a checkpoint
    file in OpenAI's layout (docs/models.md)."""
    out: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT")]
    """Directory to write; it must be empty or not exist, unless --replace is given."""
    opening: Annotated[Opening, tyro.conf.arg(name="")]
    to: Literal["hf", "onnx", "immich"] = "hf"
    """hf: Hugging Face directory for transformers and sentence-transformers. onnx: both towers as ONNX. immich: the
    same in the layout of the immich photo app, for models as wide as one that immich knows."""
    replace: bool = False
    """Replace the contents of the directory."""
    output: Annotated[Output, tyro.conf.arg(name="")] = Output()


@dataclass(frozen=True)
class Interpolate:
    """Interpolate the weights of a base model and its fine-tuned version (WiSE-FT): (1 − α)·base + α·tuned.

    With one --alpha and --out, writes that model. With several, evaluates each on the validation split of every --data,
    prints the tables, and with --out writes the one with the best mean R@1."""

    base: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="BASE")]
    """The model before fine-tuning."""
    tuned: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="TUNED")]
    """The model after fine-tuning."""
    opening: Annotated[Opening, tyro.conf.arg(name="")]
    alpha: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    """Values of α: 0 is the base model, 1 the tuned model."""
    data: tuple[str, ...] = ("scenes/park",)
    """Data sets to evaluate on: those of the fine-tuning, and those that must not be forgotten."""
    read: ReadConfig = field(default_factory=ReadConfig)
    out: Path | None = None
    """Directory to write; it must be empty or not exist, unless --replace is given."""
    replace: bool = False
    """Replace the contents of the directory."""
    batch: int = 128
    """Images or captions encoded at once."""
    device: str = "auto"
    """auto uses an accelerator if there is one; or cpu, cuda, mps …"""
    output: Annotated[Output, tyro.conf.arg(name="")] = Output()

    def __post_init__(self) -> None:
        if not self.alpha or not all(0 <= alpha <= 1 for alpha in self.alpha):
            raise ValueError(f"--alpha must be numbers between 0 (the base) and 1 (the tuned model), got {self.alpha}")
        if not self.data:
            raise ValueError("--data needs the name of at least one data set")


@dataclass(frozen=True)
class Encode:
    """Encode images and captions to a directory of embeddings in the layout of clip-retrieval. The same command resumes
    an interrupted one and encodes damaged files again. With --partition 0/N to N-1/N, N processes share the work; the
    result is bit-identical."""

    encoding: Annotated[EncodeOptions, tyro.conf.arg(name="")]
    output: Annotated[Output, tyro.conf.arg(name="")] = Output()


@dataclass(frozen=True)
class PrepareRegions:
    """Find regions of the images and the sentences of the captions that describe them. The same command continues
    after an interruption and updates records that have changed."""

    data: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DATA")]
    """As for `hnclip train` (docs/data.md)."""
    opening: Annotated[Opening, tyro.conf.arg(name="")]
    read: ReadConfig
    proposer: str = "auto"
    """sam, felzenszwalb, grid or felzenszwalb+grid. auto: sam if --weights are given, otherwise felzenszwalb+grid, for
    records without regions of their own."""
    weights: Path | None = None
    """Directory with SAM's weights, as saved by transformers."""
    model: str = "bundled"
    """Model that matches sentences to regions, as for `hnclip eval` (docs/models.md); for a run its best epoch."""
    sentences: Literal["careful", "dots"] = "careful"
    """How captions are split into sentences: careful knows decimals and abbreviations, dots is GOAL's split('.')."""
    split: str | None = None
    """Split to prepare; train if not given, all if the data declare no splits."""
    out: Path | None = None
    """Directory for the manifest; --read.prepared or the cache directory if not given."""
    replace: bool = False
    """Overwrite a manifest instead of continuing it, for example with another proposer or model."""
    batch: int = 128
    """Crops or sentences encoded at once."""
    workers: int | None = None
    """Images processed at once before they are encoded; the number of processors if not given."""
    device: str = "auto"
    """auto uses an accelerator if there is one; or cpu, cuda, mps …"""
    output: Annotated[Output, tyro.conf.arg(name="")] = Output()

    def __post_init__(self) -> None:
        _at_least_one(self, "batch", "workers")


@dataclass(frozen=True)
class PrepareText:
    """Remove words of appearance (colours, materials, textures) from the captions, for example with a function of your
    own. The same command continues after an interruption and updates records that have changed."""

    data: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DATA")]
    """As for `hnclip train` (docs/data.md)."""
    read: ReadConfig
    filter: str = "lexicon"
    """lexicon, lexicon:colours and the like for some of its lists, blunt for plain removal of words, or
    package.module:function for a function of your own that takes a caption and returns one."""
    split: str | None = None
    """Split to prepare; train if not given, all if the data declare no splits."""
    out: Path | None = None
    """Directory for the manifest; --read.prepared or the cache directory if not given."""
    replace: bool = False
    """Overwrite a manifest instead of continuing it, for example with another filter."""
    workers: int = 1
    """Records filtered at once, for a function that waits for a service."""
    output: Annotated[Output, tyro.conf.arg(name="")] = Output()

    def __post_init__(self) -> None:
        _at_least_one(self, "workers")


def _at_least_one(options: Any, *names: str) -> None:
    for name in names:
        if (value := getattr(options, name)) is not None and value < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}")


@dataclass(frozen=True)
class Study:
    """Tables and figures of the paper, and controls that it lacks, on any data and model (docs/studies.md). Trains
    missing runs and reuses finished ones. The same command resumes an interrupted study; several processes may run it
    at the same time."""

    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")]
    """A study, several separated by commas, or all; list prints them."""
    read: ReadConfig
    model: str | None = None
    """As for `hnclip train` (docs/models.md); the model of the recipe if not given."""
    data: tuple[str, ...] = ()
    """Domains to train on; each is also tested on its test split (docs/data.md). The data of the recipe if not
    given."""
    tests: tuple[str, ...] = ()
    """Additional data to test on: long-dci is for runs on dci, urban-1k for runs on vg-paragraphs, any other for every
    domain. A recipe paper/… already includes those of the paper."""
    recipe: Recipe | None = None
    """Base settings of all rows, as for `hnclip train`; if not given, demo for the bundled model and paper for any
    other. With paper or paper/…, each method has the learning rate that the paper states for it. results is that of
    docs/results.md, on scenes/park and scenes/shelf."""
    set: tuple[str, ...] = ()
    """Fields of the configuration by their dotted names, `optim.epochs=2 objective.gamma=0.25`, or of how runs are
    executed, `speed.recompute=true save_minutes=30`. Settings of a row, and its own learning rate, take precedence."""
    seeds: tuple[int, ...] = ()
    """Seeds of all rows; if not given, as many of 42, 1337, 3407 as the study requires."""
    out: Path = Path("runs/studies")
    """Runs are written to OUT/runs, shared by all studies, tables and figures to OUT/NAME."""
    docs: Path | None = None
    """Also write results.md and its figures, one page about all studies of the call, to this directory."""
    dry_run: bool = False
    """Print the planned runs, their state, and the time left if finished runs tell it. The data of benchmarks and the
    model need not be present."""
    shard: str | None = None
    """K/N: execute the K-th of N parts of the plan, for example 1/4, 2/4, 3/4, 4/4 on four machines that share OUT. The
    process that finds everything done writes the tables."""
    device: str = "auto"
    """auto uses an accelerator if there is one; or cpu, cuda, mps …"""
    threads: int = 0
    """CPU threads of a run; 0 leaves the choice to torch. Results are bit-identical only for the same number."""
    output: Annotated[Output, tyro.conf.arg(name="")] = Output()

    def __post_init__(self) -> None:
        if len({*self.seeds}) < len(self.seeds):
            raise ValueError(f"--seeds names a seed twice: {' '.join(map(str, self.seeds))}")
        if self.shard is not None:
            number, slash, count = self.shard.partition("/")
            if not (slash and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
                raise ValueError(f"--shard is K/N, for example 2/4, got {self.shard!r}")


@dataclass(frozen=True)
class Demo:
    """Fine-tune the bundled model on generated scenes with InfoNCE and with HN-CLIP, compare them on the test split,
    and write a report. Takes a few minutes on two cores; the same command resumes an interrupted demo."""

    out: Path = Path("runs/demo")
    """Directory of both runs and the report."""
    seed: int = 42
    output: Annotated[Output, tyro.conf.arg(name="")] = Output()
