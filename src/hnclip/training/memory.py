"""Memory negatives: the embeddings of the most recently seen pairs, as further negatives of the global loss.

Every query is compared with its micro-batch and with N pairs from memory. The memory holds detached embeddings, so it
costs neither activations nor a backward pass. They are as old as the last time their pair was seen, at most about one
epoch if N is the number of training pairs. Related: memory bank (Wu et al. 2018), cross-batch memory (Wang et al.
2020).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from hnclip.core import NegativePairs


class PairMemory:
    """The last `size` distinct pairs. One that is seen again replaces its own entry, any other replaces the one that
    was seen longest ago.

    Args:
        pairs: the first pairs, with gradient or without; at most `size`.
        rows: [n], their numbers in the training set.
    """

    def __init__(self, size: int, pairs: NegativePairs, rows: Tensor) -> None:
        self.size = size
        self._slots: OrderedDict[int, int] = OrderedDict()  # number of a pair to its slot, oldest first
        given = {name: value for name, value in vars(pairs).items() if value is not None}
        # [size, ...]; row n is slot n, those from the number of slots on are unset.
        self._tensors: dict[str, Tensor] = {n: v.new_zeros(size, *v.shape[1:]) for n, v in given.items()}
        self.add(pairs, rows)

    @torch.no_grad()
    def add(self, pairs: NegativePairs, rows: Tensor) -> None:
        """Keep the pairs of a batch. `rows` [n] are their numbers in the training set."""
        slots, kept = [], slice(max(0, len(rows) - self.size), None)
        for row in rows[kept].tolist():
            if row in self._slots:
                self._slots.move_to_end(row)
            elif len(self._slots) < self.size:
                self._slots[row] = len(self._slots)
            else:
                _, self._slots[row] = self._slots.popitem(last=False)
            slots.append(self._slots[row])
        index = torch.tensor(slots, dtype=torch.long, device=pairs.image.device)
        for name, tensor in self._tensors.items():
            tensor[index] = getattr(pairs, name)[kept]

    def negatives(self) -> NegativePairs | None:
        """The pairs in memory; None if there are none."""
        used = len(self._slots)
        return NegativePairs(**{name: value[:used] for name, value in self._tensors.items()}) if used else None

    def state_dict(self) -> dict[str, Any]:
        return {"tensors": dict(self._tensors), "slots": list(self._slots.items())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state["tensors"].items():
            self._tensors[name].copy_(value)
        self._slots = OrderedDict(state["slots"])
