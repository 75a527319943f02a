"""How the processes of a job hold the model: alone, a whole copy each (ddp), or a part each (fsdp).

The three have one interface, which a step and the loop use without asking which it is.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hnclip.core import Embeddings, ViewEmbeddings
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.parameters import encoder_layers, trained_tensors
from hnclip.train.distributed import copy_from_first, gather_embeddings, is_distributed, rank, world_size
from hnclip.train.gradients import GradientMean


class Alone:
    """One process; also what the other two have in common."""

    def __init__(self, model: DualEncoder) -> None:
        self.model = model

    def gather(self, embeddings: Embeddings) -> Embeddings:
        """What the objective sees of all processes."""
        return gather_embeddings(embeddings)

    def sync(self, last: bool) -> AbstractContextManager[Any]:
        """The context of each chunk that goes backward."""
        return nullcontext()

    def finish(self) -> None:
        """After the last of them: the gradients are now those of the whole job."""

    def clip(self, limit: float) -> Tensor:
        """The norm of all gradients, which are made smaller if it is above `limit`."""
        return nn.utils.clip_grad_norm_(self.model.parameters(), limit)

    @contextmanager
    def encoding(self) -> Iterator[None]:
        """The context in which `encode_images` and `encode_texts` are called from outside, to evaluate."""
        yield

    def whole(self) -> DualEncoder | None:
        """The model as one process would have it, in the process that writes files; None in the others. All of them
        must ask."""
        return self.model if rank() == 0 else None


class Replicated(Alone):
    """Every process has the whole model and its optimiser state; gradients are averaged (`GradientMean`).

    Communication per step and process: about twice the trained parameters' bytes.
    """

    def __init__(self, model: DualEncoder) -> None:
        super().__init__(model)
        copy_from_first(model)
        self._gradients = GradientMean(model.parameters())

    def sync(self, last: bool) -> AbstractContextManager[Any]:
        return self._gradients.exchange(last)

    def finish(self) -> None:
        self._gradients.finish()


class Sharded(Alone):
    """FSDP2: weights and optimiser state are cut along their first dimension, a part for each process. A block's
    weights are whole only while it computes.

    Gradients are reduced once per step, so with several chunks they are whole in every process until the last one.
    Numbers without a dimension, the temperature, cannot be cut: they stay whole and are averaged.

    Communication per step and process: the parameters' bytes three times for every chunk of gradient caching (without:
    twice), and once for the gradients.
    """

    def __init__(self, model: DualEncoder) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        super().__init__(model)
        copy_from_first(model)
        device = model.device
        self._twin = deepcopy(model.cpu()) if rank() == 0 else None  # in the host's memory, to be written to disk
        model.to(device)
        _register_embeddings()
        mesh = init_device_mesh(device.type, (world_size(),))
        scalars = {parameter for parameter in model.parameters() if parameter.ndim == 0}
        for tower in (model.backbone.vision_model, model.backbone.text_model):
            for block in encoder_layers(tower):
                fully_shard(block, mesh=mesh)
        self._sharded: Any = fully_shard(model, mesh=mesh, ignored_params=scalars)
        # The temperature comes out of the model as a view; nobody changes it in place.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)
        self._scalars = GradientMean(scalars)

    @contextmanager
    def sync(self, last: bool) -> Iterator[None]:
        self._sharded.set_requires_gradient_sync(last)
        with self._scalars.exchange(last):
            yield

    def finish(self) -> None:
        self._scalars.finish()

    @torch.no_grad()
    def clip(self, limit: float) -> Tensor:
        whole: list[Tensor] = []
        parts: list[Tensor] = []
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                (parts if is_sharded(parameter.grad) else whole).append(local_part(parameter.grad))
        squares = _square_sum(parts, self.model.device)
        dist.all_reduce(squares)
        norm = (squares + _square_sum(whole, self.model.device)).sqrt()
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)  # as torch's clip_grad_norm_
        for grad in (*parts, *whole):
            grad.mul_(factor.to(grad.dtype))
        return norm

    @contextmanager
    def encoding(self) -> Iterator[None]:
        from torch.distributed.fsdp import register_fsdp_forward_method

        methods = ("encode_images", "encode_texts")
        for method in methods:  # only for now: inside `forward` they are no calls of their own
            register_fsdp_forward_method(self.model, method)
        try:
            yield
        finally:
            for method in methods:
                delattr(self.model, method)
            self._sharded.reshard()  # no backward pass comes to do it

    @torch.no_grad()
    def whole(self) -> DualEncoder | None:
        copies = {} if self._twin is None else self._twin.state_dict()
        for name, tensor in trained_tensors(self.model).items():
            full = whole_tensor(tensor)
            if copies:
                copies[name].copy_(full)
        return self._twin


def hold(model: DualEncoder, mode: Literal["ddp", "fsdp"]) -> Alone:
    """The model in this process's hands; `mode` matters only if there are several."""
    if not is_distributed():
        return Alone(model)
    return Replicated(model) if mode == "ddp" else Sharded(model)


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is only a part here. A process that is alone does not even import the class."""
    if not is_distributed():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def whole_tensor(tensor: Any) -> Tensor:
    """All rows of a tensor, which all processes must ask for."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def local_part(tensor: Any) -> Tensor:
    """The rows of a tensor that this process holds, sharing its memory."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def local_rows(tensor: Tensor) -> slice:
    """Which rows of the whole tensor those are: FSDP deals rounded-up shares until none are left."""
    size = -(-len(tensor) // world_size())
    start = min(rank() * size, len(tensor))
    return slice(start, min(start + size, len(tensor)))


def _square_sum(grads: list[Tensor], device: torch.device) -> Tensor:
    if not grads:
        return torch.zeros((), device=device)
    return torch.stack([torch.linalg.vector_norm(grad) for grad in grads]).square().sum()


def _register_embeddings() -> None:
    """Let FSDP see the vectors and tokens in what the model returns: on their way back its hooks run. Without this a
    model of which only a projection trains, and no block, would never be told that the backward pass is over. Newer
    versions of torch (2.13) look into dataclasses by themselves."""
    from torch.utils import _pytree as pytree

    for kind, seen in ((ViewEmbeddings, ("vectors", "tokens")), (Embeddings, ("images", "texts"))):
        if kind not in pytree.SUPPORTED_NODES:
            pytree.register_pytree_node(kind, partial(_take_apart, seen), partial(_put_together, seen))


def _take_apart(seen: tuple[str, ...], value: Any) -> tuple[list[Any], Any]:
    return [getattr(value, name) for name in seen], value


def _put_together(seen: tuple[str, ...], values: Iterable[Any], value: Any) -> Any:
    return replace(value, **dict(zip(seen, values)))
