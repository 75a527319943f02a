"""The options of every command, as dataclasses that the command line is made from."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from hnclip.config import Fidelity, GlobalLoss, ReadConfig, RunOptions, TrainConfig
from hnclip.objectives.registry import MethodChoice

Recipe = Literal[
    "demo",
    "paper",
    "paper/docci",
    "paper/dci",
    "paper/urban-1k",
    "tiny",
    "miniature",
    "lora",
    "dora",
    "long_clip",
    "finelip",
    "goal",
    "smartclip",
    "structxlip",
]


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
    recipe: Recipe = "demo"
    """Settings to start from; other options change them. Those named after a method are its released ones; paper/…
    are the paper's own with Long-CLIP-L and the training data of one of its benchmarks."""
    objective: MethodChoice | None = None
    """A method for the settings of the recipe: its terms and its own global loss, which --global replaces
    (docs/methods.md)."""
    global_loss: Annotated[GlobalLoss | None, tyro.conf.arg(name="global")] = None
    """The global loss, the same as --objective.global-loss: `--objective goal --global hn` is GOAL with L_HN."""
    fidelity: Fidelity | None = None
    """The same as --objective.fidelity: a method as it was released, or with its errors corrected."""
    config: Path | None = None
    """Start from a configuration file instead, for example the config.json of an earlier run."""
    resume: Path | None = None
    """Continue the run in this directory from its last checkpoint, with its own configuration; --device, --threads,
    --speed.*, --save-every, --evaluate-batch and --tensorboard may change."""
    output: Annotated[Output, tyro.conf.arg(name="")] = Output()


@dataclass(frozen=True)
class Opening:
    """How a model is opened."""

    context: int | None = None
    """Longest caption in tokens: a shorter model is stretched to it, a longer one is left as it is."""
    keep: int = 20
    """Leading positions that stretching leaves as they are."""
    ratio: int | None = None
    """New positions for each step of the others; the smallest that reaches the context when left out."""
    tokenizer: Path | None = None
    """Directory of another tokenizer than the model's own."""
    activation: Literal["quick_gelu", "gelu"] | None = None
    """Of a file of weights that does not say it: quick_gelu for OpenAI's, gelu for most of open_clip's."""


@dataclass(frozen=True)
class Eval:
    """Retrieval metrics of one or several models on one or several data sets: both directions, bootstrap intervals,
    every model compared with the first."""

    opening: Annotated[Opening, tyro.conf.arg(name="")]
    read: ReadConfig
    model: tuple[str, ...] = ("bundled",)
    """`bundled`, a Hugging Face directory or hub name, IMAGE+TEXT towers, an adapter, a file of weights in OpenAI's
    layout (docs/models.md), or a run: its best epoch and its last."""
    data: Annotated[tuple[str, ...], tyro.conf.arg(aliases=["--on"])] = ("scenes/park",)
    """Benchmarks and data as for `hnclip train`, separated by spaces or commas (docs/data.md)."""
    split: str | None = None
    """test, validation, train, all, or a split of the data's own; test when left out, all where there are no splits."""
    out: tuple[Path, ...] = ()
    """Also write the results to these files: .json, .md, .tex or .txt."""
    queries: Path | None = None
    """Also write every query with its rank and best candidates into this directory, a file per model and data set."""
    top: int = 10
    """Candidates of each query in those files."""
    paper: bool = True
    """Show the paper's published numbers beside, where it has the benchmark."""
    batch: int = 128
    """Pictures or captions encoded at once."""
    device: str = "auto"
    """auto takes an accelerator if there is one; or cpu, cuda, mps …"""
    output: Annotated[Output, tyro.conf.arg(name="")] = Output()


@dataclass(frozen=True)
class Compare:
    """Two models on the same queries, from the files that `hnclip eval --queries` wrote: who finds more, by how much,
    and whether that is more than chance."""

    a: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="A")]
    """File of queries of one model."""
    b: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="B")]
    """File of queries of the model that it is compared with."""
    k: tuple[int, ...] = (1, 5, 10)
    """Lengths of the result list."""
    output: Annotated[Output, tyro.conf.arg(name="")] = Output()


