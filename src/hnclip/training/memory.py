"""Memory negatives: the embeddings of the most recently seen pairs, as further negatives of the global loss.

Every query is compared with its micro-batch and with N pairs from memory. The memory holds detached embeddings, so it
costs neither activations nor a backward pass. They are as old as the last time their pair was seen, at most about one
epoch if N is the number of training pairs. Related: memory bank (Wu et al. 2018), cross-batch memory (Wang et al.
2020).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hnclip.core import Embeddings, NegativePairs, ViewEmbeddings
from hnclip.data.batching import PairData
from hnclip.models.dual_encoder import DualEncoder


class PairMemory:
    """The embeddings of the last `size` distinct pairs.

    A pair that is seen again replaces its own entry, any other replaces the one that was seen longest ago.

    Shape:
        image, text: [N, D]; ids: [N, K]; margin_text: [N, D'] or None; row n is slot n. Rows from `used` on are unset.
    """

    def __init__(self, size: int, embeddings: Embeddings, rows: Tensor) -> None:
        """A memory of `size` pairs, filled with at most as many. `rows` [n] are the numbers of these pairs."""
        self.size = size
        self._slots: OrderedDict[int, int] = OrderedDict()  # number of a pair to its slot, oldest first
        self._tensors = {name: value.new_zeros(size, *value.shape[1:]) for name, value in _vectors(embeddings).items()}
        self.add(embeddings, rows)

    @torch.no_grad()
    def add(self, embeddings: Embeddings, rows: Tensor) -> None:
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
        index = torch.tensor(slots, dtype=torch.long, device=embeddings.scale.device)
        for name, value in _vectors(embeddings).items():
            self._tensors[name][index] = value[kept]

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


def _vectors(embeddings: Embeddings) -> dict[str, Tensor]:
    assert embeddings.ids is not None
    found = {
        "image": embeddings.images["full"].vectors,
        "text": embeddings.texts["caption"].vectors,
        "ids": embeddings.ids,
    }
    return found if embeddings.margin_text is None else {**found, "margin_text": embeddings.margin_text}


def fill_memory(
    model: DualEncoder,
    pairs: PairData,
    rows: Sequence[int],
    encode: Callable[[Any, Any], tuple[Tensor, Tensor]],
) -> PairMemory:
    """A memory of these pairs, each with its chosen caption.

    Args:
        encode: images and captions into global vectors.
    """
    numbers = torch.tensor(rows)
    chosen, captions = pairs.chosen[numbers].tolist(), pairs.texts["caption"]  # rows of captions
    image, text = encode(pairs.images["full"].select(rows), [captions[row] for row in chosen])
    embeddings = Embeddings(
        {"full": ViewEmbeddings(image.to(model.dtype))},
        {"caption": ViewEmbeddings(text.to(model.dtype))},
        model.scale.detach(),
        ids=pairs.ids[numbers].to(model.device),
        margin_text=None if pairs.margin_text is None else pairs.margin_text[chosen].to(model.device),
    )
    return PairMemory(len(rows), embeddings, numbers)
