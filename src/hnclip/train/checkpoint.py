"""The state of a run on disk: written whole or not at all, read without executing code, one writer at a time.

A process that holds the whole model writes it into one file, `checkpoint.pt`. Processes that hold parts of it (FSDP)
write a directory, `checkpoint/`: each its own rows into `shard-K-of-W.safetensors`, with their place in the file's
header, and the first one everything else into `state.pt`. Reading takes the rows that are wanted out of whichever files
have them, so a run goes on with any number of processes, in either mode.

The directory is not one of torch.distributed.checkpoint: its index is a pickle, which runs code when it is read.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from hnclip.models.parameters import restore_trained_tensors, trained_tensors
from hnclip.train.distributed import agreement, gather_rows, rank, tell_everybody, world_size
from hnclip.train.parallel import is_sharded, local_part, local_rows
from hnclip.util.files import exclusive_lock, recover_directory, replace_directory, replace_file

NAME, DIRECTORY, WHOLE = "checkpoint.pt", "checkpoint", "state.pt"


@dataclass(frozen=True)
class TrainState:
    """Everything an identical continuation needs. `step` counts finished optimiser steps; `model` holds only what
    training changes, the rest is where the run started from; `random` has the generators of each process; `log_bytes`
    is the length of metrics.jsonl at that step, so that lines of lost steps are cut off on resuming; `data` is the
    fingerprint of the data, since with other data the same step would be another one.

    Tensors of `model` and `optimizer` are parts of the whole (DTensor) in a process that holds parts, and `Rows` when
    they come from a directory of shards."""

    step: int
    model: dict[str, Any]
    optimizer: dict[str, Any]
    random: list[dict[str, Tensor]]
    log_bytes: int
    best: dict[str, float]
    last: dict[str, float]
    data: str


@dataclass(frozen=True)
class Rows:
    """A tensor whose rows lie in several files, read when they are asked for."""

    name: str
    shape: torch.Size
    pieces: list[tuple[int, Any]] = field(default_factory=list)  # first row, and the slice of a safetensors file

    def __getitem__(self, wanted: slice) -> Tensor:
        found, at = [], wanted.start
        for start, piece in sorted(self.pieces, key=lambda entry: entry[0]):
            stop = start + piece.get_shape()[0]
            if start <= at < min(stop, wanted.stop):
                found.append(piece[at - start : min(stop, wanted.stop) - start])
                at = min(stop, wanted.stop)
        if at < wanted.stop:
            raise ValueError(f"rows {at} to {wanted.stop} of {self.name} are in none of the shards")
        return torch.cat(found) if found else torch.empty(0, *self.shape[1:])


def save_state(run: Path, state: TrainState) -> None:
    """Replace the run's checkpoint, a matter of all processes. When the disk is full the old one stays."""
    sharded = any(is_sharded(tensor) for tensor in state.model.values())
    path, other = (run / name for name in ((DIRECTORY, NAME) if sharded else (NAME, DIRECTORY)))
    if sharded:
        _save_shards(path, state)
    else:
        with agreement(), _keeping(path):
            if rank() == 0:
                with replace_file(path) as partial:
                    torch.save(vars(state), partial)  # asdict would copy every tensor
    with agreement():
        if rank() == 0 and other.exists():  # of the other mode, and older
            shutil.rmtree(other) if other.is_dir() else other.unlink()


@contextmanager
def _keeping(path: Path) -> Iterator[None]:
    """Errors of writing, with the consolation that they change nothing."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch reports a failed write as RuntimeError
        raise OSError(f"could not write {path} ({error}); the checkpoint before it is intact") from error


def _save_shards(path: Path, state: TrainState) -> None:
    shards: dict[str, Tensor] = {}
    places: dict[str, str] = {}

    def take(name: str, tensor: Any) -> Any:
        """Put this process's rows aside; what stays is where to look for them."""
        if not (isinstance(tensor, Tensor) and is_sharded(tensor)):
            return tensor
        if len(rows := local_part(tensor)):
            shards[name], places[name] = rows.contiguous(), str(local_rows(tensor).start)
        return {"rows of": name, "shape": list(tensor.shape)}

    whole = {**vars(state), **_walk({"model": state.model, "optimizer": state.optimizer}, take), "shards": world_size()}
    with ExitStack() as stack:  # leaving it, the first process puts the new directory in the place of the old one
        with agreement(), _keeping(path):
            partial = stack.enter_context(replace_directory(path)) if rank() == 0 else None
        partial = Path(tell_everybody(str(partial)))
        with agreement(), _keeping(path):
            save_file(shards, partial / f"shard-{rank() + 1}-of-{world_size()}.safetensors", metadata=places)
            if rank() == 0:
                torch.save(whole, partial / WHOLE)
    with agreement():
        pass  # nobody goes on before the directory is in its place