@dataclass(frozen=True)
class Check:
    """Look for problems in data before training: pictures that are missing or damaged, captions that are empty, cut or
    equal, near-duplicates, pictures shared by two splits. Exit code 1 if records cannot be used."""

    data: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DATA")]
    """As for `hnclip train` (docs/data.md)."""
    read: ReadConfig
    opening: Annotated[Opening, tyro.conf.arg(name="")]
    model: str | None = None
    """Count tokens as this model does, and captions that it would cut."""
    images: bool = True
    """Decode the pictures too."""
    listed: int = 5
    """Examples of each problem; --json has all of them."""
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
    """Look at captions through a model before training: how alike they are, which pairs repeat each other, whether
    InfoNCE has anything left to learn, and whether L_HN can be expected to help. Writes a report with advice."""

    data: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DATA")]
    """As for `hnclip train` (docs/data.md). Pictures may be missing: then only captions are looked at."""
    opening: Annotated[Opening, tyro.conf.arg(name="")]
    read: ReadConfig
    model: str = "bundled"
    """As for `hnclip eval` (docs/models.md); of a run its best epoch."""
    out: Path = Path("runs/diagnose")
    """Where the report is written, and the vectors, which another call need not encode again."""
    split: str | None = None
    """Whose captions to look at; those for training when left out, all where there are no splits."""
    probe: bool = True
    """Train small heads on the vectors of pictures and captions, to predict what L_HN changes; encodes the pictures."""
    gradients: bool = False
    """Measure gradients of both losses by all parameters, at the model's own weights."""
    batches: int = 16
    """Batches on which gradients are measured."""
    fractions: tuple[float, ...] = ()
    """Also fine-tune on these shares of the training pairs and measure gradients on the way; the paper's are 0.05 0.2
    0.5 1. These are whole runs."""
    recipe: Literal["demo", "paper", "tiny", "lora", "dora"] = "demo"
    """Settings of the run that is thought of, above all its batches."""
    negatives: Literal["micro", "batch"] = "micro"
    """Where its negatives come from, as --optim.negatives of `hnclip train`."""
    gamma: float = 0.5
    """Its γ."""
    threshold: float = 0.98
    """Captions with at least this cosine are suspected to say the same."""
    batch: int = 128
    """Pictures or captions encoded at once."""
    device: str = "auto"
    """auto takes an accelerator if there is one; or cpu, cuda, mps …"""
    output: Annotated[Output, tyro.conf.arg(name="")] = Output()

    def __post_init__(self) -> None:
        for name in ("batch", "batches"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"--{name} must be at least 1, got {value}")
        if not all(0 < fraction <= 1 for fraction in self.fractions):
            raise ValueError(f"--fractions takes shares above 0 and up to 1, as 0.05 0.2, got {self.fractions}")
        if not 0 < self.threshold <= 1:
            raise ValueError(f"--threshold is a cosine above 0 and up to 1, got {self.threshold}")
        if self.gamma < 0:
            raise ValueError(f"--gamma must not be negative, got {self.gamma}")


@dataclass(frozen=True)
class Convert:
    """Open a model in any supported layout, say what was recognised, and write it in another."""

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """`bundled`, a Hugging Face directory or hub name, IMAGE+TEXT towers, an adapter (it is merged), or a file of
    weights in OpenAI's layout (docs/models.md)."""
    out: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT")]
    """Directory to write; one that exists is refused unless --replace."""
    opening: Annotated[Opening, tyro.conf.arg(name="")]
    to: Literal["hf", "onnx", "immich"] = "hf"
    """hf: Hugging Face directory for transformers and sentence-transformers. onnx: both towers as ONNX. immich: the
    same in the layout of the immich photo app."""
    replace: bool = False
    """Replace what is in the directory."""
    output: Annotated[Output, tyro.conf.arg(name="")] = Output()


