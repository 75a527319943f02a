"""Files of weights as named tensors: memory-mapped, and without running anything that a file asks for."""

from __future__ import annotations

import json
import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from hnclip.models.torchscript import read_torchscript

_CONTAINERS = ("state_dict", "model_state_dict", "model")  # where trainers keep the weights among other things
_LONGEST_HEADER = 100_000_000  # what safetensors itself allows
_AGAIN = "copy or download it again"


@dataclass(frozen=True)
class Checkpoint:
    """The named tensors of a file, memory-mapped, and what stood around them.

    Writing into the tensors never changes the file: the mapping is private to the process.
    """

    file: Path
    tensors: dict[str, Tensor]
    """Without gradients; the prefixes `module.` (DataParallel) and `_orig_mod.` (torch.compile) are removed."""
    kind: Literal["safetensors", "pickle", "torchscript"]
    about: dict[str, Any]
    """Plain values beside the tensors, such as an epoch or a name."""


def read_checkpoint(file: str | Path) -> Checkpoint:
    """Open a file of weights; the content decides what it is, not the suffix.

    Read are safetensors, what `torch.save` writes (bare tensors, or a trainer's dictionary with the weights under
    `state_dict`, `model_state_dict` or `model`), and TorchScript archives such as OpenAI's. Tensors are mapped from
    the file and cost memory when they are used; only pickles from before torch 1.6 are read whole.
    """
    file = Path(file)
    with file.open("rb") as handle:
        start = handle.read(64)
    if start.startswith(b"version https://git-lfs"):
        raise ValueError(f"{file} is a pointer of Git LFS, not the weights themselves: run `git lfs pull`")
    if file.suffix == ".safetensors" or start[8:9] == b"{":
        return _read_safetensors(file)
    if start.startswith(b"PK"):
        return _read_zip(file)
    if start.startswith(b"\x80"):
        return _search(file, _load_pickle(file, mmap=False))
    raise ValueError(
        f"{file} ({file.stat().st_size} bytes) holds no weights that can be read: it is neither a safetensors file nor "
        "one of torch"
    )


def check_safetensors(file: Path) -> None:
    """ValueError unless this is a whole safetensors file; of one cut short it names the first tensor that suffers.

    A file is 8 bytes for the length of the header, the header in JSON, and the tensors' bytes.
    """
    size = file.stat().st_size
    with file.open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        text = handle.read(length) if length <= _LONGEST_HEADER else b""
    if not text.startswith(b"{"):
        raise ValueError(f"{file} is not a safetensors file: it has no header")
    if len(text) < length:
        raise ValueError(f"{file} is cut short: {8 + length} bytes of header expected, {size} found; {_AGAIN}")
    try:
        header = json.loads(text)
        parts = [(*entry["data_offsets"], name) for name, entry in header.items() if name != "__metadata__"]
        missing = sorted((begin, end, name) for begin, end, name in parts if 8 + length + end > size)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{file} is not a safetensors file: its header cannot be read ({error})") from error
    if missing:
        whole = 8 + length + max(end for _, end, _ in missing)
        raise ValueError(
            f"{file} is cut short: {whole} bytes expected, {size} found; the first tensor with bytes missing is "
            f"{missing[0][-1]!r} ({len(missing)} of {len(parts)} are affected); {_AGAIN}"
        )


def _read_safetensors(file: Path) -> Checkpoint:
    from safetensors import SafetensorError, safe_open

    check_safetensors(file)
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118, it is no mapping
            about = dict(opened.metadata() or {})
    except SafetensorError as error:
        raise ValueError(f"{file} is not a valid safetensors file: {error}") from error
    if not tensors:
        raise ValueError(f"{file} holds no tensors")
    return Checkpoint(file, _without_wrappers(file, tensors), "safetensors", about)


def _read_zip(file: Path) -> Checkpoint:
    try:
        with zipfile.ZipFile(file) as archive:
            records = {name.partition("/")[2] for name in archive.namelist()}
    except zipfile.BadZipFile as error:
        raise ValueError(
            f"{file} is cut short or damaged: {file.stat().st_size} bytes without the table of contents that ends a "
            f"file of torch; {_AGAIN}"
        ) from error
    if "data.pkl" not in records:
        raise ValueError(f"{file} is a zip file, but none that torch wrote: it has no data.pkl")
    if "constants.pkl" in records:
        return Checkpoint(file, _without_wrappers(file, read_torchscript(file)), "torchscript", {})
    return _search(file, _load_pickle(file, mmap=True))


def _load_pickle(file: Path, *, mmap: bool) -> Any:
    """Only tensors and plain containers: a file that asks for anything else is refused."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        if wanted := re.search(r"GLOBAL (\S+)", str(error)):
            raise ValueError(
                f"{file} does not hold weights alone: reading it would run code, first {wanted[1]}. It was not read. "
                "Whoever trusts it can open it where that code lives and save only the weights: "
                "torch.save(model.state_dict(), file), or a safetensors file"
            ) from error
        raise ValueError(
            f"{file} cannot be read as weights ({_last_line(error)}); save them with torch.save or as safetensors"
        ) from error
    except Exception as error:  # torch raises many types for a damaged file; say which file
        raise ValueError(f"{file} is cut short or damaged ({_last_line(error)}); {_AGAIN}") from error


def _last_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip() and "documentation of torch.load" not in line]
    return lines[-1].strip() if lines else type(error).__name__


def _search(file: Path, content: Any) -> Checkpoint:
    """The tensors in what was unpickled. Of a trainer's dictionary only the weights are kept; the optimiser's moments
    beside them stay unread in the file."""
    about: dict[str, Any] = {}
    while isinstance(content, Mapping):
        about |= {str(key): value for key, value in content.items() if isinstance(value, str | int | float | None)}
        inner = next((content[key] for key in _CONTAINERS if isinstance(content.get(key), Mapping)), None)
        if inner is None:
            break
        content = inner
    tensors = dict(_named_tensors(content))
    if not tensors:
        raise ValueError(f"{file} holds no named tensors, but {_outline(content)}")
    return Checkpoint(file, _without_wrappers(file, tensors), "pickle", about)


def _outline(content: Any) -> str:
    if not isinstance(content, Mapping):
        return f"a {type(content).__name__}"
    if not content:
        return "an empty dictionary"
    keys = [repr(key) for key in content]
    return f"a dictionary with the keys {', '.join(keys[:8])}{' …' if len(keys) > 8 else ''}"


def _named_tensors(content: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Tensors by name; a dictionary in the dictionary is a part of the model, its name before a dot."""
    if isinstance(content, Mapping):
        for key, value in content.items():
            if isinstance(value, Tensor):
                yield f"{prefix}{key}", value.detach()
            else:
                yield from _named_tensors(value, f"{prefix}{key}.")


def _without_wrappers(file: Path, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """DataParallel puts `module.` before every name, torch.compile `_orig_mod.`, also before those of a part."""
    plain: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        short = re.sub(r"^(module\.)+", "", re.sub(r"(^|(?<=\.))_orig_mod\.", "", name))
        if short in plain:
            raise ValueError(f"{file} holds {short!r} twice: once wrapped ('module.', '_orig_mod.') and once not")
        plain[short] = tensor
    return plain