def load_state(run: Path) -> TrainState | None:
    """The run's checkpoint, or None if there is none yet."""
    readers: dict[str, Callable[[Path], TrainState]] = {NAME: _load_file, DIRECTORY: _load_shards}
    states = []
    for name, read in readers.items():
        if (path := run / name).exists():
            try:
                states.append(read(path))
            except Exception as error:  # pickle, zip and type errors all mean the same to the reader
                raise ValueError(f"{path} is not a checkpoint of this program or is damaged: {error}") from error
    # Both are there if a run that changed its mode was killed before it removed the older one.
    return max(states, key=lambda state: state.step, default=None)


def _load_file(path: Path) -> TrainState:
    found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if isinstance(found["random"], dict):  # of a version in which there was one process
        found["random"] = [found["random"]]
    return TrainState(**found)


def _load_shards(path: Path) -> TrainState:
    whole = torch.load(path / WHOLE, map_location="cpu", weights_only=True)
    count = whole.pop("shards")
    tensors: dict[str, Rows] = {}

    def find(name: str, value: Any) -> Any:
        if not (isinstance(value, dict) and "rows of" in value):
            return value
        return tensors.setdefault(value["rows of"], Rows(value["rows of"], torch.Size(value["shape"])))

    whole |= _walk({"model": whole["model"], "optimizer": whole["optimizer"]}, find)
    for number in range(1, count + 1):
        file = safe_open(path / f"shard-{number}-of-{count}.safetensors", framework="pt")
        for name, start in (file.metadata() or {}).items():
            tensors[name].pieces.append((int(start), file.get_slice(name)))
    return TrainState(**whole)


def recover_state(run: Path) -> None:
    """Finish what a kill interrupted in `save_state`."""
    recover_directory(run / DIRECTORY)
    for leftover in run.glob(f".{NAME}.new-*"):
        leftover.unlink()


def restore_state(state: TrainState, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put a checkpoint's tensors into a model and its optimiser, whether they are whole or parts, here or there."""
    own = trained_tensors(model)
    restore_trained_tensors(model, {name: _like(own.get(name), found) for name, found in state.model.items()})
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def place(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor | Rows):
            return value
        parameter = parameters[int(name.split(".")[1])]
        return _like(parameter if value.shape == parameter.shape else None, value)

    moments = _walk({"state": state.optimizer["state"]}, place)
    optimizer.load_state_dict({**state.optimizer, **moments})


def _like(own: Tensor | None, found: Tensor | Rows) -> Tensor:
    """A copy of a tensor of a checkpoint; where `own` is a part, of the same part."""
    if own is not None and is_sharded(own) and own.shape == found.shape:
        copy = torch.empty_like(own)
        local_part(copy).copy_(found[local_rows(own)])
        return copy
    return found.clone() if isinstance(found, Tensor) else found[0 : found.shape[0]]


def _walk(tree: Mapping[Any, Any], change: Callable[[str, Any], Any], name: str = "") -> dict[Any, Any]:
    """The tree with every value that is not a tree of its own replaced by change(its place, value)."""
    changed = {}
    for key, value in tree.items():
        place = f"{name}.{key}" if name else str(key)
        replaced = change(place, value)
        changed[key] = _walk(value, change, place) if replaced is value and isinstance(value, dict) else replaced
    return changed


def random_state(device: torch.device) -> dict[str, Tensor]:
    """The generators that training draws from."""
    state = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state(*_which(device))
    return state


def restore_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type in state and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(state[device.type], *_which(device))


def _which(device: torch.device) -> tuple[torch.device, ...]:
    """Apple's accelerator is only one, and its functions take no device."""
    return () if device.type == "mps" else (device,)


def random_states(device: torch.device) -> list[dict[str, Tensor]]:
    """The generators of every process."""
    own = random_state(device)
    gathered = {name: gather_rows(state) for name, state in own.items()}  # [W, bytes] each, in the host's memory
    return [{name: states[number].clone() for name, states in gathered.items()} for number in range(world_size())]


@contextmanager
def only_writer(run: Path) -> Iterator[None]:
    """Hold the run directory for this process; the lock ends with the process, however it ends."""
    run.mkdir(parents=True, exist_ok=True)
    with exclusive_lock(run / ".lock", f"another process is training in {run}; wait for it or choose another --out"):
        yield
