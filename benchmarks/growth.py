"""Growth: time and memory against the batch, the caption's length, the gallery and the number of processes.

Against the pairs of a batch: L_HN eager and tiled, and the token loss, forward and backward. Against the tokens of a
caption: the text tower of CLIP-B (12 layers, 512 wide, random weights), forward and backward. Against the captions of
a gallery: `retrieval_ranks` of a fixed number of pictures, and of as many as there are captions. Against the number of
processes: a data-parallel step of two toy towers (gather, tiled loss, mean gradient) with one thread in each process
and the same batch in all, so that twice the processes should take half as long.

All sizes of a group take turns, so a busy machine bends no curve. Memory is what the work adds to its inputs, at every
size in a process of its own. An exponent p of size^p is fitted through the larger half of the sizes; beside it stands
the same fit through the count of operations or numbers that the algorithm needs.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessException

from hnclip.measure import Report, Timing, exponent, machine, peak_memory, rise, time_ways

log = logging.getLogger("hnclip.bench")

Group = Literal["batch", "length", "gallery", "processes"]
Law = Callable[[float], float]
TEXT_WIDTH, WORDS = 512, 1000  # of CLIP-B's text tower, and how many words it knows here
AXES: dict[Group, str] = {
    "batch": "pairs in the batch",
    "length": "tokens of a caption",
    "gallery": "captions in the gallery",
    "processes": "processes",
}
COLUMNS = {
    "curve": "curve",
    "against": "against",
    "sizes": "sizes",
    "largest_seconds": "s at the largest",
    "time_exponent": "time ∝ size^",
    "time_expected": "expected",
    "largest_megabytes": "MB at the largest",
    "memory_exponent": "memory ∝ size^",
    "memory_expected": "expected",
}


@dataclass(frozen=True)
class Options:
    """Sizes of all curves; the exponents come from the larger half of each."""

    only: tuple[Group, ...] = get_args(Group)
    """The groups to measure."""
    batches: tuple[int, ...] = (512, 1024, 2048, 4096, 8192)
    """Pairs for the eager L_HN, which holds several matrices of B × B: 2 GB at 8,192, 32 GB at 32,768."""
    tiled_batches: tuple[int, ...] = (1024, 2048, 4096, 8192, 16_384)
    """Pairs for the tiled one."""
    width: int = 512
    """Width of the vectors and tokens in all losses."""
    token_batches: tuple[int, ...] = (16, 32, 64, 128)
    """Pairs for the token loss."""
    tokens: tuple[int, int] = (196, 77)
    """Patches of a picture and words of a caption there."""
    lengths: tuple[int, ...] = (32, 64, 128, 192, 248)
    """Tokens of the captions."""
    captions: int = 4
    """Captions that the text tower reads at once."""
    galleries: tuple[int, ...] = (10_000, 30_000, 100_000, 300_000, 1_000_000)
    """Captions that a fixed number of pictures is ranked against."""
    pictures: int = 1_000
    """That number."""
    squares: tuple[int, ...] = (2_500, 5_000, 10_000, 20_000)
    """Captions that as many pictures are ranked against."""
    rank_width: int = 256
    """Width of the ranked vectors."""
    processes: tuple[int, ...] = (1, 2)
    """Numbers of processes; more than there are cores slow each other down."""
    pairs: int = 2048
    """Pairs of all processes together."""
    turns: int = 3
    device: str = "cpu"
    """Of everything but the processes, which are on the cpu."""
    figures: Path | None = None
    """Draw one figure per group into this directory."""


@dataclass(frozen=True)
class Curve:
    """One line of a figure: what was measured at each size.

    Args:
        time_law, memory_law: what should grow as it does, from the algorithm; None where nothing simple holds.
    """

    name: str
    group: Group
    sizes: Sequence[int]
    timings: Sequence[Timing]
    memory: Sequence[int]
    time_law: Law
    memory_law: Law | None

    @property
    def time_exponent(self) -> float:
        return exponent(self.sizes, [timing.median for timing in self.timings])

    @property
    def memory_exponent(self) -> float:
        return exponent(self.sizes, self.memory)

    def to_row(self) -> dict[str, Any]:
        largest = max(range(len(self.sizes)), key=self.sizes.__getitem__)
        memory_law = self.memory_law
        return {
            "curve": self.name,
            "against": AXES[self.group],
            "sizes": f"{min(self.sizes):,}–{max(self.sizes):,}",
            "largest_seconds": self.timings[largest],
            "time_exponent": self.time_exponent,
            "time_expected": exponent(self.sizes, [self.time_law(size) for size in self.sizes]),
            "largest_megabytes": self.memory[largest] / 1e6,
            "memory_exponent": self.memory_exponent,
            "memory_expected": memory_law and exponent(self.sizes, [memory_law(size) for size in self.sizes]),
            "points": [
                {"size": size, "time": timing, "bytes": memory}
                for size, timing, memory in zip(self.sizes, self.timings, self.memory)
            ],
        }


@dataclass(frozen=True)
class Job:
    """A curve that is still to be measured: `work(size=…, **arguments)` prepares one point and returns its work."""

    name: str
    group: Group
    work: Callable[..., Callable[[], object]]
    sizes: Sequence[int]
    time_law: Law
    memory_law: Law
    arguments: Mapping[str, Any] = field(default_factory=dict)


def jobs(options: Options) -> list[Job]:
    from loss_cost import rank_cost

    def linear(size: float) -> float:
        return size

    def square(size: float) -> float:
        return size**2

    def eager(pairs: float) -> float:
        return rank_cost(int(pairs), options.width, device_type=torch.device(options.device).type).eager

    def tiled(pairs: float) -> float:
        return rank_cost(int(pairs), options.width, device_type=torch.device(options.device).type).tiled

    def tokens(pairs: float) -> float:
        """Per token 4·D bytes for its gradient and as many for a copy without padding, and 8·B for the positions of its
        best matches."""
        return pairs * (options.width + pairs)

    def transformer(tokens: float) -> float:
        """Operations of a layer: 24·T·D² in its matrices, 4·T²·D in its attention."""
        return tokens * (6 * TEXT_WIDTH + tokens)

    loss = {"width": options.width}
    token = {**loss, "patches": options.tokens[0], "words": options.tokens[1]}
    text = {"captions": options.captions}
    ranks = {"width": options.rank_width}
    some = {**ranks, "pictures": options.pictures}
    return [
        Job("L_HN, eager", "batch", global_loss, options.batches, square, eager, {**loss, "way": "eager"}),
        Job("L_HN, tiled", "batch", global_loss, options.tiled_batches, square, tiled, {**loss, "way": "tiled"}),
        Job("token loss", "batch", local_loss, options.token_batches, square, tokens, token),
        Job("text tower", "length", text_tower, options.lengths, transformer, linear, text),
        Job(f"{options.pictures:,} pictures", "gallery", ranking, options.galleries, linear, linear, some),
        Job("as many pictures", "gallery", ranking, options.squares, square, linear, ranks),
    ]


def run(options: Options) -> Report:
    curves: list[Curve] = []
    for group in dict.fromkeys(options.only):
        log.info(f"against {AXES[group]}")
        if group == "processes":
            curves.append(process_curve(options))
        else:
            curves += measure([job for job in jobs(options) if job.group == group], options)
    notes = [
        f"{size} process{'' if size == 1 else 'es'}: {options.pairs / timing.median:,.0f} pairs per second"
        for curve in curves
        if curve.group == "processes"
        for size, timing in zip(curve.sizes, curve.timings)
    ]
    drawn = [] if options.figures is None else draw(curves, options.figures)
    return Report("growth", COLUMNS, [curve.to_row() for curve in curves], machine(options.device), notes, drawn)


def measure(group: Sequence[Job], options: Options) -> list[Curve]:
    points = [
        (job, size, {**job.arguments, "size": size, "device": options.device}) for job in group for size in job.sizes
    ]
    ways = {f"{job.name}, {size}": job.work(**arguments) for job, size, arguments in points}
    # Without a turn for warming up: every work has run at a small size, and the largest take long.
    timings = time_ways(ways, turns=options.turns, warmup=0, device=options.device)
    del ways  # the inputs make room for the processes that measure memory
    log.info("memory")
    memory = {
        f"{job.name}, {size}": peak_memory(__file__, job.work.__name__, **arguments) for job, size, arguments in points
    }

    def of(job: Job, found: Mapping[str, Any]) -> list[Any]:
        return [found[f"{job.name}, {size}"] for size in job.sizes]

    return [
        Curve(job.name, job.group, job.sizes, of(job, timings), of(job, memory), job.time_law, job.memory_law)
        for job in group
    ]


def unit_vectors(*shape: int, device: str, seed: int) -> Tensor:
    """Random vectors of length 1 [..., D]; in place, since memory freed here would hide some of the work's."""
    generator = torch.Generator(device).manual_seed(seed)
    vectors = torch.randn(*shape, device=device, generator=generator)
    vectors /= torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    return vectors


