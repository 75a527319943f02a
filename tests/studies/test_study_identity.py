"""What makes two runs one run, and what does not."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from study_data import write_pairs

from hnclip.config import ObjectiveConfig, OptimConfig, ReadConfig, TrainConfig
from hnclip.studies import identity
from hnclip.studies.identity import code_fingerprint, gallery_fingerprint, model_identity, run_identity
from hnclip.studies.matched import mean_similarity, open_start, with_matched_margin


@pytest.fixture(autouse=True)
def forgetful() -> None:
    """Data are remembered as long as a process lives; here they change meanwhile."""
    identity._pairs_fingerprint.cache_clear()
    gallery_fingerprint.cache_clear()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("identity") / "data")


@pytest.fixture
def data(written: Path, tmp_path: Path) -> Path:
    """A copy that may be changed."""
    return Path(shutil.copytree(written.parent, tmp_path / "copy")) / written.name


def config(data: Path, **changes: object) -> TrainConfig:
    plain = TrainConfig(data=str(data), optim=OptimConfig(precision="fp32"))
    return replace(plain, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 7},
        {"fraction": 0.5},
        {"limit": 8},
        {"context": 300},
        {"cluster": 2},
        {"probe_gradients": 1},
        {"objective": ObjectiveConfig(gamma=0.25)},
        {"objective": ObjectiveConfig(mask_duplicates=False)},
        {"optim": OptimConfig(lr=1e-5, precision="fp32")},
        {"optim": OptimConfig(negatives="batch", precision="fp32")},
        {"optim": OptimConfig(precision="bf16")},
        {"read": ReadConfig(splits=False)},
    ],
)
def test_settings_that_train_differently_are_another_run(written: Path, changes: dict[str, object]) -> None:
    assert run_identity(config(written, **changes)).what != run_identity(config(written)).what


def test_where_pictures_are_kept_is_not_what_is_computed(written: Path) -> None:
    assert run_identity(config(written, read=ReadConfig(cache="elsewhere"))) == run_identity(config(written))


def test_the_same_data_elsewhere_are_the_same_data(written: Path, data: Path) -> None:
    assert run_identity(config(data)) == run_identity(config(written))
    watched = run_identity(config(written, watch=str(written)))
    assert watched != run_identity(config(written))
    assert watched == run_identity(config(written, watch=str(data)))


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_caption_and_a_picture_count(written: Path, data: Path, split: str) -> None:
    before = run_identity(config(written))
    lines = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
    line = next(line for line in lines if line["split"] == split)
    line["caption"] += " Or so."
    data.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    assert run_identity(config(data)).what != before.what
    shutil.copy(written, data)
    forget()
    assert run_identity(config(data)) == before
    Image.new("RGB", (48, 48), "red").save(data.parent / line["image"])
    forget()
    assert run_identity(config(data)).what != before.what


def forget() -> None:
    identity._pairs_fingerprint.cache_clear()


def test_a_test_caption_is_of_the_gallery_alone(written: Path, data: Path) -> None:
    """It changes no training, and the evaluation."""
    lines = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
    assert lines[-1]["split"] == "test"
    lines[-1]["caption"] += " Or so."
    data.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    assert run_identity(config(data)) == run_identity(config(written))
    read = ReadConfig()
    assert gallery_fingerprint(str(data), None, read) != gallery_fingerprint(str(written), None, read)


def test_the_weights_count_and_the_card_does_not(written: Path, model_directory: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(model_directory, tmp_path / "model"))
    before = run_identity(config(written, model=str(model_directory)))
    (copy / "README.md").write_text("another card", encoding="utf-8")
    assert run_identity(config(written, model=str(copy))) == before
    weights = load_file(copy / "model.safetensors")
    weights["logit_scale"] += 1e-3
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    assert run_identity(config(written, model=str(copy))).what != before.what
    assert model_identity(config(written, model=str(copy))).what != before.what


def test_versions_are_a_part_of_their_own(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = run_identity(config(written))
    monkeypatch.setattr(identity, "versions", lambda: {"torch": "0.1"})
    after = run_identity(config(written))
    assert after.what == before.what
    assert after.versions != before.versions


def test_code_counts_by_what_it_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fingerprint(text: str) -> str:
        (tmp_path / "losses").mkdir(exist_ok=True)
        (tmp_path / "losses" / "one.py").write_text(text, encoding="utf-8")
        code_fingerprint.cache_clear()
        return code_fingerprint(("losses",))

    monkeypatch.setattr(identity, "files", lambda package: tmp_path)
    plain = fingerprint("def f(x):\n    return x + 1\n")
    assert fingerprint('"""About."""\n\n\ndef f(x):  # why\n    """Adds."""\n    return x + 1\n') == plain
    assert fingerprint("def f(x):\n    return x + 2\n") != plain
    assert fingerprint('def f(x):\n    return x + "1"\n') != plain
    code_fingerprint.cache_clear()


def test_the_matched_margin_is_gamma_times_the_mean_similarity(written: Path, tmp_path: Path) -> None:
    """By a literal twin: every caption with every caption of another picture, before training."""
    asked = config(
        written, limit=10, objective=ObjectiveConfig(global_loss="fixed_margin", token_weight=0.0, gamma=0.3)
    )
    lines = [json.loads(line) for line in written.read_text(encoding="utf-8").splitlines()][:10]
    model = open_start(asked, "cpu").eval()
    with torch.no_grad():
        vectors = [model.encode_texts(model.tokenize([line["caption"]])).vectors[0] for line in lines]
    cosines = [float(a @ b) for i, a in enumerate(vectors) for j, b in enumerate(vectors) if i != j]
    expected = 0.3 * sum(cosines) / len(cosines)
    matched = with_matched_margin(asked, tmp_path, "cpu")
    assert matched.objective.parameters["margin"] == pytest.approx(expected, rel=1e-5)
    (kept,) = tmp_path.glob("*.json")
    kept.write_text(json.dumps({"mean": 0.5}), encoding="utf-8")  # measured once
    assert mean_similarity(asked, tmp_path, "cpu") == 0.5
    assert mean_similarity(replace(asked, limit=9), tmp_path, "cpu") != 0.5
    assert run_identity(asked, matched=True).what != run_identity(asked).what


def test_the_same_pairs_divided_otherwise_are_other_data(data: Path) -> None:
    """The last training pair validates instead: all pairs together, in their order, are the same."""
    before = run_identity(config(data)).what
    rows = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
    order = {"train": 0, "validation": 1}
    rows.sort(key=lambda row: order.get(row["split"], 2))
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    identity._pairs_fingerprint.cache_clear()
    assert run_identity(config(data)).what == before
    last = [row for row in rows if row["split"] == "train"][-1]
    last["split"] = "validation"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    identity._pairs_fingerprint.cache_clear()
    assert run_identity(config(data)).what != before


def test_a_tokenizer_is_not_a_second_tower(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(name, encoding="utf-8")
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    assert identity.model_fingerprint(f"{a}+{b}", None) != identity.model_fingerprint(a, b)


def test_an_adapter_is_known_by_its_base_too(tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    for directory in (base, adapter):
        directory.mkdir()
    (base / "config.json").write_text("{}", encoding="utf-8")
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}), encoding="utf-8")
    before = identity.model_fingerprint(str(adapter), None)
    (base / "part").mkdir()
    (base / "part" / "weights.safetensors").write_bytes(b"1")
    assert identity.model_fingerprint(str(adapter), None) != before
