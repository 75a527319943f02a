"""Directories of embeddings, whole or damaged."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest

from encode_helpers import contents, options, write_table
from hnclip.encode.embeddings import manifest_bytes, open_embeddings
from hnclip.encode.options import EncodeOptions
from hnclip.encode.shards import encode

SUFFIXES = {"img_emb": "npy", "text_emb": "npy", "metadata": "parquet", "manifest": "json"}
FILES = [f"{kind}/{kind}_{shard}.{suffix}" for kind, suffix in SUFFIXES.items() for shard in (0, 1)] + ["skipped.jsonl"]


@pytest.fixture(scope="module")
def job(model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> EncodeOptions:
    """Eight records in two shards, one of them with a damaged image."""
    folder = tmp_path_factory.mktemp("encoded")
    data = write_table(folder / "data", 8)
    (folder / "data/02.png").write_bytes(b"no image")
    job = options(data, model_directory, folder / "out", max_bad=0.2)
    encode(job)
    assert set(contents(job.out)) == set(FILES)
    return job


@pytest.fixture
def copy(job: EncodeOptions, tmp_path: Path) -> EncodeOptions:
    shutil.copytree(job.out, tmp_path / "copy")
    return EncodeOptions(**{**vars(job), "out": tmp_path / "copy"})


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-3])


def flip(file: Path) -> None:
    """One bit in every 40 bytes: at the beginning, in the middle and at the end."""
    content = bytearray(file.read_bytes())
    content[5::40] = bytes(byte ^ 1 for byte in content[5::40])
    file.write_bytes(content)


@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink])
@pytest.mark.parametrize("name", FILES)
def test_damage_is_found_and_the_same_command_repairs_it(
    name: str, damage: object, copy: EncodeOptions, job: EncodeOptions
) -> None:
    damage(copy.out / name)  # type: ignore[operator]
    if name != "skipped.jsonl":  # which is not read
        missing = name.startswith("manifest") and damage is Path.unlink
        with pytest.raises(ValueError, match="1 of 2 shards missing" if missing else name):
            open_embeddings(copy.out, verify=True)
    assert encode(copy).encoded == (name != "skipped.jsonl")
    assert contents(copy.out) == contents(job.out)


def test_every_changed_byte_of_a_manifest_is_found(copy: EncodeOptions, job: EncodeOptions) -> None:
    file = copy.out / "manifest/manifest_0.json"
    whole = file.read_bytes()
    known = open_embeddings(job.out).manifests
    for place in range(0, len(whole), 7):
        changed = bytearray(whole)
        changed[place] ^= 1 + place % 7
        file.write_bytes(changed)
        try:
            found = open_embeddings(copy.out).manifests
        except ValueError:
            continue
        assert found == known  # white space


def test_directories_without_all_shards_are_refused(copy: EncodeOptions, tmp_path: Path) -> None:
    for wrong in (tmp_path / "none", tmp_path):
        with pytest.raises(ValueError, match="holds no embeddings"):
            open_embeddings(wrong)
    (copy.out / "manifest/manifest_0.json").unlink()
    with pytest.raises(ValueError, match=r"1 of 2 shards missing \(0\).*hnclip encode .* --out"):
        open_embeddings(copy.out)


def test_other_formats_are_refused(copy: EncodeOptions) -> None:
    file = copy.out / "manifest/manifest_0.json"
    content = json.loads(file.read_bytes())
    del content["checksum"]
    file.write_bytes(manifest_bytes({**content, "job": {**content["job"], "format": 7}}))
    with pytest.raises(ValueError, match="version"):
        open_embeddings(copy.out)
    with pytest.raises(ValueError, match="differ in format"):
        encode(copy)


def test_nothing_in_the_directory_is_executed(copy: EncodeOptions) -> None:
    class Trap:
        def __reduce__(self) -> tuple:
            return (pytest.fail, ("code of the file was run",))

    file = copy.out / "img_emb/img_emb_0.npy"
    content = pickle.dumps(Trap())
    file.write_bytes(content + bytes(file.stat().st_size - len(content)))
    with pytest.raises(ValueError, match="img_emb"):
        open_embeddings(copy.out)