def global_loss(size: int, width: int, way: str, device: str) -> Callable[[], object]:
    from hnclip.losses import hard_negative_loss
    from hnclip.losses.tiled import tiled_hard_negative_loss

    loss = {"eager": hard_negative_loss, "tiled": tiled_hard_negative_loss}[way]

    def work(pairs: int = size) -> object:
        inputs = [image[:pairs], text[:pairs], scale]  # [B, D], [B, D], []
        return torch.autograd.grad(loss(*inputs), inputs)

    image, text = (unit_vectors(size, width, device=device, seed=seed).requires_grad_() for seed in (0, 1))
    scale = torch.tensor(50.0, device=device, requires_grad=True)
    work(min(size, 64))  # what the first call of any size allocates is not the loss's
    return work


def local_loss(size: int, patches: int, words: int, width: int, device: str) -> Callable[[], object]:
    from hnclip.losses import token_loss

    def work(pairs: int = size) -> object:
        tokens = [image[:pairs], text[:pairs]]  # [B, P, D], [B, Q, D]
        masks = [torch.ones(part.shape[:2], dtype=torch.bool, device=device) for part in tokens]
        return torch.autograd.grad(token_loss(*tokens, *masks, scale), [*tokens, scale])

    image = unit_vectors(size, patches, width, device=device, seed=0).requires_grad_()
    text = unit_vectors(size, words, width, device=device, seed=1).requires_grad_()
    scale = torch.tensor(50.0, device=device, requires_grad=True)
    work(min(size, 4))
    return work


