"""The training loop: one readable path from a configuration to a fine-tuned model."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from hnclip.command import train_command
from hnclip.config import TrainConfig, from_json, to_json
from hnclip.data.batches import Batch
from hnclip.data.sound import write_problems
from hnclip.evaluate.retrieval import evaluate
from hnclip.files import recover_directory, replace_file
from hnclip.models.adapters import BaseModel, add_adapters, save_adapter
from hnclip.models.card import Training
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.load import load, save
from hnclip.models.trainable import (
    describe_trainable,
    freeze,
    restore_trained_tensors,
    train_mode,
    trained_tensors,
)
from hnclip.objectives.build import build_objective
from hnclip.objectives.objective import Objective
from hnclip.train.checkpoint import (
    NAME,
    TrainState,
    load_state,
    only_writer,
    random_state,
    restore_random_state,
    save_state,
)
from hnclip.train.log import MetricsLog, progress_bar
from hnclip.train.optimizer import build_optimizer
from hnclip.train.prefetch import ahead
from hnclip.train.run_data import RunData, batch_sizes, open_run_data
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
    """Start a run in `config.out`, which must not hold one already."""
    if (config.out / CONFIG).exists():
        raise ValueError(
            f"{config.out} already holds a run; continue it with --resume {config.out}, or choose another --out"
        )
    with only_writer(config.out):
        return _run(config, config.out, quiet, report)


def resume(out: Path, *, quiet: bool = False, report: Callable[[str], None] = print) -> TrainResult:
    """Continue the run in `out` from its last checkpoint, to the same weights as if it had never stopped."""
    path = out / CONFIG
    if not path.exists():
        raise ValueError(
            f"{out} holds no run to resume: {path} does not exist. A run that was stopped before its first step is "
            "started again by the same command; pictures that were read stay in the cache"
        )
    config = from_json(TrainConfig, path.read_text(encoding="utf-8"))
    with only_writer(out):
        return _run(config, out, quiet, report)


def pick_device(name: str) -> torch.device:
    """`auto` is the machine's accelerator if it has one."""
    if name == "auto":
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return found or torch.device("cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {name!r} cannot be used here: {error}") from error


