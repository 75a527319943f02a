"""Opening what `hnclip encode` wrote, whole or damaged."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
from encode_helpers import options, write_table
from hypothesis import given
from hypothesis import strategies as st

from hnclip.search.embeddings import Vectors, open_embeddings
from hnclip.search.encode import encode


@pytest.fixture(scope="module")
def encoded(model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoded")
    encode(options(write_table(folder / "data", 8), model_directory, folder / "out"))
    return folder / "out"


@pytest.fixture
def copy(encoded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(encoded, tmp_path / "copy"))


COUNTS = (3, 0, 1, 5)


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> tuple[Vectors, np.ndarray]:
    """Four files, one of them empty, and their rows in one array."""
    folder = tmp_path_factory.mktemp("vectors")
    whole = np.random.default_rng(0).standard_normal((sum(COUNTS), 4)).astype(np.float32)
    files, first = [], 0
    for number, count in enumerate(COUNTS):
        files.append(folder / f"{number}.npy")
        np.save(files[-1], whole[first : first + count])
        first += count
    return Vectors(files, COUNTS, 4, "float32"), whole


BOUNDS = st.none() | st.integers(-12, 12)


@given(
    st.integers(-9, 8)
    | st.lists(st.integers(-9, 8), max_size=6)
    | st.builds(slice, BOUNDS, BOUNDS, st.none() | st.sampled_from([1, 2, -1, -3]))
)
def test_rows_are_chosen_as_in_one_array(vectors: tuple[Vectors, np.ndarray], chosen: int | list[int] | slice) -> None:
    found, whole = vectors
    expected = whole[np.array(chosen, np.int64) if isinstance(chosen, list) else chosen]
    np.testing.assert_array_equal(found[chosen], expected)
    assert found[chosen].shape == expected.shape


def test_blocks_are_mapped(vectors: tuple[Vectors, np.ndarray]) -> None:
    found, whole = vectors
    assert [first for first, _ in found.blocks()] == [0, 3, 3, 4]
    np.testing.assert_array_equal(np.concatenate([block for _, block in found.blocks()]), whole)
    assert all(isinstance(block, np.memmap) for _, block in found.blocks())
    assert found.shape == (len(found), 4) == whole.shape
    for wrong in (9, -10, [0, 9], 0.5, np.array([True])):
        with pytest.raises(IndexError, match="whole numbers below 9"):
            found[wrong]  # type: ignore[index]


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist: make it with hnclip encode DATA --out"):
        open_embeddings(tmp_path / "none")
    with pytest.raises(ValueError, match="holds no embeddings"):
        open_embeddings(tmp_path)


def test_missing_shards_are_named_with_the_command(copy: Path) -> None:
    (copy / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"it has no manifest.json yet"):
        open_embeddings(copy)
    shutil.rmtree(copy / "shards" / "00001")
    with pytest.raises(ValueError, match=r"1 of 2 shards missing \(1\). Finish it with\n  hnclip encode .* --out"):
        open_embeddings(copy)


@pytest.mark.parametrize("name", ["images.npy", "captions.npy", "owners.npy", "records.jsonl"])
def test_damage_is_found(name: str, copy: Path) -> None:
    file = copy / "shards" / "00000" / name
    content = file.read_bytes()
    file.write_bytes(content[:-3] + b"xyz")
    open_embeddings(copy)  # of the same size: only reading it all would tell
    with pytest.raises(ValueError, match=f"{name} is not what was written: it is damaged. Remove .*00000 and make it"):
        open_embeddings(copy, check=True)
    file.write_bytes(content[:-3])
    with pytest.raises(ValueError, match=f"{name} has .* bytes instead of"):
        open_embeddings(copy)
    file.unlink()
    with pytest.raises(ValueError, match=f"{name} cannot be read"):
        open_embeddings(copy)


def test_a_damaged_shard_is_made_again(model_directory: Path, tmp_path: Path) -> None:
    given = options(write_table(tmp_path / "data", 3), model_directory, tmp_path / "out")
    encode(given)
    file = tmp_path / "out/shards/00000/captions.npy"
    whole = file.read_bytes()
    file.write_bytes(whole[:100])
    assert encode(given).encoded == 1
    assert file.read_bytes() == whole
    open_embeddings(tmp_path / "out", check=True)


def test_other_formats_and_shapes_are_refused(copy: Path) -> None:
    manifest = json.loads((copy / "manifest.json").read_text(encoding="utf-8"))
    (copy / "manifest.json").write_text(json.dumps({**manifest, "format": 7}), encoding="utf-8")
    with pytest.raises(ValueError, match="is of format 7, this version of hnclip knows format 1"):
        open_embeddings(copy)
    (copy / "manifest.json").write_text(json.dumps({"format": 1}), encoding="utf-8")
    with pytest.raises(ValueError, match="lacks 'model': it was not written by hnclip encode"):
        open_embeddings(copy)
    (copy / "manifest.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match="not valid JSON"):
        open_embeddings(copy)
    (copy / "manifest.json").write_text(json.dumps({**manifest, "dtype": "float16"}), encoding="utf-8")
    images = open_embeddings(copy).images
    assert images is not None
    with pytest.raises(ValueError, match=r"of float32, manifest.json says .* of float16"):
        images[0]


def test_nothing_in_the_directory_is_executed(copy: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple:
            return (pytest.fail, ("code of the file was run",))

    for name in ("images.npy", "owners.npy"):
        file = copy / "shards" / "00000" / name
        size = file.stat().st_size
        content = pickle.dumps(Trap())
        file.write_bytes(content + bytes(size - len(content)))
    found = open_embeddings(copy)
    assert found.images is not None
    with pytest.raises(ValueError, match="pickle"):
        found.images[0]
    with pytest.raises(ValueError, match="pickle"):
        _ = found.owners
