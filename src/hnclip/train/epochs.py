"""One run in progress: epochs of steps, evaluations, checkpoints, and the log of all of it."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from hnclip.command import train_command
from hnclip.config import ObjectiveConfig, RunOptions, TrainConfig
from hnclip.core import Batch
from hnclip.data.batching import PairData
from hnclip.data.validate import write_problems
from hnclip.models.adapters import BaseModel, save_adapter
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.load import save
from hnclip.models.model_card import Training
from hnclip.models.parameters import train_mode, trained_tensors
from hnclip.objectives.base import Objective
from hnclip.train.checkpoint import (
    DIRECTORY,
    NAME,
    TrainState,
    load_state,
    random_states,
    restore_random_state,
    restore_state,
    save_state,
)
from hnclip.train.distributed import (
    agreement,
    fail_together,
    is_distributed,
    rank,
    seed_of_process,
    world_size,
)
from hnclip.train.evaluation import evaluate_together
from hnclip.train.grad_cache import Share
from hnclip.train.gradient_probe import GradientProbe
from hnclip.train.log import MetricsLog
from hnclip.train.optimizer import keep_positions, optimizer_of
from hnclip.train.parallel import Alone, hold
from hnclip.train.prefetch import ahead
from hnclip.train.run_data import RunData, batch_sizes, length_order, own_share
from hnclip.train.step import Found, Stepper
from hnclip.util.console import progress
from hnclip.util.files import replace_file

log = logging.getLogger(__name__)

RESULT, LEFT_OUT = "result.json", "left_out.jsonl"


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


@dataclass
class RunStatus:
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


class Run:
    """One run in progress: what the steps share."""

    def __init__(
        self,
        config: TrainConfig,
        options: RunOptions,
        base: BaseModel,
        model: DualEncoder,
        objective: Objective,
        data: RunData,
        progress: RunStatus,
    ) -> None:
        self.config, self.options, self.base, self.model, self.objective = config, options, base, model, objective
        self.out = options.out
        self.data, self.progress = data, progress
        optim = config.optim
        self.epoch_steps = len(batch_sizes(len(data.pairs), config))
        self.total = progress.total = optim.epochs * self.epoch_steps
        self.parallel: Alone = hold(model, options.speed.parallel)
        self.optimizer = optimizer_of(model, optim)
        if config.adapt.freeze_positions:
            keep_positions(self.optimizer, model, config.adapt.freeze_positions)
        self.stepper = Stepper(model, objective, self.optimizer, optim, total=self.total, parallel=self.parallel)
        if self.stepper.warmup >= self.total:
            log.warning(
                f"the warm-up of {self.stepper.warmup} steps is as long as the run of {self.total}, so the "
                "learning rate never falls: set --optim.warmup to a share, for example 0.05"
            )
        gamma = config.objective.gamma if config.objective.global_loss == "hn" else ObjectiveConfig().gamma
        self.probe = GradientProbe(model, optim, gamma=gamma, parallel=self.parallel)
        self.step = 0
        self.unread: tuple[Found, dict[str, Any]] | None = None  # what the last step found, and its log entry so far
        self.loss: float | None = None  # of the last step that was read
        self.best: dict[str, float] = {}
        self.last: dict[str, float] = {}

    def go(self) -> TrainResult:
        started = time.perf_counter()
        with agreement():
            length = self._go_back()
            if self.data.problems and rank() == 0:
                write_problems(self.out / LEFT_OUT, self.data.problems)
                found = f"{len(self.data.problems)} problems in the data"
                log.warning(f"{found}; what is left out is listed in {self.out / LEFT_OUT}")
            self.log = MetricsLog(self.out, length or 0, tensorboard=self.options.tensorboard) if rank() == 0 else None
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
        log.info(f"resuming at step {self.step} of {self.total}")
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
            "truncated": {name: texts.truncated for name, texts in self.data.pairs.texts.items()},
            "validation_captions": len(self.data.validation.captions),
            "validation_truncated": self.data.validation.truncated,
            "problems": len(self.data.problems),
            "test_split": self.data.test_split,
        }

    def _epoch(self, epoch: int) -> None:
        pairs, batches = self.data.batches(self.config, epoch)
        first = self.step - epoch * self.epoch_steps
        title = f"epoch {epoch + 1}/{self.config.optim.epochs}"
        done = sum(len(rows) for rows in batches[:first])
        train_mode(self.model)
        with progress(title, len(pairs), done) as bar:
            started = time.perf_counter()
            optim = self.config.optim
            shares = [own_share(length_order(pairs, rows, optim), optim) for rows in batches[first:]]
            for batch, share in zip(ahead(self._make(pairs), [share.rows for share in shares]), shares):
                waited = time.perf_counter() - started
                self._probe(epoch, batch, share)
                self._step(epoch, batch, share=share, waited=waited)
                bar.advance(share.pairs, "" if self.loss is None else f"loss {self.loss:.3f}")
                if self.step % self.options.save_every == 0 and self.step < (epoch + 1) * self.epoch_steps:
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

    def _probe(self, epoch: int, batch: Batch, share: Share) -> None:
        """On every Nth step, measure the gradients on its batch before it is done."""
        every = self.config.probe_gradients
        if not every or self.step % every:
            return
        self._read()  # entries in order; and no measurements at weights that are not numbers
        self.optimizer.zero_grad(set_to_none=True)  # of the step before; measuring needs the room
        found = self.probe.probe(batch, share)
        # Otherwise the step to come finds that out, and ends the run with a message.
        if math.isfinite(found["infonce_norm"]) and math.isfinite(found["hn_norm"]):
            self._write({"kind": "gradients", "epoch": epoch + 1, "step": self.step, **found})

    def _step(self, epoch: int, batch: Batch, *, share: Share, waited: float) -> None:
        """Do a step and read what the step before found."""
        started = time.perf_counter()
        found = self.stepper(batch, self.step, share)
        self.step += 1
        self.progress.step = self.step
        entry = {"kind": "step", "epoch": epoch + 1, "step": self.step, "lr": self.stepper.rate}
        self._read()
        entry["pairs_per_second"] = round(share.pairs / (time.perf_counter() - started), 1)
        self.unread = found, {**entry, "waited": round(waited, 4)}

    def _read(self) -> None:
        """Read, check and log what the last step found. Called before anything is saved, so bad numbers may reach the
        weights in memory, never those on disk."""
        if self.unread is None:
            return
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
        self.loss = numbers["loss"]

    def _evaluate(self, epoch: int) -> None:
        batch = self.options.evaluate_batch
        with self.parallel.encoding():
            metrics = evaluate_together(self.model, self.data.validation, batch=batch).metrics
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
        self._watch(epoch)
        text, image = metrics["text_to_image"]["R@1"], metrics["image_to_text"]["R@1"]
        name = f"epoch {epoch}/{self.config.optim.epochs}" if epoch else "before training"
        log.info(f"{name}: validation R@1 text→image {text:.1f}, image→text {image:.1f}{'  (best)' if better else ''}")

    def _watch(self, epoch: int) -> None:
        """Log what is watched; neither `best` nor anything else depends on it."""
        if self.data.watched is None:
            return
        with self.parallel.encoding():
            found = evaluate_together(self.model, self.data.watched, batch=self.options.evaluate_batch).metrics
        self._write({"kind": "watched", "epoch": epoch, "step": self.step, "data": self.config.watch, **found})

    def _save_model(self, model: DualEncoder, name: str, epoch: int, metrics: dict[str, Any]) -> None:
        """A model directory with a card, or of an adapted model the adapters alone."""
        config = self.config
        model.provenance = Training(
            base=config.model,
            data=f"{config.data}, {len(self.data.pairs)} training pairs",
            objective=asdict(config.objective),
            command=train_command(config),
            metrics={f"validation of {config.data}, epoch {epoch}": metrics},
            epoch=epoch,
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