@cache
def clip_text(positions: int, device: str) -> Any:
    """The text tower of CLIP-B, as transformers draws its weights.

    It knows few words: the gradient of CLIP's whole table is the same 100 MB at every length and would bend the curve.
    """
    from transformers import CLIPTextConfig, CLIPTextModel

    config = CLIPTextConfig(
        hidden_size=TEXT_WIDTH,
        intermediate_size=4 * TEXT_WIDTH,
        num_hidden_layers=12,
        num_attention_heads=TEXT_WIDTH // 64,
        max_position_embeddings=positions,
        vocab_size=WORDS,
        bos_token_id=WORDS - 2,
        eos_token_id=WORDS - 1,
    )
    return CLIPTextModel(config).to(device)


def text_tower(size: int, captions: int, device: str) -> Callable[[], object]:
    model = clip_text(max(size, 248), device)
    ids = torch.randint(WORDS - 2, (captions, size), device=device)  # [B, T]
    ids[:, -1] = WORDS - 1

    def work(tokens: int = size) -> object:
        return model(ids[:, -tokens:]).pooler_output.sum().backward()

    work(min(size, 8))  # and the gradients have their place
    return work


def ranking(size: int, width: int, device: str, pictures: int | None = None) -> Callable[[], object]:
    """Captions of equal number for each picture, in the order of the pictures."""
    from hnclip.evaluate import retrieval_ranks

    count = size if pictures is None else pictures
    image = unit_vectors(count, width, device=device, seed=0)  # [I, D]
    text = unit_vectors(size, width, device=device, seed=1)  # [N, D]
    owner = torch.arange(size) * count // size  # [N]
    first = min(count, 64)
    retrieval_ranks(image[:first], text[:first], torch.arange(first))
    return lambda: retrieval_ranks(image, text, owner)


def process_curve(options: Options) -> Curve:
    with tempfile.TemporaryDirectory() as directory:
        found = [step_of_processes(world, options, Path(directory) / f"{world}.json") for world in options.processes]
    timings, memory = zip(*found)
    return Curve("data-parallel step", "processes", options.processes, timings, memory, lambda world: 1 / world, None)