@dataclass(frozen=True)
class Interpolate:
    """Weights between a base model and what fine-tuning made of it (WiSE-FT): (1 − α)·base + α·tuned.

    One --alpha and --out: write that model. Several: evaluate each on the validation split of every --data, print the
    tables, and with --out write the one with the best mean R@1."""

    base: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="BASE")]
    """The model before fine-tuning."""
    tuned: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="TUNED")]
    """The model after it."""
    opening: Annotated[Opening, tyro.conf.arg(name="")]
    alpha: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    """0 is the base, 1 the tuned model."""
    data: tuple[str, ...] = ("scenes/park",)
    """Data sets to evaluate on: what was tuned for, and what must not be forgotten."""
    read: ReadConfig = field(default_factory=ReadConfig)
    out: Path | None = None
    """Directory to write; one that exists is refused unless --replace."""
    replace: bool = False
    """Replace what is in the directory."""
    batch: int = 128
    """Pictures or captions encoded at once."""
    device: str = "auto"
    """auto takes an accelerator if there is one; or cpu, cuda, mps …"""
    output: Annotated[Output, tyro.conf.arg(name="")] = Output()

    def __post_init__(self) -> None:
        if not self.alpha or not all(0 <= alpha <= 1 for alpha in self.alpha):
            raise ValueError(f"--alpha takes numbers between 0 (the base) and 1 (the tuned model), got {self.alpha}")
        if not self.data:
            raise ValueError("--data needs the name of at least one data set")


