"""What makes two runs the same run, and what does not."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image
from safetensors.torch import load_file, save_file
from study_data import write_pairs

from hnclip.config import ObjectiveConfig, OptimConfig, ReadConfig, TrainConfig
from hnclip.data.image_hashes import image_hashes
from hnclip.data.image_sources import FileImage
from hnclip.data.manifest import record_mark, write_manifest
from hnclip.data.sources import open_data
from hnclip.studies.identity import UNKNOWN, gallery_identity, identify, run_identity
from hnclip.studies.spec import GallerySpec

Change = Callable[[Path], None]


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
        ({"limit": 8}, False),
        ({"objective": ObjectiveConfig(gamma=0.25)}, False),
        ({"optim": OptimConfig(lr=1e-5, precision="fp32")}, False),
        ({"read": ReadConfig(splits=False)}, False),
        ({"watch": "scenes/park/small"}, True),
        ({"probe_gradients": 5}, True),
        ({"limit": 1000}, True),
        ({"keep": 10}, True),  # nothing is stretched
        ({"read": ReadConfig(max_bad=0.5)}, True),
        ({"read": ReadConfig(prepared="elsewhere")}, True),
    ],
    ids=str,
)
def test_what_is_trained_makes_another_run(data: Path, changes: dict[str, object], same: bool) -> None:
    """Observations, and what has no effect, make none."""
    assert (run_identity(config(data, **changes)) == run_identity(config(data))) is same


def _rewrite(pairs: Path, change: Callable[[list[dict[str, str]]], None]) -> None:
    rows = [json.loads(line) for line in pairs.read_text(encoding="utf-8").splitlines()]
    change(rows)
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _touch(pairs: Path) -> None:
    for file in pairs.parent.iterdir():
        os.utime(file, (1, 1))


def _one_image(split: str) -> Change:
    return lambda pairs: Image.new("RGB", (48, 48), "red").save(pairs.parent / f"{split}-5.png")


def _caption(split: str) -> Change:
    more = {"caption": "Another caption."}
    return lambda pairs: _rewrite(pairs, lambda rows: next(r for r in rows if r["split"] == split).update(more))


def _move_a_record_to_validation(pairs: Path) -> None:
    """All records together, in their order, stay the same."""
    _rewrite(pairs, lambda rows: [row for row in rows if row["split"] == "train"][-1].update(split="validation"))


@pytest.mark.parametrize(
    ("change", "run", "gallery"),
    [
        (lambda pairs: None, True, True),
        (_touch, True, True),
        (_one_image("train"), False, True),
        (_one_image("validation"), False, True),
        (_one_image("test"), True, False),
        (_caption("train"), False, True),
        (_caption("validation"), False, True),
        (_caption("test"), True, False),
        (_move_a_record_to_validation, False, True),
    ],
    ids=["other folder", "touched", *(f"{what} {split}" for what in ("image", "caption") for split in "tvs"), "split"],
)
def test_data_count_by_their_content(data: Path, tmp_path: Path, change: Change, run: bool, gallery: bool) -> None:
    """`run` and `gallery` say which of them stay the same in a changed copy."""
    other = Path(shutil.copytree(data.parent, tmp_path / "copy")) / data.name
    change(other)
    assert (run_identity(config(other)) == run_identity(config(data))) is run
    there, here = (gallery_identity(GallerySpec(str(source)), ReadConfig()) for source in (other, data))
    assert (there == here) is gallery


def test_the_untrained_model_counts_by_its_weights_alone(data: Path, model_directory: Path, tmp_path: Path) -> None:
    """Not by its card, a seed or the data."""
    own = config(data, model=str(model_directory))
    other_card = Path(shutil.copytree(model_directory, tmp_path / "card"))
    (other_card / "README.md").write_text("another card", encoding="utf-8")
    assert run_identity(replace(own, model=str(other_card))) == run_identity(own)
    other_weights = Path(shutil.copytree(model_directory, tmp_path / "weights"))
    weights = load_file(other_weights / "model.safetensors")
    weights["logit_scale"] += 1e-3
    save_file(weights, other_weights / "model.safetensors", metadata={"format": "pt"})
    changed, untrained = replace(own, model=str(other_weights)), run_identity(own, trained=False)
    assert run_identity(changed) != run_identity(own)
    assert run_identity(changed, trained=False) != untrained != run_identity(own)
    assert run_identity(replace(own, data="scenes/park/small", seed=7), trained=False) == untrained
    assert run_identity(own, matched=True) != run_identity(own)


def test_regions_count_where_a_method_uses_them(data: Path, tmp_path: Path) -> None:
    goal = ObjectiveConfig(method="goal", global_loss="infonce", token_weight=0.0)
    read = ReadConfig(prepared=str(tmp_path))
    record = next(record for record in open_data(str(data)).records if record.split == "train")
    with write_manifest(tmp_path / "regions.jsonl", "regions", by="test", tool={}, data=str(data)) as manifest:
        regions = [{"box": [0, 0, 9, 9], "sentence": "A tree.", "score": 0.5}]
        manifest.append(record.id, record_mark("regions", record), regions)
    assert run_identity(config(data, objective=goal, read=read)) != run_identity(config(data, objective=goal))
    assert run_identity(config(data, read=read)) == run_identity(config(data))


def test_without_model_or_data_runs_have_distinct_identities(data: Path) -> None:
    for absent in (config(data, model="not-here.pt"), config(data.parent / "not-here.csv")):
        found = [identify(replace(absent, seed=seed)) for seed in (1, 2, 1)]
        assert found[0] == found[2] != found[1]
        assert found[0].startswith(UNKNOWN)
    assert identify(config(data)) == run_identity(config(data))


def test_image_hashes_are_remembered_until_the_file_changes(tmp_path: Path) -> None:
    cache, file = tmp_path / "cache", tmp_path / "a.png"
    Image.new("RGB", (8, 8), "red").save(file)
    first = image_hashes([FileImage(file), FileImage(tmp_path / "missing.png")], cache)
    assert first[1] == "missing image"
    shutil.copy(file, tmp_path / "b.png")
    assert image_hashes([FileImage(tmp_path / "b.png")], cache) == first[:1]
    stamp = file.stat()
    file.write_bytes(bytes(stamp.st_size))
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert image_hashes([FileImage(file)], cache) == first[:1]  # remembered: it was not read
    for kept in (cache / "image-hashes").iterdir():  # a damaged memory is not used
        kept.write_bytes(kept.read_bytes()[:-1] + b"?")
    assert image_hashes([FileImage(file)], cache) != first[:1]
    os.utime(file, (1, 1))
    assert image_hashes([FileImage(file)], cache) != first[:1]
