"""The distributions of caption similarities: exact ones against all pairs, sampled ones within their stated error."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hnclip.analysis import geometry as geometry_module
from hnclip.analysis.caption_pairs import caption_pairs, caption_similarity
from hnclip.analysis.geometry import CaptionGeometry, caption_geometry
from hnclip.analysis.histogram import sampling_error


def captions(count: int, width: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Vectors with something in common, and owners in no order, some with several captions."""
    generator = torch.Generator().manual_seed(seed)
    text = F.normalize(torch.randn(count, width, generator=generator) + 0.7, dim=1)
    return text, torch.randint(1 + count * 2 // 3, (count,), generator=generator)


def pair_values(text: Tensor, owner: Tensor) -> np.ndarray:
    """Similarities of all pairs of different pictures, each once."""
    matrix = (text.double() @ text.double().T).triu(1)
    return matrix[(owner[:, None] != owner).triu(1)].numpy()


@pytest.mark.parametrize("count", [2, 3, 57])
@pytest.mark.parametrize("chunk", [1, 10, 200])
def test_exact_distributions(count: int, chunk: int) -> None:
    text, owner = captions(count)
    owner[:2] = torch.tensor([900, 901])
    found = caption_geometry(text, owner, chunk=chunk)
    values = pair_values(text, owner)
    matrix = (text @ text.T).masked_fill(owner[:, None] == owner, -torch.inf)
    hardest, nearest = matrix.max(1)
    assert (found.captions, found.pictures) == (count, len(owner.unique()))
    assert (found.pairwise.total, found.pairwise.error, found.hardest.error) == (len(values), 0, 0)
    assert found.pairwise.mean == pytest.approx(values.mean(), abs=1e-6)
    assert found.hardest.total == count
    assert found.hardest.mean == pytest.approx(hardest.mean().item(), abs=1e-6)
    assert found.rows.tolist() == list(range(count))
    assert found.nearest.tolist() == nearest.tolist()
    torch.testing.assert_close(found.similarity, hardest)
    for share in (0.01, 0.25, 0.5, 0.9, 1):
        for histogram, all_values in ((found.pairwise, values), (found.hardest, hardest.double().numpy())):
            expected = np.quantile(all_values, share, method="inverted_cdf")
            assert histogram.quantile(share) == pytest.approx(expected, abs=1.1e-4)


def test_its_means_are_caption_similarity() -> None:
    text, owner = captions(40)
    found = caption_geometry(text, owner)
    assert (found.pairwise.mean, found.hardest.mean) == caption_similarity(text, owner)


def test_a_sample_is_within_its_error_and_the_mean_is_of_all() -> None:
    text, owner = captions(300)
    values = pair_values(text, owner)
    found = caption_geometry(text, owner, exact_up_to=299, samples=5_001, chunk=50)
    assert found.pairwise.total == 5_001
    assert found.pairwise.error == sampling_error(5_001)
    assert found.pairwise.mean == pytest.approx(values.mean(), abs=1e-6)
    for edge in np.arange(-0.9, 1, 0.05):
        assert found.pairwise.share_above(edge) == pytest.approx((values >= edge).mean(), abs=found.pairwise.error)
    exact = caption_geometry(text, owner, exact_up_to=300)
    assert (exact.pairwise.total, exact.pairwise.error) == (len(values), 0)
    assert torch.equal(found.nearest, exact.nearest)
    assert found.hardest.error == 0


def test_pairs_are_drawn_alike_though_one_picture_has_nearly_all_captions() -> None:
    owner = torch.tensor([4, 4, 4, 1, 4, 4, 7, 4, 7])
    pairs = caption_pairs(torch.eye(9), owner)
    generator = torch.Generator().manual_seed(0)
    drawn: Counter[tuple[int, int]] = Counter()
    for left, right in geometry_module._random_pairs(pairs, 20_000, 999, generator, iter):
        drawn.update(zip(left.tolist(), right.tolist()))
    ordered = {(i, j) for i in range(9) for j in range(9) if owner[i] != owner[j]}
    assert set(drawn) == ordered
    assert drawn.total() == 20_000
    expected = 20_000 / len(ordered)
    chi_square = sum((count - expected) ** 2 / expected for count in drawn.values())
    assert chi_square < 70  # 39 degrees of freedom: 62 is exceeded once in a hundred


def test_too_many_pairs_to_search_leave_a_sample_of_captions() -> None:
    text, owner = captions(300)
    exact = caption_geometry(text, owner)
    found = caption_geometry(text, owner, exact_up_to=0, samples=10, search_up_to=40 * 300, chunk=64)
    assert len(found.rows) == len(found.similarity) == len(found.nearest) == found.hardest.total == 40
    assert found.hardest.error == sampling_error(40)
    assert found.captions == 300
    torch.testing.assert_close(found.similarity, exact.similarity[found.rows])
    assert torch.equal(found.nearest, exact.nearest[found.rows])
    assert found.hardest.mean == pytest.approx(found.similarity.double().mean().item(), abs=1e-9)
    assert len(set(found.rows.tolist())) > 20
    # Whoever pays for all pairs gets all companions with them.
    assert len(caption_geometry(text, owner, search_up_to=1).rows) == 300


def test_the_limit_counts_pairs() -> None:
    text, owner = captions(30)
    count = len(pair_values(text, owner))
    assert len(caption_geometry(text, owner, exact_up_to=0, samples=1, search_up_to=count).rows) == 30
    assert len(caption_geometry(text, owner, exact_up_to=0, samples=1, search_up_to=count - 1).rows) < 30
    assert len(caption_geometry(text, owner, exact_up_to=0, samples=1, search_up_to=1).rows) == 1


def test_the_seed_decides_the_draws() -> None:
    text, owner = captions(50)

    def drawn(seed: int) -> CaptionGeometry:
        return caption_geometry(text, owner, exact_up_to=0, samples=500, search_up_to=500, seed=seed)

    assert np.array_equal(drawn(3).pairwise.counts, drawn(3).pairwise.counts)
    assert torch.equal(drawn(3).rows, drawn(3).rows)
    assert not np.array_equal(drawn(3).pairwise.counts, drawn(4).pairwise.counts)
    assert not torch.equal(drawn(3).rows, drawn(4).rows)


def test_equal_captions_are_all_alike() -> None:
    text = F.normalize(torch.ones(7, 48), dim=1)
    found = caption_geometry(text, torch.arange(7))
    for histogram in (found.pairwise, found.hardest):
        assert histogram.mean == pytest.approx(1, abs=1e-6)
        assert histogram.quantile(0.01) > 0.9998
    assert all(near != row for row, near in enumerate(found.nearest.tolist()))


def test_it_is_ready_for_json_without_lists_of_captions() -> None:
    text, owner = captions(400)
    found = json.loads(json.dumps(caption_geometry(text, owner).to_dict(), allow_nan=False))
    assert list(found) == ["captions", "pictures", "pairwise", "hardest"]
    assert found["hardest"]["count"] == 400
    assert len(json.dumps(found)) < 4000


def test_progress_walks_through_all_of_the_work() -> None:
    walked: list[range] = []

    def progress(steps: range) -> Iterator[int]:
        walked.append(steps)
        yield from steps

    text, owner = captions(40)
    caption_geometry(text, owner, chunk=10, progress=progress)
    assert [len(steps) for steps in walked] == [10]
    caption_geometry(text, owner, exact_up_to=0, samples=101, search_up_to=30 * 40, chunk=10, progress=progress)
    assert [len(steps) for steps in walked[1:]] == [10, 7]  # 780 pairs are searched; 16 draws of 6 numbers at a time


def test_bad_input_is_named() -> None:
    text, owner = captions(10)
    with pytest.raises(ValueError, match="1 captions of 1"):
        caption_geometry(text[:1], owner[:1])
    with pytest.raises(ValueError, match="samples"):
        caption_geometry(text, owner, samples=0)
    text[4] = torch.nan
    with pytest.raises(ValueError, match="NaN or infinity for 1 of 10 captions"):
        caption_geometry(text, owner)
