"""Ranks against an explicit count over pairs, with ties made on purpose."""

from __future__ import annotations

import doctest

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hnclip import tables
from hnclip.evaluate import ranks as ranks_module
from hnclip.evaluate import retrieval_ranks


def counted_ranks(image: Tensor, text: Tensor, owner: list[int]) -> tuple[list[int], list[int]]:
    """Both directions by looking at every pair, in fp64; scores below 1e-9 apart are the same."""
    scores = F.normalize(text.double(), dim=1) @ F.normalize(image.double(), dim=1).T  # [T, I]
    text_ranks = []
    for t, own in enumerate(owner):
        wrong = [scores[t, i] for i in range(len(image)) if i != own]
        text_ranks.append(1 + sum(bool(score >= scores[t, own] - 1e-9) for score in wrong))
    image_ranks = []
    for i in range(len(image)):
        best = max(scores[t, i] for t in range(len(text)) if owner[t] == i)
        wrong = [scores[t, i] for t in range(len(text)) if owner[t] != i]
        image_ranks.append(1 + sum(bool(score >= best - 1e-9) for score in wrong))
    return text_ranks, image_ranks


def random_vectors(count: int, width: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(count, width, generator=generator, dtype=torch.float64), dim=1).to(dtype)


@st.composite
def galleries(draw: st.DrawFn) -> tuple[Tensor, Tensor, list[int]]:
    """A few small integer vectors, repeated: scores are equal or clearly apart, and ties are frequent."""
    width = draw(st.integers(1, 3))
    entry = st.lists(st.integers(-2, 2), min_size=width, max_size=width).filter(any)
    images = draw(st.integers(1, 20))
    texts = images + draw(st.integers(0, 15))
    vectors = torch.tensor(draw(st.lists(entry, min_size=1, max_size=5)), dtype=torch.float32)  # [V, D]
    pick = st.integers(0, len(vectors) - 1)
    image = vectors[draw(st.lists(pick, min_size=images, max_size=images))]  # [I, D]
    text = vectors[draw(st.lists(pick, min_size=texts, max_size=texts))]  # [T, D]
    extra = draw(st.lists(st.integers(0, images - 1), min_size=texts - images, max_size=texts - images))
    owner = draw(st.permutations([*range(images), *extra]))
    return image, text, owner


@settings(max_examples=120, deadline=None)
@given(galleries(), st.sampled_from([None, 1, 3, 7, 64]), st.sampled_from([torch.float32, torch.float64]))
def test_equals_counting_pairs_with_ties(gallery, chunk, dtype):
    image, text, owner = gallery
    ranks = retrieval_ranks(image.to(dtype), text.to(dtype), torch.tensor(owner), chunk=chunk)
    text_ranks, image_ranks = counted_ranks(image, text, owner)
    assert ranks.text_to_image.tolist() == text_ranks
    assert ranks.image_to_text.tolist() == image_ranks
    assert ranks.owner.tolist() == owner


def test_without_ties_equals_the_place_in_a_descending_sort():
    image, text = random_vectors(61, 16, 0), random_vectors(61, 16, 1)
    ranks = retrieval_ranks(image, text, torch.arange(61), chunk=8)
    scores = text @ image.T  # [T, I]
    right = torch.arange(61)[:, None]
    assert torch.equal(ranks.text_to_image, (scores.argsort(1, descending=True) == right).nonzero()[:, 1] + 1)
    assert torch.equal(ranks.image_to_text, (scores.T.argsort(1, descending=True) == right).nonzero()[:, 1] + 1)


