"""The training loop: one readable path from a configuration to a fine-tuned model."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
from hnclip.train.grad_cache import BACKWARD, StepResult
from hnclip.train.log import MetricsLog, progress_bar
from hnclip.train.optimizer import build_optimizer, clamp_scale, learning_rate_factor, set_learning_rate
from hnclip.train.prefetch import ahead
from hnclip.train.run_data import RunData, batch_sizes, open_run_data

SATURATED = 1e-3  # an InfoNCE below this teaches nothing: the paper's threshold
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
        self.warmup = round(optim.warmup * self.total)
        self.optimizer = build_optimizer(
            model,
            lr=optim.lr,
            scale_lr=optim.lr if optim.scale_lr is None else optim.scale_lr,
            weight_decay=optim.weight_decay,
            betas=(optim.beta1, optim.beta2),
        )
        self.step = 0
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
                entry = self._step(epoch, batch, waited=time.perf_counter() - started)
                bar.advance(len(batch), f"loss {entry['loss']:.3f}")
                if self.step % self.config.save_every == 0 and self.step < (epoch + 1) * self.epoch_steps:
                    self._save()
                started = time.perf_counter()
        self._evaluate(epoch + 1)
        self._save()

    def _step(self, epoch: int, batch: Batch, *, waited: float) -> dict[str, Any]:
        started = time.perf_counter()
        optim = self.config.optim
        batch = batch.to(self.model.device)
        factor = learning_rate_factor(self.step, total=self.total, warmup=self.warmup, floor=optim.lr_floor)
        set_learning_rate(self.optimizer, factor)
        self.optimizer.zero_grad(set_to_none=True)
        result = BACKWARD[optim.negatives](
            self.model, batch, self.objective, chunk=optim.micro_batch, autocast=self._autocast
        )
        limit = optim.clip_grad or float("inf")  # an infinite limit measures the norm and changes nothing
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        self._check(result, norm)
        self.optimizer.step()
        clamp_scale(self.model.backbone.logit_scale, optim.scale_max)
        self.step += 1
        entry = self._entry(epoch, result, norm, len(batch) / (time.perf_counter() - started), waited)
        self.log.write(entry)
        return entry

    def _autocast(self) -> AbstractContextManager:
        if self.config.optim.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.model.device.type, dtype=torch.bfloat16)

    def _check(self, result: StepResult, norm: Tensor) -> None:
        """Stop before bad numbers reach the weights."""
        loss = sum(result.terms.values())
        if bool(torch.isfinite(torch.as_tensor(loss))) and bool(torch.isfinite(norm)):
            return
        values = ", ".join(f"{name} {value.item():.4g}" for name, value in result.terms.items())
        saved = self.out / NAME
        where = f"the last good state is {saved}" if saved.exists() else "no checkpoint had been written yet"
        raise TrainingDiverged(
            f"step {self.step + 1}: the loss is not a number ({values}, gradient norm {norm.item():.4g}); {where}. "
            "Try a lower --optim.lr or --optim.precision fp32."
        )

    def _entry(self, epoch: int, result: StepResult, norm: Tensor, speed: float, waited: float) -> dict[str, Any]:
        terms = {name: value.item() for name, value in result.terms.items()}
        return {
            "kind": "step",
            "epoch": epoch + 1,
            "step": self.step,
            "loss": sum(terms.values()),
            **terms,
            "infonce": result.infonce.mean().item(),
            "saturated": (result.infonce < SATURATED).float().mean().item(),
            "grad_norm": norm.item(),
            "scale": self.model.scale.item(),
            "lr": self.optimizer.param_groups[0]["lr"],
            "pairs_per_second": round(speed, 1),
            "waited": round(waited, 4),
        }

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