def _run(config: TrainConfig, out: Path, quiet: bool, report: Callable[[str], None]) -> TrainResult:
    if (out / RESULT).exists():
        report(f"{out} is finished already")
        return TrainResult(out=out, **json.loads((out / RESULT).read_text(encoding="utf-8")))
    for name in ("best", "last"):
        recover_directory(out / name)
    if config.threads:
        torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    device = pick_device(config.device)
    base = _base(config)
    model = load(**asdict(base)).to(device)
    report(f"model: {model.source}")
    _choose_trainable(config, model)
    report(describe_trainable(model))
    highest = config.optim.scale_max
    if model.backbone.logit_scale.requires_grad and model.scale.item() > highest * 1.01:
        report(
            f"warning: the inverse temperature {model.scale.item():.1f} will be clamped to {highest:g}; "
            "raise --optim.scale-max to keep it, or fix it with --optim.scale-lr 0"
        )
    objective = build_objective(config.objective)
    data = open_run_data(config, model, objective, quiet=quiet, report=report)
    # Only now: a run that could not start because of its model or data leaves nothing that is in the way of the next.
    with replace_file(out / CONFIG) as partial:
        partial.write_text(to_json(config), encoding="utf-8")
    return _Run(config, out, base, model, objective, data, quiet, report).go()


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
    ) -> None:
        self.config, self.out, self.base, self.model, self.objective = config, out, base, model, objective
        self.data, self.quiet, self.report = data, quiet, report
        optim = config.optim
        self.epoch_steps = len(batch_sizes(len(data.pairs), config))
        self.total = optim.epochs * self.epoch_steps
        self.optimizer = build_optimizer(
            model,
            lr=optim.lr,
            scale_lr=optim.lr if optim.scale_lr is None else optim.scale_lr,
            weight_decay=optim.weight_decay,
            betas=(optim.beta1, optim.beta2),
        )
        self.stepper = Stepper(model, objective, self.optimizer, optim, total=self.total)
        self.step = 0
        self.unread: tuple[Found, dict[str, Any]] | None = None  # what the last step found, and its log entry so far
        self.best: dict[str, float] = {}
        self.last: dict[str, float] = {}

    def go(self) -> TrainResult:
        started = time.perf_counter()
        state = load_state(self.out)
        if state is not None:
            self._check_data(state)
            self._restore(state)
            self.report(f"resuming at step {self.step} of {self.total}")
        if self.data.problems:
            write_problems(self.out / LEFT_OUT, self.data.problems)
            found = f"{len(self.data.problems)} problems in the data"
            self.report(f"warning: {found}; what is left out is listed in {self.out / LEFT_OUT}")
        self.log = MetricsLog(self.out, state.log_bytes if state else 0, tensorboard=self.config.tensorboard)
        try:
            if state is None:
                self.log.write(self._about_data())
                self._evaluate(epoch=0)
            for epoch in range(self.step // self.epoch_steps, self.config.optim.epochs):
                self._epoch(epoch)
        finally:
            self.log.close()
        result = {
            "steps": self.step,
            "seconds": round(time.perf_counter() - started, 1),
            "best": self.best,
            "last": self.last,
        }
        with replace_file(self.out / RESULT) as partial:
            partial.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        return TrainResult(out=self.out, **result)  # type: ignore[arg-type]

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
            for batch in ahead(pairs.batch, dealt.batches[first:]):
                loss = self._step(epoch, batch, waited=time.perf_counter() - started)
                bar.advance(len(batch), f"loss {loss:.3f}")
                if self.step % self.config.save_every == 0 and self.step < (epoch + 1) * self.epoch_steps:
                    self._save()
                started = time.perf_counter()
            self._read()
        self._evaluate(epoch + 1)
        self._save()

    def _step(self, epoch: int, batch: Batch, *, waited: float) -> float:
        """Do a step and read what the step before found; its loss, for people."""
        started = time.perf_counter()
        found = self.stepper(batch, self.step)
        self.step += 1
        entry = {"kind": "step", "epoch": epoch + 1, "step": self.step, "lr": self.stepper.rate}
        loss = self._read()
        entry["pairs_per_second"] = round(len(batch) / (time.perf_counter() - started), 1)
        self.unread = found, {**entry, "waited": round(waited, 4)}
        return loss

    def _read(self) -> float:
        """Read, check and log what the last step found; its loss. Called before anything is saved, so bad numbers may
        reach the weights in memory, never those on disk."""
        if self.unread is None:
            return float("nan")
        (found, entry), self.unread = self.unread, None
        numbers = found.read()
        if not (math.isfinite(numbers["loss"]) and math.isfinite(numbers["grad_norm"])):
            values = ", ".join(f"{name} {numbers[name]:.4g}" for name in found.names[: found.terms])
            saved = self.out / NAME
            where = f"the last good state is {saved}" if saved.exists() else "no checkpoint had been written yet"
            raise TrainingDiverged(
                f"step {entry['step']}: the loss is not a number ({values}, gradient norm {numbers['grad_norm']:.4g}); "
                f"{where}. Try a lower --optim.lr or --optim.precision fp32."
            )
        self.log.write({**entry, **numbers})
        return numbers["loss"]

    def _evaluate(self, epoch: int) -> None:
        metrics = evaluate(self.model, self.data.validation, batch=self.config.evaluate_batch).metrics.to_dict()
        self.last = {"epoch": epoch, "mean_R@1": metrics["mean_R@1"]}
        better = epoch > 0 and self.last["mean_R@1"] > self.best.get("mean_R@1", -1.0)
        if better:
            self.best = self.last
        for name, wanted in (("best", better), ("last", epoch > 0)):
            if wanted:
                self._save_model(name, epoch, metrics)
        self.log.write({"kind": "evaluation", "epoch": epoch, "step": self.step, "split": "validation", **metrics})
        text, image = metrics["text_to_image"]["R@1"], metrics["image_to_text"]["R@1"]
        name = f"epoch {epoch}/{self.config.optim.epochs}" if epoch else "before training"
        self.report(
            f"{name}: validation R@1 text→image {text:.1f}, image→text {image:.1f}{'  (best)' if better else ''}"
        )

    def _save_model(self, name: str, epoch: int, metrics: dict[str, Any]) -> None:
        """A model directory with a card, or of an adapted model the adapters alone."""
        config = self.config
        self.model.provenance = Training(
            base=config.model,
            data=f"{config.data}, {len(self.data.pairs)} training pairs",
            objective=asdict(config.objective),
            command=train_command(replace(config, out=TrainConfig().out)),  # where it lay is nobody's concern
            metrics={f"validation of {config.data}, epoch {epoch}": metrics},
        )
        if config.adapt.method == "full":
            save(self.model, self.out / name)
        else:
            save_adapter(self.model, self.out / name, self.base)

    def _save(self) -> None:
        self._read()
        state = TrainState(
            step=self.step,
            model=trained_tensors(self.model),
            optimizer=self.optimizer.state_dict(),
            random=random_state(self.model.device),
            log_bytes=self.log.length,
            best=self.best,
            last=self.last,
            data=self.data.fingerprint(),
        )
        save_state(self.out, state)

    def _check_data(self, state: TrainState) -> None:
        if state.data != self.data.fingerprint():
            raise ValueError(
                f"the data of {self.out} are not what they were: the run has seen {state.data}, there are "
                f"{self.data.fingerprint()} now; restore the data (hnclip data check {self.config.data} may tell what "
                "is missing), or begin another run"
            )

    def _restore(self, state: TrainState) -> None:
        restore_trained_tensors(self.model, state.model)
        self.optimizer.load_state_dict(state.optimizer)
        restore_random_state(state.random, self.model.device)
        self.step, self.best, self.last = state.step, state.best, state.last
