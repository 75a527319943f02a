"""A training run in progress: epochs of steps, evaluations, checkpoints, models, and the log of them."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from hnclip.config import ObjectiveConfig, RunOptions, TrainConfig, from_json, to_json, train_command
from hnclip.core import Batch, NegativePairs
from hnclip.data.batching import PairData
from hnclip.data.decoding import in_order
from hnclip.data.records import DataSet
from hnclip.data.sampler import epoch_order
from hnclip.data.validate import write_problems
from hnclip.encode.loop import encode_captions, encode_pixels
from hnclip.evaluation.metrics import summarize
from hnclip.evaluation.ranks import retrieval_ranks
from hnclip.models.adapters import BaseModel, save_adapter
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.load import RUN_CONFIG, RUN_RESULT, load, save
from hnclip.models.model_card import Training
from hnclip.models.parameters import train_mode
from hnclip.training.checkpoint import (
    CHECKPOINT,
    TrainState,
    capture_tensors,
    load_checkpoint,
    only_writer,
    report_failure,
    restore_tensors,
    save_checkpoint,
)
from hnclip.training.data import RunData, batch_sizes, open_run_data
from hnclip.training.distributed import (
    broadcast_object,
    distribute,
    encode_shared,
    gather_objects,
    gather_tensors,
    is_distributed,
    rank,
    rank_seed,
    world_size,
)
from hnclip.training.gradient_probe import probe_gradients
from hnclip.training.log import MetricsLog
from hnclip.training.memory import PairMemory
from hnclip.training.optimizer import build_optimizer, keep_positions, warmup_steps
from hnclip.training.setup import check_processes, choose_precision, log_model, prepare_model
from hnclip.training.step import Group, StepMetrics, TrainStep, split_batch
from hnclip.util.console import progress
from hnclip.util.device import find_device, random_state, restore_random_state
from hnclip.util.files import recover_directory, replace_file
from hnclip.util.optional import import_extra
from hnclip.util.text import counted

log = logging.getLogger(__name__)

OPTIONS, LEFT_OUT = "options.json", "left_out.jsonl"


class TrainingDiverged(RuntimeError):
    """The loss or its gradient is not a number."""


@dataclass(frozen=True)
class TrainResult:
    """A finished run.

    Args:
        seconds: of all sessions together.
        best, last: {"epoch": …, "mean_R@1": …} of the epoch with the highest validation R@1 (mean of both directions;
            epoch 0 is the model before training) and of the final one. Each is a model directory of that name in `out`.
    """

    out: Path
    steps: int
    seconds: float
    best: dict[str, float]
    last: dict[str, float]


class Trainer:
    """One run in progress. Rank 0 writes its directory; all ranks compute."""

    def __init__(
        self,
        config: TrainConfig,
        options: RunOptions,
        *,
        data: DataSet | None = None,
        on_step: Callable[[int], None] | None = None,
    ) -> None:
        check_processes(config, options)
        if options.tensorboard:
            import_extra("torch.utils.tensorboard", "TensorBoard events", "track")
        self.options, self.out, self.on_step, self._given = options, options.out, on_step, data
        if options.threads:
            torch.set_num_threads(options.threads)
        self.device = find_device(options.device)
        # Decided once and saved: a run that is resumed elsewhere keeps its precision.
        precision = broadcast_object(choose_precision(config.optim.precision, self.device))
        self.config = replace(config, optim=replace(config.optim, precision=precision))
        self.step, self.seconds, self.loss = 0, 0.0, math.nan  # seconds of earlier sessions
        self.best: dict[str, float] = {}
        self.last: dict[str, float] = {}
        self.metrics: dict[str, Any] = {}  # of the last evaluation
        self.unread: tuple[StepMetrics, dict[str, Any]] | None = None
        self.log: MetricsLog | None = None

    def fit(self) -> TrainResult:
        """Train from the start or the last checkpoint to the end."""
        self.started = time.monotonic()
        with only_writer(self.out):
            for name in ("best", "last") if rank() == 0 else ():
                recover_directory(self.out / name)
            self._open()
            self._write_file(OPTIONS, to_json(self.options))
            self._write_file(RUN_CONFIG, to_json(self.config))
            self.saved = time.monotonic()
            try:
                self._run()
            finally:
                if self.log is not None:
                    self.log.close()
            result = TrainResult(self.out, self.step, round(self._elapsed(), 1), self.best, self.last)
            content = {name: value for name, value in vars(result).items() if name != "out"}
            self._write_file(RUN_RESULT, json.dumps(content, indent=2) + "\n")
        return result

    def _open(self) -> None:
        """Model, objective, data and optimiser. Nothing is written: a run that cannot start leaves no files."""
        config, options = self.config, self.options
        torch.manual_seed(config.seed)
        self.base = BaseModel(**{spec.name: getattr(config, spec.name) for spec in fields(BaseModel)})
        if config.adapt.method != "full":
            self.base = self.base.located()  # where the adapters will look for it
        self.model = self.load_model().to(self.device)
        self.model.untrained_projections = False  # this run trains them
        self.objective = prepare_model(config, options.speed, self.model)
        log_model(config, options, self.model, self.objective)
        self.data: RunData = open_run_data(
            config, self.model, self.objective, self._given, batch=options.evaluate_batch
        )
        if len(found := set(gather_objects(self.data.fingerprint))) > 1:
            raise ValueError(f"the ranks have different data: {'; '.join(sorted(found))}")
        self.epoch_steps = len(batch_sizes(len(self.data.pairs), config))
        self.total = config.optim.epochs * self.epoch_steps
        if (warmup := warmup_steps(self.total, config.optim)) >= self.total:
            log.warning(
                f"the warm-up of {warmup} steps is as long as the run of {self.total}, so the learning rate never "
                "falls: set --optim.warmup to a share, for example 0.05"
            )
        distribute(self.model, options.speed.parallel)
        self.optimizer = build_optimizer(self.model, config.optim)
        if config.adapt.freeze_positions:
            keep_positions(self.optimizer, self.model, config.adapt.freeze_positions)

    def load_model(self) -> DualEncoder:
        """The model that the run starts from."""
        return load(**asdict(self.base))

    def _run(self) -> None:
        config = self.config
        state = load_checkpoint(self.out)
        if state is not None:
            self._check_unchanged(state)
        memory = self._memory()
        self.train_step = TrainStep(
            self.model, self.objective, self.optimizer, config.optim, total=self.total, memory=memory
        )
        if state is not None:
            self._restore(state)
        elif is_distributed():
            torch.manual_seed(rank_seed(config.seed, 0))
        if rank() == 0:
            if self.data.problems:
                write_problems(self.out / LEFT_OUT, self.data.problems)
                problems = counted(len(self.data.problems), "problem")
                log.warning(f"{problems} in the data, listed in {self.out / LEFT_OUT}")
            length = 0 if state is None else state.log_bytes
            self.log = MetricsLog(self.out, length, self.step, tensorboard=self.options.tensorboard)
        if state is None:
            self._write({"kind": "data", "step": 0, **self.data.describe()})
            self._evaluate(epoch=0)
        self._save_models()  # a run that was killed before this is repeated here
        for epoch in range(self.step // self.epoch_steps, config.optim.epochs):
            self._epoch(epoch)

    def _epoch(self, epoch: int) -> None:
        optim = self.config.optim
        pairs, batches = self.data.batches(self.config, epoch)
        first = self.step - epoch * self.epoch_steps
        splits = [split_batch(rows, optim, rank=rank(), world=world_size()) for rows in batches[first:]]
        train_mode(self.model)

        def make(rows: list[int]) -> Batch:
            batch = pairs.batch(rows)
            return batch.pinned() if self.device.type == "cuda" else batch

        title = f"epoch {epoch + 1}/{optim.epochs}, steps"
        # One batch ahead, in a thread: reading images leaves the interpreter free for the current step.
        with progress(title, self.epoch_steps, first) as bar, ThreadPoolExecutor(1) as thread:
            started = time.monotonic()
            for batch, (_, groups) in zip(in_order(thread, make, (rows for rows, _ in splits), 2), splits):
                waited = time.monotonic() - started
                self._probe(epoch, batch, groups)
                self._step(epoch, batch, groups, waited)
                bar.advance(1, "" if math.isnan(self.loss) else f"loss {self.loss:.3f}")
                if self.on_step is not None:
                    self.on_step(self.step)
                if self.step < (epoch + 1) * self.epoch_steps and self._save_is_due():
                    self._save()
                started = time.monotonic()
            self._read()
        self._evaluate(epoch + 1)
        # First the checkpoint, which says which epoch is the best, then the models: if the run is killed in between,
        # it writes them when it is resumed.
        self._save()
        self._save_models()

    def _step(self, epoch: int, batch: Batch, groups: list[Group], waited: float) -> None:
        """Do a step, and read the numbers of the step before while an accelerator works on it."""
        started = time.monotonic()
        found = self.train_step(batch, self.step, groups)
        self.step += 1
        self._read()
        seconds = time.monotonic() - started
        entry = {
            "kind": "step",
            "epoch": epoch + 1,
            "step": self.step,
            "lr": self.optimizer.param_groups[0]["lr"],
            "pairs_per_second": round(sum(len(group.pairs) for group in groups) / seconds, 1),
            "waited": round(waited, 4),
        }
        self.unread = found, entry

    def _read(self) -> None:
        """Read, check and log the numbers of the last step. Called before anything is saved, so bad numbers may reach
        the weights in memory, but not those on disk."""
        if self.unread is None:
            return
        (found, entry), self.unread = self.unread, None
        numbers = found.read()
        if not (math.isfinite(numbers["loss"]) and math.isfinite(numbers["grad_norm"])):
            values = ", ".join(f"{name} {value:.4g}" for name, value in numbers.items())
            path = self.out / CHECKPOINT
            raise TrainingDiverged(
                f"step {entry['step']}: the loss is not a number ({values}). Try a lower --optim.lr or "
                f"--optim.precision fp32; {f'{path} is of an earlier step' if path.exists() else 'nothing was saved'}"
            )
        self._write({**entry, **numbers})
        self.loss = numbers["loss"]

    def _probe(self, epoch: int, batch: Batch, groups: list[Group]) -> None:
        """On every N-th step, measure the gradients on its batch first."""
        every = self.config.probe_gradients
        if not every or self.step % every:
            return
        self._read()  # so that entries are in order
        self.optimizer.zero_grad(set_to_none=True)  # gradients of the last step only take memory
        objective, memory = self.config.objective, self.train_step.memory
        gamma = objective.gamma if objective.global_loss == "hn" else ObjectiveConfig().gamma
        found = probe_gradients(self.model, batch, self.config.optim, groups, memory, gamma=gamma)
        if math.isfinite(found["infonce_norm"] + found["hn_norm"]):  # else the step ends the run
            self._write({"kind": "gradients", "epoch": epoch + 1, "step": self.step, **found})

    def _evaluate(self, epoch: int) -> None:
        self.metrics = self._retrieval(self.data.validation)
        self.last = {"epoch": epoch, "mean_R@1": self.metrics["mean_R@1"]}
        better = self.last["mean_R@1"] > self.best.get("mean_R@1", -1.0)
        if better:
            self.best = self.last
        self._write({"kind": "evaluation", "epoch": epoch, "step": self.step, "split": "validation", **self.metrics})
        if self.data.watched is not None:  # only logged: nothing depends on it
            watched = self._retrieval(self.data.watched)
            self._write({"kind": "watched", "epoch": epoch, "step": self.step, "data": self.config.watch, **watched})
        text, image = self.metrics["text_to_image"]["R@1"], self.metrics["image_to_text"]["R@1"]
        name = f"epoch {epoch}/{self.config.optim.epochs}" if epoch else "before training"
        mark = "  (best)" if better and epoch else ""
        log.info(f"{name}: validation R@1 text→image {text:.1f}, image→text {image:.1f}{mark}")

    def _retrieval(self, gallery: PairData) -> dict[str, Any]:
        """Metrics of a gallery, encoded by all ranks together."""
        image, text = self._encode(gallery.images["full"], gallery.texts["caption"])
        return summarize(retrieval_ranks(image, text, gallery.owner))

    def _encode(self, pixels: Any, captions: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Global vectors of images [I, D] and captions [T, D]."""
        model, batch = self.model, self.options.evaluate_batch
        image = encode_shared(lambda rows: encode_pixels(model, pixels.select(rows), batch=batch), len(pixels))
        text = encode_shared(
            lambda rows: encode_captions(model, [captions[row] for row in rows], batch=batch), len(captions)
        )
        return image, text

    def _memory(self) -> PairMemory | None:
        """The memory at the start: pairs chosen by the seed, as the initial model encodes them."""
        optim, seed, device, dtype = self.config.optim, self.config.seed, self.device, self.model.dtype
        size = min(optim.memory, len(self.data.pairs))
        if not size:
            return None
        pairs = self.data.pairs.draw(seed, 0)
        log.info(f"negatives from a memory of {size} of {len(pairs)} training pairs")
        rows = torch.tensor(epoch_order(len(pairs), seed, optim.epochs)[:size])
        chosen = pairs.chosen[rows]  # the rows of their captions
        captions = [pairs.texts["caption"][row] for row in chosen.tolist()]
        image, text = self._encode(pairs.images["full"].select(rows.tolist()), captions)
        margin_text = None if pairs.margin_text is None else pairs.margin_text[chosen].to(device)
        found = NegativePairs(image.to(dtype), text.to(dtype), pairs.ids[rows].to(device), margin_text)
        return PairMemory(size, found, rows)

    def _save_is_due(self) -> bool:
        return broadcast_object(time.monotonic() - self.saved >= 60 * self.options.save_minutes)

    def _save(self) -> None:
        self._read()
        model, optimizer = capture_tensors(self.model, self.optimizer)
        memory, random = self.train_step.memory, gather_objects(random_state(self.device))  # of every rank
        if rank() == 0:
            state = TrainState(
                step=self.step,
                seconds=self._elapsed(),
                model=model,
                optimizer=optimizer,
                random=random,
                log_bytes=0 if self.log is None else self.log.length,
                best=self.best,
                last=self.last,
                metrics=self.metrics,
                data=self.data.fingerprint,
                config=to_json(self.config),
                memory={} if memory is None else memory.state_dict(),
            )
            save_checkpoint(self.out, state)
        self.saved = time.monotonic()

    def _check_unchanged(self, state: TrainState) -> None:
        if from_json(TrainConfig, state.config) != self.config:
            raise ValueError(
                f"{self.out / RUN_CONFIG} has changed since {self.out / CHECKPOINT} was written: restore it, or begin "
                "another run with hnclip train --config"
            )
        if state.data != self.data.fingerprint:
            raise ValueError(
                f"the data of {self.out} have changed: the run has seen {state.data}, now there are "
                f"{self.data.fingerprint}; restore the data (see hnclip data check {self.config.data}), or begin "
                "another run"
            )

    def _restore(self, state: TrainState) -> None:
        restore_tensors(state, self.model, self.optimizer)
        if self.train_step.memory is not None:
            self.train_step.memory.load_state_dict(state.memory)
        self.step, self.seconds, self.metrics = state.step, state.seconds, state.metrics
        self.best, self.last = state.best, state.last
        if len(state.random) == world_size():
            restore_random_state(state.random[rank()], self.device)
        else:
            torch.manual_seed(rank_seed(self.config.seed, self.step))
        log.info(f"resuming at step {self.step} of {self.total}")

    def _save_models(self) -> None:
        """Write `best` and `last` if they are models of the epoch that was just evaluated."""
        epoch, unfinished = divmod(self.step, self.epoch_steps)
        found = {"best": self.best} if epoch == 0 else {"best": self.best, "last": self.last}
        names = [name for name, entry in found.items() if entry["epoch"] == epoch]
        if unfinished or not names:
            return
        weights = gather_tensors(self.model.backbone.state_dict())
        for name in names if rank() == 0 else ():
            self._save_model(self.out / name, epoch, weights)

    def _save_model(self, directory: Path, epoch: int, weights: dict[str, torch.Tensor]) -> None:
        """A model directory with a card; of an adapted model the adapters alone."""
        config = self.config
        self.model.provenance = Training(
            base=config.model,
            data=f"{config.data}, {len(self.data.pairs)} training pairs",
            objective=asdict(config.objective),
            command=train_command(config),
            metrics={f"validation of {config.data}, epoch {epoch}": self.metrics},
            epoch=epoch,
        )
        with report_failure(directory, self.out):
            if config.adapt.method == "full":
                save(self.model, directory, weights=weights)
            else:
                save_adapter(self.model, directory, self.base, weights=weights)

    def _write(self, entry: dict[str, Any]) -> None:
        if self.log is not None:
            self.log.write(entry)

    def _write_file(self, name: str, content: str) -> None:
        if rank() == 0:
            with replace_file(self.out / name) as partial:
                partial.write_text(content, encoding="utf-8")

    def _elapsed(self) -> float:
        return self.seconds + time.monotonic() - self.started
