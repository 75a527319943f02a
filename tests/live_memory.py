"""Watches every tensor that torch makes: how large the largest is, how many bytes live at once, which ops ran."""

from __future__ import annotations

from collections import Counter

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Everything made inside the block, backward passes too.

    Args:
        largest: elements of the largest tensor that was made; views of what was there before do not count.
        peak: bytes of what was made and still lived, at most.
        calls: how often each op ran.
    """

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.peak = 0
        self.calls: Counter[str] = Counter()
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        made = func(*args, **(kwargs or {}))
        self.calls[str(func)] += 1
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in given:
                storage = tensor.untyped_storage()
                self.largest = max(self.largest, storage.nbytes() // tensor.element_size())
                self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return made
