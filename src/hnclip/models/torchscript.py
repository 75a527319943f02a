"""The tensors of a TorchScript archive, read without running its program.

Such an archive, e.g. OpenAI's released CLIP, is a zip file: code, and a pickle `data.pkl` of nested objects whose
tensors point to records `data/0`, `data/1`, … Here the pickle is read into inert records; code is never looked at.
"""

from __future__ import annotations

import io
import pickle
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


def read_torchscript(file: Path) -> dict[str, Tensor]:
    """The tensors of an archive that `torch.jit.save` wrote, named by their path of attributes.

    That is its `state_dict`, and tensors that were plain attributes. Everything that is no tensor is left out.
    Tensors are mapped privately from the file.
    """
    try:
        with file.open("rb") as handle, zipfile.ZipFile(handle) as archive:
            records = _Records(handle, archive)
            root = _Unpickler(io.BytesIO(records.read("data.pkl"))).load()
            if not isinstance(root, _Object):
                raise ValueError(f"its data.pkl holds a {type(root).__name__}, not a module")
            return {name: records.tensor(layout) for name, layout in _layouts(root)}
    except Exception as error:  # a damaged pickle can fail in any way; say which file
        raise ValueError(f"the TorchScript archive {file} cannot be read: {error}") from error


class _Storage(NamedTuple):
    dtype: torch.dtype
    key: str
    length: int


class _Layout(NamedTuple):
    """A tensor as the pickle describes it; the last two, gradients and hooks, are of no use here."""

    storage: _Storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool = False
    hooks: Any = None


class _Object:
    """Stands for every class of the program: the attributes it was saved with, and no behaviour."""

    attributes: dict[str, Any]

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, dict):
            raise ValueError(f"an object's attributes are a {type(state).__name__}")
        self.attributes = state


@dataclass(frozen=True)
class _Function:
    """One of the few functions that a pickle may call; unlike a plain function it cannot be altered from there."""

    call: Callable[..., Any]

    def __call__(self, *arguments: Any) -> Any:
        return self.call(*arguments)

    def __setstate__(self, state: Any) -> None:
        raise ValueError("it tries to alter a function")


def _first(value: Any, *types: Any) -> Any:
    return value


_ALLOWED = {
    "torch._utils._rebuild_tensor_v2": _Function(_Layout),
    "collections.OrderedDict": _Function(dict),
    # They only tell TorchScript the type of what a list or a dictionary holds.
    **{f"torch.jit._pickle.build_{kind}list": _Function(_first) for kind in ("int", "tensor", "double", "bool")},
    "torch.jit._pickle.restore_type_tag": _Function(_first),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "__torch__" or module.startswith("__torch__."):
            return _Object
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        wanted = f"{module}.{name}"
        if wanted not in _ALLOWED:
            raise ValueError(f"it asks for {wanted}, which no weights need; nothing was run")
        return _ALLOWED[wanted]

    def persistent_load(self, reference: Any) -> _Storage:
        _, dtype, key, _device, length = reference
        return _Storage(dtype, key, length)


def _layouts(module: _Object, prefix: str = "", above: tuple[_Object, ...] = ()) -> Iterator[tuple[str, _Layout]]:
    if any(module is other for other in above):
        raise ValueError(f"its module {prefix!r} contains itself")
    for name, value in module.attributes.items():
        if isinstance(value, _Layout):
            yield prefix + name, value
        elif isinstance(value, _Object):
            yield from _layouts(value, f"{prefix}{name}.", (*above, module))


class _Records:
    """The records of an open archive. torch stores tensors' bytes uncompressed and aligned, so they can be mapped."""

    def __init__(self, handle: BinaryIO, archive: zipfile.ZipFile) -> None:
        self.handle, self.archive = handle, archive
        self.root = next(name for name in archive.namelist() if name.partition("/")[2] == "data.pkl").partition("/")[0]
        size = handle.seek(0, io.SEEK_END)
        self.whole = torch.UntypedStorage.from_file(str(handle.name), False, size)  # not shared: writes stay in memory
        self.storages: dict[str, Tensor] = {}
        if f"{self.root}/byteorder" in archive.namelist() and self.read("byteorder") != sys.byteorder.encode():
            raise ValueError(f"its numbers are not {sys.byteorder}-endian as on this machine")

    def read(self, name: str) -> bytes:
        return self.archive.read(f"{self.root}/{name}")

    def tensor(self, layout: _Layout) -> Tensor:
        storage = layout.storage
        if storage.key not in self.storages:
            self.storages[storage.key] = self._storage(storage)
        return self.storages[storage.key].as_strided(layout.size, layout.stride, layout.offset)

    def _storage(self, storage: _Storage) -> Tensor:
        record = self.archive.getinfo(f"{self.root}/data/{storage.key}")
        if record.file_size != storage.length * storage.dtype.itemsize:
            raise ValueError(
                f"its record {record.filename} has {record.file_size} bytes, its tensor needs "
                f"{storage.length * storage.dtype.itemsize}"
            )
        begin = self._begin(record)
        mappable = record.compress_type == zipfile.ZIP_STORED and begin % storage.dtype.itemsize == 0
        if mappable or not storage.length:
            memory = self.whole[begin : begin + record.file_size]
        else:  # packed again by another tool
            memory = torch.frombuffer(bytearray(self.archive.read(record)), dtype=torch.uint8).untyped_storage()
        return torch.empty(0, dtype=storage.dtype, device="cpu").set_(memory)  # [length]

    def _begin(self, record: zipfile.ZipInfo) -> int:
        """Where a record's bytes begin: behind its own header, whose padding the table of contents does not tell."""
        self.handle.seek(record.header_offset)
        header = self.handle.read(30)
        name, padding = (int.from_bytes(header[place : place + 2], "little") for place in (26, 28))
        return record.header_offset + 30 + name + padding
