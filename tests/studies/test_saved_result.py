"""A result on disk is the result, bit for bit; a broken file gets a sentence."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from small_studies import queries, result

from hnclip.studies.saved_result import read_result, write_result


def same(one, other) -> bool:
    ranks = all(
        torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(vars(one.ranks).values(), vars(other.ranks).values())
    )
    return ranks and torch.equal(one.groups, other.groups) and one.ids == other.ids


@pytest.mark.parametrize("apart", [None, queries(0.3, 2, pictures=7)])
def test_round_trip(tmp_path, apart):
    found = result(queries(0.5, 1, captions=3), apart=apart, truncated=4)
    path = tmp_path / "evaluations" / "a.safetensors"
    write_result(path, found)
    read = read_result(path)
    assert read == found  # all numbers, equal to their last bit
    assert read.to_dict() == found.to_dict()
    assert same(read, found)
    assert (read.held_out is None) == (apart is None)
    if apart is not None:
        assert same(read.held_out, apart)


def test_names_in_any_script(tmp_path):
    named = replace(queries(0.5, 1), ids=tuple(f'画像 "{number}"\n' for number in range(60)))
    write_result(tmp_path / "a", result(named, data="données"))
    read = read_result(tmp_path / "a")
    assert read.ids == named.ids
    assert read.data == "données"


@pytest.mark.parametrize("kept", [0, 5, 200, 0.5, -1])
def test_a_truncated_file_gets_a_sentence(tmp_path, kept):
    path = tmp_path / "a.safetensors"
    write_result(path, result(queries(0.5, 1)))
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content)) if isinstance(kept, float) else kept])
    with pytest.raises(ValueError, match=r"a\.safetensors is damaged .*delete it"):
        read_result(path)


def test_other_tensors_get_a_sentence(tmp_path):
    from safetensors.torch import save_file

    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="damaged"):
        read_result(tmp_path / "model.safetensors")
    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors", metadata={"result": '{"ids": ["a"]}'})
    with pytest.raises(ValueError, match="damaged"):
        read_result(tmp_path / "model.safetensors")
