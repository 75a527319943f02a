"""Directories of embeddings, complete or damaged."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from encode_helpers import contents, run, write_table
from hnclip.encode.embeddings import manifest_bytes, open_embeddings
from hnclip.encode.shards import EncodeResult

SUFFIXES = {"img_emb": "npy", "text_emb": "npy", "metadata": "parquet", "manifest": "json"}
FILES = [f"{kind}/{kind}_{shard}.{suffix}" for kind, suffix in SUFFIXES.items() for shard in (0, 1)] + ["skipped.jsonl"]
Job = Callable[[Path], EncodeResult]


@pytest.fixture(scope="module")
def job(model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Eight records in two shards, one of them with a damaged image."""
    data = write_table(tmp_path_factory.mktemp("data"), 8)
    (data.parent / "02.png").write_bytes(b"no image")
    return partial(run, data, model_directory, max_bad=0.2)


@pytest.fixture(scope="module")
def whole(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("encoded") / "out"
    job(out)
    assert set(contents(out)) == set(FILES)
    return out


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-3])


def flip(file: Path) -> None:
    """One bit in every 40 bytes: at the beginning, in the middle and at the end."""
    content = bytearray(file.read_bytes())
    content[5::40] = bytes(byte ^ 1 for byte in content[5::40])
    file.write_bytes(content)


@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink])
@pytest.mark.parametrize("name", FILES[1::2] + FILES[-1:])
def test_damage_is_found_and_the_same_command_repairs_it(
    name: str, damage: Callable[[Path], None], copy: Path, whole: Path, job: Job
) -> None:
    damage(copy / name)
    if name != "skipped.jsonl":  # which is not read
        missing = name.startswith("manifest") and damage is Path.unlink
        with pytest.raises(ValueError, match="1 of 2 shards missing" if missing else name):
            open_embeddings(copy, verify=True)
    assert job(copy).encoded == (name != "skipped.jsonl")
    assert contents(copy) == contents(whole)


def test_every_changed_byte_of_a_manifest_is_found(copy: Path, whole: Path) -> None:
    file = copy / "manifest/manifest_0.json"
    content, known = file.read_bytes(), open_embeddings(whole).manifests
    for place in range(0, len(content), 7):
        changed = bytearray(content)
        changed[place] ^= 1 + place % 7
        file.write_bytes(changed)
        try:
            assert open_embeddings(copy).manifests == known  # only white space differs
        except ValueError:
            continue


def test_incomplete_directories_and_other_formats_are_refused(copy: Path, job: Job, tmp_path: Path) -> None:
    for wrong in (tmp_path / "none", tmp_path):
        with pytest.raises(ValueError, match="holds no embeddings"):
            open_embeddings(wrong)
    file = copy / "manifest/manifest_0.json"
    content = json.loads(file.read_bytes())
    del content["checksum"]
    file.write_bytes(manifest_bytes({**content, "job": {**content["job"], "format": 7}}))
    with pytest.raises(ValueError, match="version"):
        open_embeddings(copy)
    with pytest.raises(ValueError, match="differ in format"):
        job(copy)
    file.unlink()
    with pytest.raises(ValueError, match=r"1 of 2 shards missing \(0\).*hnclip encode .* --out"):
        open_embeddings(copy)


def test_nothing_in_the_directory_is_executed(copy: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple:
            return (pytest.fail, ("code of the file was executed",))

    file, content = copy / "img_emb/img_emb_0.npy", pickle.dumps(Trap())
    file.write_bytes(content + bytes(file.stat().st_size - len(content)))
    with pytest.raises(ValueError, match="img_emb"):
        open_embeddings(copy)