@dataclass(frozen=True)
class Encode:
    """Encode pictures and captions into a directory of vectors that numpy reads. After a kill the same command goes on.
    With --partition 0/N to N-1/N any number of processes share the work, and the result is the same to the bit."""

    data: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DATA")]
    """As for `hnclip train` (docs/data.md); with --only images also any folder of pictures."""
    out: Path
    """Directory to write, or to go on with."""
    opening: Annotated[Opening, tyro.conf.arg(name="")]
    read: ReadConfig
    model: str = "bundled"
    """As for `hnclip eval` (docs/models.md); of a run its best epoch."""
    split: str = "all"
    """all, or one split of the data."""
    only: Literal["both", "images", "captions"] = "both"
    """Encode pictures or captions alone."""
    partition: str = "0/1"
    """K/N: make the shards K, K + N, K + 2·N … alone."""
    shard_size: int = 4096
    """Records that are written together; a kill costs the shard in work."""
    batch: int = 128
    """Pictures or captions encoded at once."""
    dtype: Literal["float32", "float16"] = "float32"
    """Of the vectors on disk."""
    cache: bool = False
    """Keep decoded pictures in the picture cache, as training does: for pictures that several models will encode."""
    engine: Literal["local", "ray"] = "local"
    """local: in this process. ray: by a pool of Ray actors (pip install 'hnclip[scale]')."""
    workers: int | None = None
    """Actors of the ray engine; when left out one per GPU of the cluster, or one per four processors."""
    threads: int = 0
    """Threads of each process or actor; 0 leaves it to torch, and with ray divides the processors among the actors."""
    device: str = "auto"
    """auto takes an accelerator if there is one; or cpu, cuda, mps …"""
    output: Annotated[Output, tyro.conf.arg(name="")] = Output()

    def __post_init__(self) -> None:
        part, parts = self.part
        if part >= parts:
            raise ValueError(f"--partition is K/N with K from 0 to N - 1, as 0/3, 1/3, 2/3; got {self.partition!r}")
        for name in ("shard_size", "batch", "workers"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        if self.threads < 0:
            raise ValueError(f"--threads must not be negative, got {self.threads}")
        if self.workers is not None and self.engine != "ray":
            raise ValueError("--workers is for --engine ray; without it start a process for each --partition")

    @property
    def part(self) -> tuple[int, int]:
        """K and N of the partition; (0, 0) if it is not written that way."""
        part, slash, parts = self.partition.partition("/")
        return (int(part), int(parts)) if slash and part.isdecimal() and parts.isdecimal() else (0, 0)


@dataclass(frozen=True)
class PrepareRegions:
    """Find parts of the pictures and the sentences that describe them, for objectives that compare both. The same
    command goes on after a kill, and makes again what has changed."""

    data: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DATA")]
    """As for `hnclip train` (docs/data.md)."""
    opening: Annotated[Opening, tyro.conf.arg(name="")]
    read: ReadConfig
    proposer: str = "auto"
    """Who proposes regions: sam, felzenszwalb, grid, felzenszwalb+grid, or truth for those that the data bring along.
    auto: truth for scenes, nothing where the data bring regions along, else sam if --weights are given, else
    felzenszwalb+grid, but not in place of what another proposer found."""
    weights: Path | None = None
    """Directory of SAM's weights, as transformers saves them."""
    model: str = "bundled"
    """Whose similarity matches sentences to regions, as for `hnclip eval` (docs/models.md); of a run its best epoch."""
    sentences: Literal["careful", "dots"] = "careful"
    """How captions are cut into sentences: careful knows decimals and abbreviations, dots is GOAL's split('.')."""
    split: str | None = None
    """Of which split; those for training when left out, all where there are none."""
    out: Path | None = None
    """The manifest to write, or to go on with; that of --read.prepared, or else in the cache directory, by the name of
    the data, when left out."""
    batch: int = 128
    """Crops or sentences encoded at once."""
    workers: int | None = None
    """Pictures that are worked on at once before they are encoded; as many as processors when left out."""
    device: str = "auto"
    """auto takes an accelerator if there is one; or cpu, cuda, mps …"""
    output: Annotated[Output, tyro.conf.arg(name="")] = Output()

    def __post_init__(self) -> None:
        _at_least_one(self, "batch", "workers")


@dataclass(frozen=True)
class PrepareEdges:
    """Make the edge maps of whole pictures, in the size that a model sees, so that training finds them in the cache.
    Their crops are made in training."""

    data: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DATA")]
    """As for `hnclip train` (docs/data.md)."""
    opening: Annotated[Opening, tyro.conf.arg(name="")]
    read: ReadConfig
    method: str = "auto"
    """canny, canny:LOW,HIGH with thresholds of its own, log (Laplacian of Gaussian), log:SIGMA or log:SIGMA,CONTRAST,
    or hed, which needs --weights. auto: canny, or hed if --weights are given; nothing where the data bring maps along,
    and canny not in place of another method's."""
    weights: Path | None = None
    """Weights of HED."""
    model: str = "bundled"
    """The model that will be trained, as for `hnclip eval`: it says how large the maps must be."""
    split: str | None = None
    """Of which split; those for training when left out, all where there are none."""
    out: Path | None = None
    """The manifest to write, or to go on with; that of --read.prepared, or else in the cache directory, by the name of
    the data, when left out."""
    workers: int | None = None
    """Threads; as many as processors when left out."""
    device: str = "auto"
    """Of HED: auto takes an accelerator if there is one; or cpu, cuda, mps …"""
    output: Annotated[Output, tyro.conf.arg(name="")] = Output()

    def __post_init__(self) -> None:
        _at_least_one(self, "workers")


@dataclass(frozen=True)
class PrepareText:
    """Take words of appearance (colours, materials, textures) out of the captions."""

    data: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DATA")]
    """As for `hnclip train` (docs/data.md)."""
    read: ReadConfig
    filter: str = "auto"
    """lexicon, lexicon:colours and the like for some of its lists, blunt for plain removal of words, or
    package.module:function for one of your own, which takes a caption and returns one. auto: lexicon, but not in place
    of another filter's."""
    split: str | None = None
    """Of which split; those for training when left out, all where there are none."""
    out: Path | None = None
    """The manifest to write, or to go on with; that of --read.prepared, or else in the cache directory, by the name of
    the data, when left out."""
    workers: int = 1
    """Captions that are filtered at once, for a filter of your own that waits for a service."""
    output: Annotated[Output, tyro.conf.arg(name="")] = Output()

    def __post_init__(self) -> None:
        _at_least_one(self, "workers")


def _at_least_one(options: Any, *names: str) -> None:
    for name in names:
        if (value := getattr(options, name)) is not None and value < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}")