def step_of_processes(world: int, options: Options, result: Path) -> tuple[Timing, int]:
    """The turns of one step, and the memory that a process needs for it."""
    if options.pairs % world:
        raise ValueError(f"{options.pairs} pairs cannot be shared by {world} processes alike: choose another --pairs")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = (world, port, options.pairs // world, options.width, options.turns, result)
    try:
        mp.spawn(one_process, arguments, nprocs=world)
    except ProcessException as error:  # and all other processes were ended
        raise RuntimeError(f"one of {world} processes failed:{error}") from error
    found = json.loads(result.read_text())
    return Timing(tuple(found["seconds"])), found["bytes"]


def one_process(rank: int, world: int, port: int, pairs: int, width: int, turns: int, result: Path) -> None:
    """Its share of the pairs goes through the towers; the loss sees the pairs of all processes as columns."""
    from hnclip.train.gradients import GradientMean

    from hnclip.core import Embeddings, ViewEmbeddings
    from hnclip.losses.tiled import tiled_hard_negative_loss
    from hnclip.train.distributed import gather_embeddings, process_group

    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in place.items()}  # as torchrun says it
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the same weights in every process
    towers = nn.ModuleList(
        nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(2)
    )
    inputs = torch.randn(2, pairs, width, generator=torch.Generator().manual_seed(rank))  # [2, B/W, D]
    with process_group("cpu"):
        mean = GradientMean(towers.parameters())

        def step(count: int = pairs) -> None:
            towers.zero_grad()
            image, text = (
                ViewEmbeddings(nn.functional.normalize(tower(part[:count]), dim=1))
                for tower, part in zip(towers, inputs)
            )
            every = gather_embeddings(Embeddings({"full": image}, {"caption": text}, torch.tensor(50.0)))
            vectors = every.images["full"].vectors, every.texts["caption"].vectors  # [B, D] each
            loss = tiled_hard_negative_loss(*vectors, every.scale, offset=every.offset, rows=every.rows)
            with mean.exchange(last=True):
                loss.backward()
            mean.finish()

        step(min(pairs, 8))
        memory = rise(step)
        timing = time_ways({"step": step}, turns=turns)["step"]
    if rank == 0:
        result.write_text(json.dumps({"seconds": timing.seconds, "bytes": memory}))


def draw(curves: Sequence[Curve], directory: Path) -> list[str]:
    """A figure per group, time on the left and memory on the right; the files."""
    directory.mkdir(parents=True, exist_ok=True)
    files = []
    for group in dict.fromkeys(curve.group for curve in curves):
        path = directory / f"growth-{group}.png"
        growth_figure([curve for curve in curves if curve.group == group]).savefig(path, dpi=100)
        files.append(str(path))
    return files


def growth_figure(curves: Sequence[Curve]) -> Any:
    """Both axes logarithmic: a power of the size is a straight line, and the legend tells its exponent."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullFormatter

    from hnclip.analysis.figures import COLOURS, DASHES, MARKERS, WIDTH

    figure = Figure(figsize=(WIDTH, 4.2), layout="constrained")
    time, memory = figure.subplots(1, 2)
    for curve, colour, dash, marker in zip(curves, cycle(COLOURS), cycle(DASHES), cycle(MARKERS)):
        look = {"color": colour, "linestyle": dash, "linewidth": 2, "marker": marker}
        panels = (
            (time, [timing.median for timing in curve.timings], curve.time_exponent),
            (memory, [size / 1e6 for size in curve.memory], curve.memory_exponent),
        )
        for axes, values, power in panels:
            axes.plot(curve.sizes, values, label=f"{curve.name}: size$^{{{power:.2f}}}$", **look)
    ticks = sorted({size for curve in curves for size in curve.sizes})
    plain = FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 10 else f"{value:g}")
    for axes, label in ((time, "seconds"), (memory, "megabytes beside the inputs")):
        axes.set(xscale="log", yscale="log", xlabel=AXES[curves[0].group], ylabel=label)
        low, high = axes.get_ylim()
        axes.xaxis.set(major_formatter=plain, minor_formatter=NullFormatter())
        # Between two powers of ten there is no major tick: then the minor ones are named.
        axes.yaxis.set(major_formatter=plain, minor_formatter=plain if high < 10 * low else NullFormatter())
        if len(ticks) <= 6:
            axes.set_xticks(ticks, [f"{size:,}" for size in ticks])
        axes.grid(color="#DDDDDD", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), frameon=False, handlelength=3)
    return figure
