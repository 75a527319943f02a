"""What makes two runs the same run, and what does not."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from PIL import Image
from safetensors.torch import load_file, save_file
from study_data import COUNTS, write_pairs

from hnclip.config import ObjectiveConfig, OptimConfig, ReadConfig, TrainConfig
from hnclip.data.image_hashes import image_hashes
from hnclip.data.image_sources import FileImage
from hnclip.studies.identity import gallery_identity, run_identity
from hnclip.studies.spec import GallerySpec


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("identity") / "data", counts={"train": 40, "validation": 8, "test": 8})


def config(data: Path, **changes: object) -> TrainConfig:
    plain = TrainConfig(data=str(data), optim=OptimConfig(precision="fp32"))
    return replace(plain, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({"seed": 7}, False),
        ({"objective": ObjectiveConfig(gamma=0.25)}, False),
        ({"optim": OptimConfig(lr=1e-5, precision="fp32")}, False),
        ({"watch": "scenes/park/small"}, True),
        ({"probe_gradients": 5}, True),
        ({"limit": 1000}, True),
        ({"keep": 10}, True),  # nothing is stretched
        ({"read": ReadConfig(max_bad=0.5, prepared="elsewhere")}, True),
    ],
    ids=str,
)
def test_what_is_trained_makes_another_run(data: Path, changes: dict[str, object], same: bool) -> None:
    """Observations, and what has no effect, make none."""
    assert (run_identity(config(data, **changes)) == run_identity(config(data))) is same


@pytest.mark.parametrize(
    ("field", "split"), [(None, None), ("split", "train"), *product(("image", "caption"), COUNTS)], ids=str
)
def test_data_count_by_their_content(data: Path, tmp_path: Path, field: str | None, split: str | None) -> None:
    """Runs count training and validation records, galleries the test records. A copy in another folder is the same."""
    other = Path(shutil.copytree(data.parent, tmp_path / "copy")) / data.name
    rows = [json.loads(line) for line in other.read_text(encoding="utf-8").splitlines()]
    changed = next((row for row in rows if row["split"] == split), rows[0])
    if field == "image":
        Image.new("RGB", (48, 48), "red").save(other.parent / changed["image"])
    elif field is not None:
        changed[field] = {"caption": "Another caption.", "split": "test"}[field]
        other.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert (run_identity(config(other)) == run_identity(config(data))) is (split in (None, "test"))
    there, here = (gallery_identity(GallerySpec(str(source)), ReadConfig()) for source in (other, data))
    assert (there == here) is (split != "test" and field != "split")


def test_the_untrained_model_counts_by_its_weights_alone(data: Path, model_directory: Path, tmp_path: Path) -> None:
    """Not by its card, a seed or the data."""
    own = config(data, model=str(model_directory))
    other = Path(shutil.copytree(model_directory, tmp_path / "other"))
    (other / "README.md").write_text("another card", encoding="utf-8")
    changed, untrained = replace(own, model=str(other)), run_identity(own, trained=False)
    assert run_identity(changed) == run_identity(own) != untrained
    assert run_identity(replace(own, data="scenes/park/small", seed=7), trained=False) == untrained
    assert run_identity(own, matched=True) != run_identity(own)
    weights = load_file(other / "model.safetensors")
    weights["logit_scale"] += 1e-3
    third = Path(shutil.copytree(model_directory, tmp_path / "third"))
    save_file(weights, third / "model.safetensors", metadata={"format": "pt"})
    changed = replace(own, model=str(third))
    assert run_identity(changed) != run_identity(own)
    assert run_identity(changed, trained=False) != untrained


def test_image_hashes_are_remembered_until_the_file_changes(tmp_path: Path) -> None:
    cache, file = tmp_path / "cache", tmp_path / "a.png"
    Image.new("RGB", (8, 8), "red").save(file)
    first = image_hashes([FileImage(file), FileImage(tmp_path / "missing.png")], cache)
    assert first[1] == "missing image"
    stamp = file.stat()
    file.write_bytes(bytes(stamp.st_size))
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert image_hashes([FileImage(file)], cache) == first[:1]  # remembered: it was not read
    for kept in (cache / "image-hashes").iterdir():  # a damaged memory is not used
        kept.write_bytes(kept.read_bytes()[:-1] + b"?")
    assert image_hashes([FileImage(file)], cache) != first[:1]
