"""One pass over all caption pairs, against a plain loop over them."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hnclip.analysis.captions import (
    BINS,
    Histogram,
    caption_geometry,
    caption_similarity,
    count_values,
    mean_similarity,
)


def vectors(count: int, seed: int = 0, width: int = 8) -> Tensor:
    return F.normalize(torch.randn(count, width, generator=torch.Generator().manual_seed(seed)), dim=1)


@pytest.mark.parametrize("tile", [1, 7, 100])
@pytest.mark.parametrize("owner", [[*range(40)], [row // 3 for row in range(40)], [row % 5 for row in range(40)]])
def test_all_numbers_are_those_of_a_loop(tile: int, owner: list[int]) -> None:
    text, names = vectors(40), torch.tensor([row // 2 for row in range(40)])
    pairs = {
        (a, b): float(text[a].double() @ text[b].double())
        for a, b in combinations(range(40), 2)
        if owner[a] != owner[b]
    }
    found = caption_geometry(text, torch.tensor(owner), ids=names[:, None], threshold=0.5, keep=5, tile=tile)
    assert (found.total, found.images) == (40, len(set(owner)))
    assert found.pairwise.total == len(pairs)
    assert found.pairwise.mean == pytest.approx(sum(pairs.values()) / len(pairs), abs=1e-7)
    assert (found.pairwise.counts == count_values(torch.tensor(list(pairs.values()))).numpy()).mean() > 0.999
    assert found.rows.tolist() == list(range(40))
    for row in range(40):
        own = {sum(pair) - row: cosine for pair, cosine in pairs.items() if row in pair}
        assert found.similarity[row] == pytest.approx(max(own.values()), abs=1e-6)
        assert own[int(found.nearest[row])] == pytest.approx(max(own.values()), abs=1e-6)
    assert found.hardest.mean == pytest.approx(found.similarity.double().mean().item())
    suspects = {pair: cosine for pair, cosine in pairs.items() if cosine >= 0.5 and names[pair[0]] != names[pair[1]]}
    assert found.suspected == len(suspects)
    expected = sorted(suspects.items(), key=lambda item: -item[1])[:5]
    assert [suspect[:2] for suspect in found.suspects] == [pair for pair, _ in expected]
    assert [suspect.similarity for suspect in found.suspects] == pytest.approx([c for _, c in expected], abs=1e-6)
    both = caption_similarity(text, torch.tensor(owner))
    assert both == pytest.approx({"pairwise": found.pairwise.mean, "hardest": found.hardest.mean}, abs=1e-7)
    assert mean_similarity(text, torch.tensor(owner)) == found.pairwise.mean


@given(st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=50), st.floats(0, 1))
def test_quantiles_and_shares_are_right_to_a_bin(values: list[float], share: float) -> None:
    found = Histogram(count_values(torch.tensor(values, dtype=torch.float64)).numpy(), sum(values) / len(values))
    width, value = 2 / BINS, found.quantile(share)
    assert sum(other < value - width for other in values) <= share * len(values) + 1e-6
    assert sum(other > value + width for other in values) <= (1 - share) * len(values) + 1e-6
    above = found.share_above(value)
    assert sum(other >= value + width for other in values) <= above * len(values) + 1e-6
    assert above * len(values) <= sum(other >= value - width for other in values) + 1e-6
