"""Embeddings of all views with gradients, and the terms of every method written as their definitions read."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from hnclip.core import Embeddings, ViewEmbeddings
from hnclip.objectives.registry import METHODS
from loss_twins import negatives_of, twin_smoothed

D = 6
# Pairs that lack a view, for batches of seven.
ABSENT = {
    "crop": [2, 4],
    "sentence": [2, 3],
    "edge": [2, 4],
    "filtered": [1],
    "edge_crop_1": [2, 5],
    "edge_crop_2": [0, 2, 5],
}
TOKEN_VIEWS = {
    "hn_clip": {"full": 4, "caption": 5},
    "long_clip": {},
    "finelip": {"full": 5, "caption": 5},
    "goal": {"full": 1, "caption": 1},
    "smartclip": {"caption": 1},
    "structxlip": {"filtered": 3, "caption": 3},
}
SIZE = dict.fromkeys(METHODS, 7) | {"long_clip": 40}  # PCA_32 leaves something out only of more than 33 pairs


def make_embeddings(
    method: str, *, missing: bool = True, dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[Embeddings, dict[str, Tensor]]:
    """Embeddings with every view of a method, and their leaves by name; vectors of a pair resemble each other."""
    n = SIZE[method]
    generator = torch.Generator().manual_seed(seed)
    topic = torch.randn(n, 48 if n > 7 else D, generator=generator, dtype=torch.float64)
    leaves = {"scale": torch.tensor(6.0, dtype=dtype).requires_grad_()}

    def vectors(name: str, count: int | None = None) -> Tensor:
        mean = topic if count is None else topic[:, None].expand(n, count, -1)
        noisy = mean + torch.randn(mean.shape, generator=generator, dtype=torch.float64)
        leaves[name] = F.normalize(noisy, dim=-1).to(dtype).requires_grad_()
        return leaves[name]

    def view(name: str) -> ViewEmbeddings:
        present = torch.ones(n, dtype=torch.bool)
        present[ABSENT.get(name, [])] = False
        found = ViewEmbeddings(vectors(name), present=present if missing and name in ABSENT and n == 7 else None)
        if name in ("short", "sentence", "filtered"):
            ids = torch.arange(n)
            ids[6] = ids[5]  # a text twice
            found = replace(found, ids=ids)
        if (count := TOKEN_VIEWS[method].get(name)) is None:
            return found
        mask = torch.ones(n, count, dtype=torch.bool)
        if missing and method != "smartclip":
            mask = torch.rand(n, count, generator=generator) < 0.7
            mask[:, 0] |= torch.tensor([method not in ("goal", "structxlip") or i % 3 != 1 for i in range(n)])
        if method == "smartclip":
            leaves["masks"] = (torch.rand(n, 1, D, generator=generator) < 0.6).to(dtype).requires_grad_()
            return replace(found, tokens=leaves["masks"], mask=mask)
        return replace(found, tokens=vectors(f"{name} tokens", count), mask=mask)

    ids = torch.arange(n)[:, None].repeat(1, 2)
    ids[1, 0], ids[2, 1] = ids[0, 0], ids[1, 1]  # an image twice, a caption twice
    images = {name: view(name) for name in ("full", "crop", "edge", "edge_crop_1", "edge_crop_2", "edge_crop_3")}
    texts = {name: view(name) for name in ("caption", "short", "sentence", "filtered")}
    return Embeddings(images, texts, leaves["scale"], ids), leaves


def gradients(value: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """By leaf; zeros where the value does not depend on it."""
    found = torch.autograd.grad(value, list(leaves.values()), allow_unused=True, retain_graph=True)
    return {k: torch.zeros_like(leaf) if g is None else g for (k, leaf), g in zip(leaves.items(), found)}


def has(view: ViewEmbeddings, row: int) -> bool:
    return view.present is None or bool(view.present[row])


def twin_sym_ce(image, text, scale, ids, rows, smoothing=0.0):
    """½[CE(rows) + CE(columns)] of s·V·Tᵀ among some pairs, entry by entry, without duplicates."""
    rows = list(rows)
    return twin_smoothed(image[rows], text[rows], scale, smoothing, ids[rows])


def _ids(e: Embeddings, view: str, official: bool) -> Tensor:
    """Corrected methods also take equal texts of a view as duplicates."""
    return e.ids if official else torch.cat([e.ids, e.texts[view].ids[:, None]], 1)


def twin_terms(method: str, e: Embeddings, official: bool) -> dict[str, Tensor]:
    """All terms without weights, InfoNCE as the global loss."""
    every, full, caption = range(len(e.ids)), e.images["full"], e.texts["caption"]
    text = caption.tokens[:, 0] * caption.vectors if method == "smartclip" else caption.vectors
    terms = {"global": twin_sym_ce(full.vectors, text, e.scale, e.ids, every)}
    return terms | {name: term(e, official) for name, term in TWINS[method].items()}


def _best(query: Tensor, keys: Tensor, slope: float = 1.0) -> Tensor:
    return F.leaky_relu(torch.stack([(query * key).sum() for key in keys]).max(), slope)


def _mean_best(queries: Tensor, keys: Tensor, slope: float = 1.0) -> Tensor:
    return sum(_best(query, keys, slope) for query in queries) / len(queries)


def twin_token(e: Embeddings, _: bool) -> Tensor:
    image, text, n = e.images["full"], e.texts["caption"], len(e.ids)
    total = e.scale * 0
    for i in range(n):
        kept = [i, *negatives_of(i, n, e.ids)]
        for own, others in ((image, text), (text, image)):
            scores = [
                (e.scale * _mean_best(own.tokens[i][own.mask[i]], others.tokens[j][others.mask[j]])).exp() for j in kept
            ]
            total = total - torch.log(scores[0] / sum(scores))
    return total / (2 * n)


def twin_short(e: Embeddings, official: bool) -> Tensor:
    """PCA by the eigenvectors of the covariance, and label smoothing written out."""
    image = e.images["full"].vectors
    centred = image - image.mean(0)
    kept = torch.linalg.eigh(centred.T @ centred).eigenvectors[:, -32:]
    coarse = centred @ kept @ kept.T + image.mean(0)
    ids = _ids(e, "short", official)
    return twin_sym_ce(coarse, e.texts["short"].vectors, e.scale, ids, range(len(image)), smoothing=0.1)


def twin_fine(e: Embeddings, _: bool) -> Tensor:
    image, text, n = e.images["full"], e.texts["caption"], len(e.ids)

    def score(i: int, j: int) -> Tensor:
        a, b = image.tokens[i][image.mask[i]], text.tokens[j][text.mask[j]]
        return _mean_best(a, b, 0.1) + _mean_best(b, a, 0.1)

    total = e.scale * 0
    for i in range(n):
        for j in negatives_of(i, n, e.ids):
            total = total + (0.2 + score(i, j) - score(i, i)).relu() + (0.2 + score(j, i) - score(i, i)).relu()
    return total


def twin_local(e: Embeddings, official: bool) -> Tensor:
    crop, sentence = e.images["crop"], e.texts["sentence"]
    rows = [i for i in range(len(e.ids)) if has(crop, i) and has(sentence, i)]
    return twin_sym_ce(crop.vectors, sentence.vectors, e.scale, _ids(e, "sentence", official), rows)


def _twin_gap(whole: ViewEmbeddings, part: ViewEmbeddings) -> Tensor:
    rows = [i for i in range(len(part.vectors)) if has(part, i) and whole.mask[i, 0]]
    return sum(((whole.tokens[i, 0] * part.vectors[i]).sum() - 1) ** 2 for i in rows) / len(rows)


def twin_structure(e: Embeddings, official: bool) -> Tensor:
    edge, filtered = e.images["edge"], e.texts["filtered"]
    rows = [i for i in range(len(e.ids)) if has(edge, i) and has(filtered, i)]
    return twin_sym_ce(edge.vectors, filtered.vectors, e.scale.detach(), _ids(e, "filtered", official), rows)


def twin_consistency(e: Embeddings, _: bool) -> Tensor:
    full, edge = e.images["full"].vectors, e.images["edge"]
    rows = [i for i in range(len(full)) if has(edge, i)]
    return sum(1 - (full[i] * edge.vectors[i]).sum() for i in rows) / len(rows)


def twin_chunks(e: Embeddings, official: bool) -> Tensor:
    """Every chunk against every crop that is there."""
    text, n = e.texts["caption" if official else "filtered"], len(e.ids)
    crops = [e.images["edge_crop_1"], e.images["edge_crop_2"]]
    scale = torch.minimum(e.scale / 0.07, e.scale.new_tensor(100.0)) if official else e.scale.detach()
    ids, samples = _ids(e, "filtered", official), []
    for i in range(n):
        chunks = []
        for chunk in text.tokens[i][text.mask[i]]:
            logits = {
                (j, k): (scale * (chunk * crop.vectors[j]).sum()).exp()
                for j in (i, *negatives_of(i, n, ids))
                for k, crop in enumerate(crops)
                if has(crop, j)
            }
            own = [logit for (j, _), logit in logits.items() if j == i]
            if own:
                chunks.append(torch.log(sum(logits.values())) - torch.log(sum(own)))
        if chunks:
            samples.append(sum(chunks) / len(chunks))
    return sum(samples) / len(samples)


TWINS = {
    "hn_clip": {"token": twin_token},
    "long_clip": {"short": twin_short},
    "finelip": {"fine": twin_fine},
    "goal": {
        "local": twin_local,
        "patch": lambda e, _: _twin_gap(e.images["full"], e.images["crop"]),
        "text": lambda e, _: _twin_gap(e.texts["caption"], e.texts["sentence"]),
    },
    "smartclip": {
        "sparsity": lambda e, _: sum(e.texts["caption"].tokens.flatten()) / e.texts["caption"].tokens.numel()
    },
    "structxlip": {"structure": twin_structure, "consistency": twin_consistency, "chunks": twin_chunks},
}
