"""The training loop: one readable path from a configuration to a fine-tuned model."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch

from hnclip.command import train_command
from hnclip.config import TrainConfig, from_json, to_json
from hnclip.data.batches import Batch, PairData
from hnclip.data.sound import write_problems
from hnclip.files import recover_directory, replace_file
from hnclip.models.adapters import BaseModel, add_adapters, save_adapter
from hnclip.models.card import Training
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.load import load, save
from hnclip.models.speed import choose_precision, compile_blocks, recompute_activations
from hnclip.models.trainable import (
    describe_trainable,
    freeze,
    train_mode,
    trained_tensors,
)
from hnclip.objectives.build import build_objective
from hnclip.objectives.objective import Objective
from hnclip.train.checkpoint import (
    DIRECTORY,
    NAME,
    TrainState,
    load_state,
    only_writer,
    random_states,
    recover_state,
    restore_random_state,
    restore_state,
    save_state,
)
from hnclip.train.device import pick_device
from hnclip.train.distributed import (
    agreement,
    fail_together,
    is_distributed,
    process_group,
    rank,
    seed_of_process,
    tell_everybody,
    world_size,
)
from hnclip.train.evaluation import evaluate_together
from hnclip.train.grad_cache import Share
from hnclip.train.log import MetricsLog, progress_bar
from hnclip.train.lost import ends_together
from hnclip.train.optimizer import build_optimizer
from hnclip.train.parallel import Alone, hold
from hnclip.train.prefetch import ahead
from hnclip.train.run_data import RunData, batch_sizes, length_order, open_run_data, own_share, with_similarities
from hnclip.train.step import Found, Stepper

CONFIG, RESULT, LEFT_OUT = "config.json", "result.json", "left_out.jsonl"


class TrainingDiverged(RuntimeError):
    """The loss or its gradient stopped being a number."""


@dataclass(frozen=True)
class TrainResult:
    """A finished run. `best` is the epoch with the highest validation R@1 (mean of both directions), `last` the final
    one; each is {"epoch": …, "mean_R@1": …} and a model directory of that name in `out`."""

    out: Path
    steps: int
    seconds: float
    best: dict[str, float]
    last: dict[str, float]


def train(config: TrainConfig, *, quiet: bool = False, report: Callable[[str], None] = print) -> TrainResult:
    """Start a run in `config.out`, which must not hold one already. Under `torchrun`, all processes together."""

    def begin() -> TrainConfig:
        if (config.out / CONFIG).exists():
            raise ValueError(
                f"{config.out} already holds a run; continue it with --resume {config.out}, or choose another --out"
            )
        return config

    return _in_a_group(config.out, config.device, begin, quiet, report)


def resume(
    out: Path,
    *,
    parallel: Literal["ddp", "fsdp"] | None = None,
    quiet: bool = False,
    report: Callable[[str], None] = print,
) -> TrainResult:
    """Continue the run in `out` from its last checkpoint, to the same weights as if it had never stopped.

    Args:
        parallel: how several processes hold the model from now on; as before when left out.
    """

    def begin() -> TrainConfig:
        config = _saved_config(out)
        return config if parallel is None else replace(config, speed=replace(config.speed, parallel=parallel))

    device = _saved_config(out).device if (out / CONFIG).exists() else "cpu"
    return _in_a_group(out, device, begin, quiet, report)


def _saved_config(out: Path) -> TrainConfig:
    path = out / CONFIG
    if not path.exists():
        raise ValueError(
            f"{out} holds no run to resume: {path} does not exist. A run that was stopped before its first step is "
            "started again by the same command; pictures that were read stay in the cache"
        )
    return from_json(TrainConfig, path.read_text(encoding="utf-8"))


def _in_a_group(
    out: Path, device: str, begin: Callable[[], TrainConfig], quiet: bool, report: Callable[[str], None]
) -> TrainResult:
    """Run as one process of the job that `torchrun` started, if it did. The first one holds the directory and is the
    only one that writes and speaks."""
    with process_group(device), ExitStack() as stack:
        progress = _Progress(out)
        stack.enter_context(ends_together(progress.where, report))
        with agreement():
            config = begin()
            if rank() == 0:
                stack.enter_context(only_writer(out))
        speaks = rank() == 0
        return _run(config, out, quiet or not speaks, report if speaks else _nobody, progress)


def _nobody(text: str) -> None:
    """The other processes found the same."""


@dataclass
class _Progress:
    """How far a run is, for a message about its end."""

    out: Path
    step: int = 0
    total: int = 0
    saved: int | None = None

    def where(self) -> str:
        if not self.total:
            return "the run had not begun; start it again"
        saved = "no checkpoint had been written" if self.saved is None else f"the checkpoint is of step {self.saved}"
        return (
            f"{self.step} of {self.total} steps were done, {saved}; continue, with any number of processes: "
            f"torchrun --nproc-per-node {world_size()} -m hnclip train --resume {self.out}"
        )


def _run(
    config: TrainConfig, out: Path, quiet: bool, report: Callable[[str], None], progress: _Progress
) -> TrainResult:
    if (out / RESULT).exists():
        report(f"{out} is finished already")
        return TrainResult(out=out, **json.loads((out / RESULT).read_text(encoding="utf-8")))
    with agreement():
        if rank() == 0:
            for name in ("best", "last"):
                recover_directory(out / name)
            recover_state(out)
        _check_processes(config)
        if config.threads:
            torch.set_num_threads(config.threads)
        torch.manual_seed(config.seed)
        device = pick_device(config.device)
    # Decided once, and saved: neither another process nor the machine that a run is resumed on decides otherwise.
    precision = tell_everybody(choose_precision(config.optim.precision, device))
    config = replace(config, optim=replace(config.optim, precision=precision))
    with agreement(patient=True):  # a model may have to be fetched
        base = _base(config)
        model = load(**asdict(base)).to(device)
        report(f"model: {model.source}")
        _choose_trainable(config, model)
        report(describe_trainable(model))
        _announce(config, model, report)
        if config.speed.recompute:
            recompute_activations(model)
        if config.speed.compile:
            compile_blocks(model)
        objective = build_objective(config.objective)
    data = _open_in_turn(config, model, objective, quiet, report)
    # Only now: a run that could not start because of its model or data leaves nothing that is in the way of the next.
    with agreement():
        if rank() == 0:
            with replace_file(out / CONFIG) as partial:
                partial.write_text(to_json(config), encoding="utf-8")
    return _Run(config, out, base, model, objective, data, quiet, report, progress).go()


def _check_processes(config: TrainConfig) -> None:
    optim, processes = config.optim, world_size()
    if optim.negatives == "micro" and optim.micro_batch < processes:
        raise ValueError(
            f"{processes} processes cannot share micro-batches of {optim.micro_batch} pairs: set --optim.micro-batch "
            f"to {processes} or a multiple of it, or --optim.negatives batch, or use fewer processes"
        )


def _announce(config: TrainConfig, model: DualEncoder, report: Callable[[str], None]) -> None:
    highest = config.optim.scale_max
    if model.backbone.logit_scale.requires_grad and model.scale.item() > highest * 1.01:
        report(
            f"warning: the inverse temperature {model.scale.item():.1f} will be clamped to {highest:g}; "
            "raise --optim.scale-max to keep it, or fix it with --optim.scale-lr 0"
        )
    if config.optim.precision != "fp32":
        report(f"the towers compute in {config.optim.precision}")
    if is_distributed():
        report(f"{world_size()} processes, {config.speed.parallel}; every batch is dealt to all of them")


def _open_in_turn(
    config: TrainConfig, model: DualEncoder, objective: Objective, quiet: bool, report: Callable[[str], None]
) -> RunData:
    """The data: by the first process, which fills the picture cache, then by the others, which find it filled."""
    for turn in (True, False):
        with agreement(patient=True):
            if (rank() == 0) == turn:
                data = open_run_data(config, model, objective, quiet=quiet, report=report)
    with agreement():
        first = tell_everybody(data.fingerprint())
        if data.fingerprint() != first:
            raise ValueError(f"process {rank()} sees other data than process 0: {data.fingerprint()}, there {first}")
    return with_similarities(data, config, model, quiet=quiet)


def _base(config: TrainConfig) -> BaseModel:
    """The model that the run starts from, and that its adapters will ask for."""
    base = BaseModel(**{spec.name: getattr(config, spec.name) for spec in fields(BaseModel)})
    return base if config.adapt.method == "full" else base.located()  # else refused now, not after the first epoch


def _choose_trainable(config: TrainConfig, model: DualEncoder) -> None:
    adapt, scale_trains = config.adapt, config.optim.scale_lr != 0
    if adapt.method == "full":
        freeze(model, image=adapt.freeze_image, text=adapt.freeze_text)
        model.backbone.logit_scale.requires_grad_(scale_trains)
    else:
        add_adapters(
            model,
            method=adapt.method,
            rank=adapt.rank,
            alpha=adapt.alpha,
            dropout=adapt.dropout,
            towers=adapt.towers,
            projections=adapt.projections,
            train_scale=scale_trains,
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("nothing is left to train: both towers are frozen and the temperature is fixed")


class _Run:
    """One run in progress: what the steps share."""

    def __init__(
        self,
        config: TrainConfig,
        out: Path,
        base: BaseModel,
        model: DualEncoder,
        objective: Objective,
        data: RunData,
        quiet: bool,
        report: Callable[[str], None],
        progress: _Progress,
    ) -> None:
        self.config, self.out, self.base, self.model, self.objective = config, out, base, model, objective
        self.data, self.quiet, self.report, self.progress = data, quiet, report, progress
        optim = config.optim
        self.epoch_steps = len(batch_sizes(len(data.pairs), config))
        self.total = progress.total = optim.epochs * self.epoch_steps
        self.parallel: Alone = hold(model, config.speed.parallel)
        self.optimizer = build_optimizer(
            model,
            lr=optim.lr,
            scale_lr=optim.lr if optim.scale_lr is None else optim.scale_lr,
            weight_decay=optim.weight_decay,
            betas=(optim.beta1, optim.beta2),
        )
        self.stepper = Stepper(model, objective, self.optimizer, optim, total=self.total, parallel=self.parallel)
        self.step = 0
        self.unread: tuple[Found, dict[str, Any]] | None = None  # what the last step found, and its log entry so far
        self.best: dict[str, float] = {}
        self.last: dict[str, float] = {}

    def go(self) -> TrainResult:
        started = time.perf_counter()
        with agreement():
            length = self._go_back()
            if self.data.problems and rank() == 0:
                write_problems(self.out / LEFT_OUT, self.data.problems)
                found = f"{len(self.data.problems)} problems in the data"
                self.report(f"warning: {found}; what is left out is listed in {self.out / LEFT_OUT}")
            self.log = MetricsLog(self.out, length or 0, tensorboard=self.config.tensorboard) if rank() == 0 else None
        try:
            if length is None:
                self._write(self._about_data())
                self._evaluate(epoch=0)
            for epoch in range(self.step // self.epoch_steps, self.config.optim.epochs):
                self._epoch(epoch)
        finally:
            if self.log is not None:
                self.log.close()
        result = {
            "steps": self.step,
            "seconds": round(time.perf_counter() - started, 1),
            "best": self.best,
            "last": self.last,
        }
        with agreement():
            if rank() == 0:
                with replace_file(self.out / RESULT) as partial:
                    partial.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        return TrainResult(out=self.out, **result)  # type: ignore[arg-type]

    def _go_back(self) -> int | None:
        """To the last checkpoint; the length of the log then, or None if the run begins."""
        state = load_state(self.out)
        if state is None:
            if is_distributed():
                torch.manual_seed(seed_of_process(self.config.seed, 0))
            return None
        self._check_data(state)
        restore_state(state, self.model, self.optimizer)
        self.step, self.best, self.last = state.step, state.best, state.last
        if len(state.random) == world_size():
            restore_random_state(state.random[rank()], self.model.device)
        else:
            torch.manual_seed(seed_of_process(self.config.seed, self.step))
        self.progress.step = self.progress.saved = self.step
        self.report(f"resuming at step {self.step} of {self.total}")
        return state.log_bytes

    def _write(self, entry: dict[str, Any]) -> None:
        if self.log is not None:
            self.log.write(entry)

    def _about_data(self) -> dict[str, Any]:
        return {
            "kind": "data",
            "step": 0,
            "pairs": len(self.data.pairs),
            "captions": len(self.data.pairs.owner),
            "truncated": dict(self.data.pairs.truncated),
            "validation_captions": len(self.data.validation.captions),
            "validation_truncated": self.data.validation.truncated,
            "problems": len(self.data.problems),
            "test_split": self.data.test_split,
        }

    def _epoch(self, epoch: int) -> None:
        pairs, dealt = self.data.deal(self.config, epoch)
        first = self.step - epoch * self.epoch_steps
        if dealt.left_out and not first:
            self.report(
                f"warning: {len(dealt.left_out)} of {len(pairs)} pairs sit out epoch {epoch + 1}: every batch has the "
                "same picture or caption already"
            )
        title = f"epoch {epoch + 1}/{self.config.optim.epochs}"
        done = sum(len(rows) for rows in dealt.batches[:first])
        train_mode(self.model)
        with progress_bar(title, len(pairs), done, quiet=self.quiet) as bar:
            started = time.perf_counter()
            optim = self.config.optim
            shares = [own_share(length_order(pairs, rows, optim), optim) for rows in dealt.batches[first:]]
            for batch, share in zip(ahead(self._make(pairs), [share.rows for share in shares]), shares):
                loss = self._step(epoch, batch, share=share, waited=time.perf_counter() - started)
                bar.advance(share.pairs, "" if loss is None else f"loss {loss:.3f}")
                if self.step % self.config.save_every == 0 and self.step < (epoch + 1) * self.epoch_steps:
                    self._save()
                started = time.perf_counter()
            self._read()
        self._evaluate(epoch + 1)
        self._save()

    def _make(self, pairs: PairData) -> Callable[[Sequence[int]], Batch]:
        """How a batch is made ready ahead of its step."""
        if self.model.device.type == "cuda":
            return lambda rows: pairs.batch(rows).pinned()
        return pairs.batch

    def _step(self, epoch: int, batch: Batch, *, share: Share, waited: float) -> float | None:
        """Do a step and read what the step before found; its loss, for people, if there was one."""
        started = time.perf_counter()
        found = self.stepper(batch, self.step, share)
        self.step += 1
        self.progress.step = self.step
        entry = {"kind": "step", "epoch": epoch + 1, "step": self.step, "lr": self.stepper.rate}
        loss = self._read()
        entry["pairs_per_second"] = round(share.pairs / (time.perf_counter() - started), 1)
        self.unread = found, {**entry, "waited": round(waited, 4)}
        return loss

    def _read(self) -> float | None:
        """Read, check and log what the last step found; its loss. Called before anything is saved, so bad numbers may
        reach the weights in memory, never those on disk."""
        if self.unread is None:
            return None
        (found, entry), self.unread = self.unread, None
        numbers = found.read()
        if not (math.isfinite(numbers["loss"]) and math.isfinite(numbers["grad_norm"])):
            values = ", ".join(f"{name} {numbers[name]:.4g}" for name in found.names[: found.terms])
            saved = next((path for name in (NAME, DIRECTORY) if (path := self.out / name).exists()), None)
            where = f"the last good state is {saved}" if saved else "no checkpoint had been written yet"
            error = TrainingDiverged(
                f"step {entry['step']}: the loss is not a number ({values}, gradient norm {numbers['grad_norm']:.4g}); "
                f"{where}. Try a lower --optim.lr or --optim.precision fp32."
            )
            fail_together(error if rank() == 0 else None)  # all processes have the same numbers
        self._write({**entry, **numbers})
        return numbers["loss"]

    def _evaluate(self, epoch: int) -> None:
        batch = self.config.evaluate_batch
        with self.parallel.encoding():
            metrics = evaluate_together(self.model, self.data.validation, batch=batch).metrics.to_dict()
        self.last = {"epoch": epoch, "mean_R@1": metrics["mean_R@1"]}
        better = epoch > 0 and self.last["mean_R@1"] > self.best.get("mean_R@1", -1.0)
        if better:
            self.best = self.last
        if epoch > 0:
            model = self.parallel.whole()
            with agreement():
                for name in ("best", "last") if better else ("last",):
                    if model is not None:
                        self._save_model(model, name, epoch, metrics)
        self._write({"kind": "evaluation", "epoch": epoch, "step": self.step, "split": "validation", **metrics})
        text, image = metrics["text_to_image"]["R@1"], metrics["image_to_text"]["R@1"]
        name = f"epoch {epoch}/{self.config.optim.epochs}" if epoch else "before training"
        self.report(
            f"{name}: validation R@1 text→image {text:.1f}, image→text {image:.1f}{'  (best)' if better else ''}"
        )

    def _save_model(self, model: DualEncoder, name: str, epoch: int, metrics: dict[str, Any]) -> None:
        """A model directory with a card, or of an adapted model the adapters alone."""
        config = self.config
        model.provenance = Training(
            base=config.model,
            data=f"{config.data}, {len(self.data.pairs)} training pairs",
            objective=asdict(config.objective),
            command=train_command(replace(config, out=TrainConfig().out)),  # where it lay is nobody's concern
            metrics={f"validation of {config.data}, epoch {epoch}": metrics},
        )
        if config.adapt.method == "full":
            save(model, self.out / name)
        else:
            save_adapter(model, self.out / name, self.base)

    def _save(self) -> None:
        self._read()
        state = TrainState(
            step=self.step,
            model=trained_tensors(self.model),
            optimizer=self.optimizer.state_dict(),
            random=random_states(self.model.device),
            log_bytes=0 if self.log is None else self.log.length,  # the first process writes both
            best=self.best,
            last=self.last,
            data=self.data.fingerprint(),
        )
        save_state(self.out, state)
        self.progress.saved = self.step

    def _check_data(self, state: TrainState) -> None:
        if state.data != self.data.fingerprint():
            raise ValueError(
                f"the data of {self.out} are not what they were: the run has seen {state.data}, there are "
                f"{self.data.fingerprint()} now; restore the data (hnclip data check {self.config.data} may tell what "
                "is missing), or begin another run"
            )
