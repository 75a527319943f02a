"""The mean of gradients over processes, once per optimiser step, while the last backward pass still goes on.

Why not `torch.nn.parallel.DistributedDataParallel`: it takes a parameter for done when its gradient arrives in the one
backward pass that is synchronised. Gradient caching sends the scale's gradient in the first chunk only, objectives may
ignore an output, and a tower may be frozen; its reducer then waits for gradients that never come, or needs a search
through the graph in every forward pass and gradients of zero pushed into outputs that have none. Here a bucket leaves
as soon as it is full, and whatever is left over leaves at the end of the step, so nothing is ever waited for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hnclip.train.distributed import is_distributed, world_size

BUCKET = 25 << 20  # bytes sent together: large enough for the bandwidth, small enough to begin early


class GradientMean:
    """Replaces every gradient by its mean over all processes; alone, does nothing.

    Around every chunk that goes backward stands `exchange(last)`, behind the last one `finish()`. A gradient that only
    some processes have counts as zero in the others; one that nobody has stays None.

    Memory: one flat copy of the gradients, of which they are views afterwards.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], *, bucket: int = BUCKET) -> None:
        trained = [parameter for parameter in parameters if parameter.requires_grad] if is_distributed() else []
        self._buckets = _fill(trained, bucket)
        self._bucket_of = {parameter: number for number, part in enumerate(self._buckets) for parameter in part}
        self._begin()

    def _begin(self) -> None:
        self._waiting = [set(part) for part in self._buckets]  # parameters whose gradient is still to come
        self._sent: list[tuple[Tensor, dist.Work]] = []

    @contextmanager
    def exchange(self, last: bool) -> Iterator[None]:
        """The context of a chunk's backward pass; in the last one of a step, full buckets leave at once."""
        if not last:
            yield
            return
        handles = [parameter.register_post_accumulate_grad_hook(self._arrived) for parameter in self._bucket_of]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _arrived(self, parameter: nn.Parameter) -> None:
        number = self._bucket_of[parameter]
        if number < len(self._sent):
            raise RuntimeError("a gradient arrived twice in one backward pass, the second time after it was sent")
        self._waiting[number].discard(parameter)
        # In the order of the buckets, whatever the order of the gradients: all processes must send alike.
        while len(self._sent) < len(self._buckets) and not self._waiting[len(self._sent)]:
            self._send()

    @torch.no_grad()
    def _send(self) -> None:
        part = self._buckets[len(self._sent)]
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in part])
        self._sent.append((flat, dist.all_reduce(flat, async_op=True)))

    @torch.no_grad()
    def finish(self) -> None:
        """Send what is left, wait, and put the means in place."""
        if not self._buckets:
            return
        while len(self._sent) < len(self._buckets):
            self._send()
        present = torch.tensor([p.grad is not None for part in self._buckets for p in part], dtype=torch.uint8)
        dist.all_reduce(present, dist.ReduceOp.MAX)  # between hosts: no accelerator waits
        somewhere = iter(present.tolist())
        for part, (flat, work) in zip(self._buckets, self._sent):
            work.wait()
            flat /= world_size()
            for parameter, mean in zip(part, flat.split([parameter.numel() for parameter in part])):
                if next(somewhere):
                    parameter.grad = mean.view_as(parameter)
        self._begin()


def _fill(parameters: list[nn.Parameter], size: int) -> list[list[nn.Parameter]]:
    """Buckets of about `size` bytes of one dtype, the last parameters first: backward reaches them first."""
    buckets: list[list[nn.Parameter]] = []
    room: dict[torch.dtype, tuple[list[nn.Parameter], int]] = {}
    for parameter in reversed(parameters):
        part, left = room.get(parameter.dtype, ([], 0))
        if left <= 0:
            part, left = [], size
            buckets.append(part)
        part.append(parameter)
        room[parameter.dtype] = part, left - parameter.numel() * parameter.element_size()
    return buckets
