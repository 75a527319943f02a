"""Sentences of a caption to parts of the picture, by a model's own similarity.

Reference:
    GOAL's local image–sentence matching (LISM): every sentence goes to the most similar of all candidates, the whole
    picture and its crops; sentences that the whole picture fits best say nothing of a part and are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor

from hnclip.core import Region
from hnclip.data.images import ImageTransform, preprocess_image
from hnclip.data.texts import TextTransform
from hnclip.evaluate.retrieval import encode_captions, encode_pixels
from hnclip.models.dual_encoder import DualEncoder
from hnclip.prepare.proposal import Proposal


@dataclass(frozen=True)
class Candidates:
    """What sentences may describe: the whole picture, and P proposed parts of it.

    Shape:
        pixels: [1 + P, 3, S, S] uint8, the whole picture first
    """

    proposals: tuple[Proposal, ...]
    pixels: Tensor


@dataclass(frozen=True)
class Matched:
    """The regions that sentences were matched to, best first, and who proposed each."""

    regions: tuple[Region, ...]
    sources: tuple[str, ...]


def crop_candidates(image: Image.Image, proposals: Sequence[Proposal], transform: ImageTransform) -> Candidates:
    """Crops with all that is in their boxes, background too, as a model sees them. Boxes too thin for that are left
    out.

    Args:
        image: upright; it is not decoded again for its crops.
    """
    kept, pixels = [], [preprocess_image(image, transform)]
    for proposal in proposals:
        try:
            pixels.append(preprocess_image(image.crop(proposal.box), transform))
        except ValueError:
            continue
        kept.append(proposal)
    return Candidates(tuple(kept), torch.stack(pixels))


def readable_sentences(sentences: Sequence[str], text_transform: TextTransform) -> list[str]:
    """Those in which the model finds a word, each once."""
    sentences = list(dict.fromkeys(sentences))
    try:
        text_transform(sentences)
    except ValueError:
        return [sentence for sentence in sentences if _is_readable(sentence, text_transform)]
    return sentences


def _is_readable(sentence: str, text_transform: TextTransform) -> bool:
    try:
        text_transform([sentence])
    except ValueError:
        return False
    return True


def match_sentences(
    model: DualEncoder, candidates: Sequence[Candidates], sentences: Sequence[Sequence[str]], *, batch: int = 128
) -> list[Matched]:
    """The regions of several pictures, whose crops and sentences are encoded together.

    Sentences longer than the model's context are cut by its tokenizer. Several sentences may have the same region.

    Args:
        sentences: of each picture, readable ones.
        batch: crops or sentences encoded at once.
    """
    tokenized = model.text_transform([sentence for own in sentences for sentence in own])
    if not tokenized.ids:
        return [Matched((), ()) for _ in candidates]
    with torch.inference_mode():
        image = encode_pixels(model, torch.cat([own.pixels for own in candidates]), batch=batch)  # [ΣC, D]
        text = encode_captions(model, tokenized.ids, batch=batch)  # [ΣS, D]
        scale = model.scale.float().cpu()
        images = image.split([len(own.pixels) for own in candidates])
        texts = text.split([len(own) for own in sentences])
        return [
            _matched(own.proposals, said, scale * (vectors @ crops.T))
            for own, said, crops, vectors in zip(candidates, sentences, images, texts)
        ]


def _matched(proposals: Sequence[Proposal], sentences: Sequence[str], scores: Tensor) -> Matched:
    """
    Shape:
        scores: [S, 1 + P], of each sentence with the whole picture and with every proposal
    """
    best, which = scores.max(dim=1)  # [S]; of equal ones the first, and that may be the whole picture
    found = [
        (Region(proposals[index - 1].box, sentence, score), proposals[index - 1].source)
        for sentence, score, index in zip(sentences, best.tolist(), which.tolist())
        if index > 0
    ]
    found.sort(key=lambda match: match[0].score or 0.0, reverse=True)
    return Matched(tuple(region for region, _ in found), tuple(source for _, source in found))
