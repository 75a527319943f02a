from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hnclip.analysis.geometry import caption_geometry


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_equals_a_loop_over_pairs(chunk: int) -> None:
    generator = torch.Generator().manual_seed(0)
    text = F.normalize(torch.randn(11, 5, generator=generator), dim=-1)
    owner = torch.tensor([0, 0, 1, 2, 3, 3, 3, 4, 5, 6, 7])
    companions = [[float(text[i] @ text[j]) for j in range(11) if owner[i] != owner[j]] for i in range(11)]
    flat = [value for row in companions for value in row]
    found = caption_geometry(text, owner, chunk=chunk)
    assert found.pairwise == pytest.approx(sum(flat) / len(flat), abs=1e-6)
    assert found.hardest == pytest.approx(sum(max(row) for row in companions) / 11, abs=1e-6)


def test_one_picture_has_no_companion() -> None:
    with pytest.raises(ValueError, match="owner"):
        caption_geometry(torch.eye(3), torch.zeros(3, dtype=torch.long))