@pytest.mark.parametrize("chunk", [1, 3, 7, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_tiles_do_not_change_the_ranks(chunk, dtype):
    owner = torch.cat([torch.arange(41), torch.arange(26)])[
        torch.randperm(67, generator=torch.Generator().manual_seed(2))
    ]
    image, text = random_vectors(41, 24, 3, dtype), random_vectors(67, 24, 4, dtype)
    whole = retrieval_ranks(image, text, owner)
    tiled = retrieval_ranks(image, text, owner, chunk=chunk)
    assert torch.equal(tiled.text_to_image, whole.text_to_image)
    assert torch.equal(tiled.image_to_text, whole.image_to_text)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [33, 512, 4096])
@pytest.mark.parametrize("chunk", [1, 3, 7, 16, None])
def test_copies_of_the_right_answer_tie_wherever_they_stand(chunk, width, dtype):
    """Copies of every image, spread over all tile positions, in vectors wide enough for rounding errors."""
    base = random_vectors(7, width, 5, dtype) + 2 / width**0.5  # large mean: scores near one
    image = base.repeat(5, 1)  # [35, D]
    text = base + 0.1 * random_vectors(7, width, 6, dtype)  # [7, D]
    ranks = retrieval_ranks(image, text.repeat(5, 1), torch.arange(35), chunk=chunk)
    assert ranks.text_to_image.tolist() == [5] * 35
    assert ranks.image_to_text.tolist() == [5] * 35


@pytest.mark.parametrize(
    ("dtype", "gap", "rank"),
    [
        (torch.float32, 2e-7, 2),
        (torch.float32, 2e-5, 1),
        (torch.float64, 1e-13, 2),
        (torch.float64, 1e-11, 1),
    ],
)
def test_a_worse_image_ties_only_within_rounding(dtype, gap, rank):
    angle = torch.tensor(1.0, dtype=torch.float64)
    angles = torch.stack([angle, angle + gap / angle.sin()])  # [2] cosines with the caption `gap` apart
    image = torch.stack([angles.cos(), angles.sin()], dim=1).to(dtype)  # [2, 2]
    text = torch.tensor([[1.0, 0.0]], dtype=dtype).expand(2, 2)  # [2, 2]
    ranks = retrieval_ranks(image, text, torch.tensor([0, 1]))
    assert int(ranks.text_to_image[0]) == rank


@pytest.mark.parametrize("images", [1, 2, 9])
def test_identical_vectors_rank_last(images):
    """With C captions per image every image is a tie, and so is every caption of the other images."""
    vector = random_vectors(1, 7, 8)
    owner = torch.arange(images).repeat_interleave(3)  # [T]
    ranks = retrieval_ranks(vector.expand(images, 7), vector.expand(3 * images, 7), owner, chunk=4)
    assert ranks.text_to_image.tolist() == [images] * (3 * images)
    assert ranks.image_to_text.tolist() == [1 + 3 * (images - 1)] * images


def test_perfect_and_reversed_rankings():
    """On an arc, a caption at its image's place is first; opposite captions put the right image last."""
    angle = torch.linspace(0.1, 3.0, 20, dtype=torch.float64)  # [N]
    image = torch.stack([angle.cos(), angle.sin()], dim=1)  # [N, 2]
    right = torch.arange(20)
    perfect = retrieval_ranks(image, image, right, chunk=6)
    reversed_ = retrieval_ranks(image, -image, right, chunk=6)
    assert perfect.text_to_image.tolist() == perfect.image_to_text.tolist() == [1] * 20
    assert reversed_.text_to_image.tolist() == reversed_.image_to_text.tolist() == [20] * 20


def test_other_own_captions_are_not_counted():
    """Image 0 has five captions all better than the one of image 1: its rank is still one."""
    image = torch.eye(2)
    text = torch.tensor([[1.0, 0.1 * t] for t in range(5)] + [[1.0, 9.0]])
    ranks = retrieval_ranks(image, text, torch.tensor([0, 0, 0, 0, 0, 1]))
    assert ranks.image_to_text.tolist() == [1, 1]


def test_docstring_examples():
    for module in (ranks_module, tables):
        result = doctest.testmod(module)
        assert result.attempted > 0
        assert result.failed == 0


def test_bf16_vectors_are_multiplied_in_fp32():
    """The ranks are those of the bf16 vectors in fp64; a bf16 product would tie what they keep apart."""
    image, text = random_vectors(90, 8, 9, torch.bfloat16), random_vectors(90, 8, 10, torch.bfloat16)
    ranks = retrieval_ranks(image, text, torch.arange(90), chunk=64)
    text_ranks, image_ranks = counted_ranks(image, text, list(range(90)))
    assert ranks.text_to_image.tolist() == text_ranks
    assert ranks.image_to_text.tolist() == image_ranks
    scores = text @ image.T  # [T, I] bf16
    assert (scores >= scores.diagonal()[:, None]).sum(1).tolist() != text_ranks


def test_autocast_and_gradients_stay_outside():
    image = random_vectors(120, 8, 11).requires_grad_()
    text = random_vectors(120, 8, 12).requires_grad_()
    plain = retrieval_ranks(image, text, torch.arange(120))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = retrieval_ranks(image, text, torch.arange(120))
    assert torch.equal(cast.text_to_image, plain.text_to_image)
    assert torch.equal(cast.image_to_text, plain.image_to_text)
    assert plain.text_to_image.dtype == plain.image_to_text.dtype == torch.int64
    assert not plain.text_to_image.requires_grad


def test_length_of_a_vector_does_not_matter():
    image, text = random_vectors(30, 8, 13, torch.float64), random_vectors(30, 8, 14, torch.float64)
    lengths = torch.linspace(0.01, 50, 30, dtype=torch.float64)[:, None]
    unit = retrieval_ranks(image, text, torch.arange(30))
    scaled = retrieval_ranks(image * lengths, text * lengths.flip(0), torch.arange(30))
    assert torch.equal(scaled.text_to_image, unit.text_to_image)
    assert torch.equal(scaled.image_to_text, unit.image_to_text)


class LargestTensor(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor any operation made."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(made, Tensor):
                self.largest = max(self.largest, made.numel())
        return result


@pytest.mark.parametrize("chunk", [256, None])
def test_memory_is_bounded_by_the_tile(chunk, monkeypatch):
    monkeypatch.setattr(ranks_module, "TILE", 512)
    image, text = random_vectors(3000, 4, 15), random_vectors(3000, 4, 16)
    with LargestTensor() as seen:
        retrieval_ranks(image, text, torch.arange(3000), chunk=chunk)
    assert seen.largest == (chunk or 512) ** 2


IMAGE, TEXT, OWNER = random_vectors(3, 4, 17), random_vectors(4, 4, 18), torch.tensor([0, 1, 2, 2])


def spoiled(vectors: Tensor, value: float) -> Tensor:
    vectors = vectors.clone()
    vectors[1, 2] = value
    return vectors


@pytest.mark.parametrize(
    ("argument", "changed"),
    [
        ("image", {"image": IMAGE[0]}),
        ("image", {"image": IMAGE[:0]}),
        ("image", {"image": IMAGE.long()}),
        ("image", {"image": spoiled(IMAGE, float("nan"))}),
        ("image", {"image": IMAGE * torch.tensor([[1.0], [0.0], [1.0]])}),
        ("text", {"text": TEXT[None]}),
        ("text", {"text": TEXT[:0], "text_to_image": OWNER[:0]}),
        ("text", {"text": TEXT[:, :3]}),
        ("text", {"text": spoiled(TEXT, float("inf"))}),
        ("text_to_image", {"text_to_image": OWNER[:3]}),
        ("text_to_image", {"text_to_image": OWNER[:, None]}),
        ("text_to_image", {"text_to_image": OWNER.float()}),
        ("text_to_image", {"text_to_image": torch.tensor([0, 1, 2, 3])}),
        ("text_to_image", {"text_to_image": torch.tensor([0, 1, 2, -1])}),
        ("text_to_image", {"text_to_image": torch.tensor([0, 2, 2, 2])}),
        ("chunk", {"chunk": 0}),
    ],
)
def test_errors_name_the_argument(argument, changed):
    valid = {"image": IMAGE, "text": TEXT, "text_to_image": OWNER}
    retrieval_ranks(**valid)
    with pytest.raises(ValueError, match=rf"^{argument} "):
        retrieval_ranks(**{**valid, **changed})