@dataclass(frozen=True)
class Study:
    """Tables and figures of the paper, and the controls that it lacks, on any data and model: runs what is missing,
    reuses what is there, writes both (docs/studies.md). The same command goes on after a kill, and several processes
    may give it at once."""

    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")]
    """A study, several separated by commas, or all; list prints them. adaptivity asks of frozen towers what is left for
    adaptivity itself. miniature is all of them on generated scenes, with the paper's claims beside."""
    read: ReadConfig
    model: str | None = None
    """As for `hnclip train` (docs/models.md); the recipe's when left out."""
    data: tuple[str, ...] = ()
    """Domains to train on, each also tested on by its test split (docs/data.md); the recipe's when left out."""
    tests: tuple[str, ...] = ()
    """Further data to test on: long-dci belongs to dci and urban-1k to vg-paragraphs, where these are trained on, any
    other to every domain. With a recipe paper/… those of the paper are there already."""
    recipe: Recipe | None = None
    """What all rows share, as for `hnclip train`. When left out demo for the bundled model, paper for any other. With
    paper, or paper/…, the methods have the learning rates that the paper gave them."""
    set: tuple[str, ...] = ()
    """Fields of the recipe by their dotted names, `optim.epochs=2 objective.gamma=0.25`; what a row itself says wins,
    and so does a learning rate of its own."""
    seeds: tuple[int, ...] = ()
    """Of all rows alike; when left out as many of 42, 1337, 3407 as the study asks for."""
    out: Path = Path("runs/studies")
    """Runs go to OUT/runs, where other studies find them, tables and figures to OUT/NAME."""
    docs: Path | None = None
    """Of the miniature: the directory for miniature.md and its figures; OUT/miniature when left out."""
    dry_run: bool = False
    """Print what would run and how long it should take. The data of benchmarks need not be here."""
    measure: bool = True
    """In a dry run, time a step of what has no finished run to judge by."""
    shard: str | None = None
    """K/N: do the K-th of N parts of the plan, as 1/4, 2/4, 3/4, 4/4 on four machines that share OUT. Whoever finds all
    runs done writes the tables."""
    commands: bool = False
    """Print a command for every run that is missing, for any scheduler. When they are done, the study itself has only
    tables to write."""
    run: str | None = None
    """Do this one run, by its identity, and nothing else: what --commands prints."""
    any_version: bool = False
    """Also take runs that other versions of this package or its libraries made."""
    device: str = "auto"
    """auto takes an accelerator if there is one; or cpu, cuda, mps …"""
    threads: int = 0
    """Processor threads of a run; 0 leaves torch's choice. Results are bit-identical only for the same number."""
    output: Annotated[Output, tyro.conf.arg(name="")] = Output()

    def __post_init__(self) -> None:
        if self.threads < 0:
            raise ValueError(f"--threads must not be negative, got {self.threads}")
        if len({*self.seeds}) < len(self.seeds):
            raise ValueError(f"--seeds names a seed twice: {' '.join(map(str, self.seeds))}")
        given = [flag for flag in ("dry_run", "commands", "shard", "run") if getattr(self, flag)]
        if len(given) > 1:
            first, second = (f"--{flag.replace('_', '-')}" for flag in given[:2])
            raise ValueError(f"{first} and {second} do not go together: give one of them")


@dataclass(frozen=True)
class Demo:
    """Fine-tune the bundled model on generated scenes with InfoNCE and with HN-CLIP, compare them on the test split,
    and write a report. A few minutes on two cores; a stopped demo continues where it was."""

    out: Path = Path("runs/demo")
    """Where both runs and the report are written."""
    seed: int = 42
    output: Annotated[Output, tyro.conf.arg(name="")] = Output()
