from __future__ import annotations

import shutil
from pathlib import Path

import photo_towers
import pytest
import torch
from transformers import EfficientNetConfig, EfficientNetModel

import hnclip
from small_families import write_bert

LICENCES = {photo_towers.IMAGE: "UNKNOWN", photo_towers.TEXT: "MIT"}


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    """Random numbers under the package's names: transformers' own, spelt backwards through the tables."""
    config = EfficientNetConfig(width_coefficient=1.0, depth_coefficient=1.0, hidden_dim=1280, hidden_act="relu6")
    state, generator = EfficientNetModel(config).state_dict(), torch.Generator().manual_seed(0)
    block = {new: old for old, new in photo_towers._BLOCK.items()}
    around = {new: old for old, new in photo_towers._AROUND.items()}
    found = {"_fc.weight": torch.zeros(3, 1280), "_fc.bias": torch.zeros(3)}
    for name, tensor in state.items():
        if "squeeze_excite" in name:
            continue
        if tensor.ndim == 4:  # large enough that something reaches the end
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * (2 / tensor[0].numel()) ** 0.5)
        if name.startswith("encoder.blocks."):
            number, layer, part, leaf = name.removeprefix("encoder.blocks.").split(".", 3)
            found[f"_blocks.{number}.{block[f'{layer}.{part}']}.{leaf}"] = tensor
        else:
            layer, part, leaf = name.split(".", 2)
            found[f"{around[f'{layer}.{part}']}.{leaf}"] = tensor
    return found


@pytest.fixture
def packages(tmp_path, weights) -> Path:
    """Packages as pip lays them out, with a small text tower."""
    home = tmp_path / "packages"
    for name, licence in LICENCES.items():
        about = home / f"{name}-0.1.0.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\nLicense: {licence}\n")
        (about / "LICENSE").write_text("Apache Software License 2.0\n\nCopyright (c)\n")
        files = [f"{about.name}/LICENSE", *[f"{name}/model/README.md"] * (name == photo_towers.TEXT)]
        (about / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    (home / photo_towers.IMAGE / "models").mkdir(parents=True)
    torch.save(weights, home / photo_towers.IMAGE / "models" / "lite0.pth")
    model = home / photo_towers.TEXT / "model"
    model.mkdir(parents=True)
    write_bert(model)
    (model / "README.md").write_text("---\nlanguage: en\nlicense: apache-2.0\n---\n")
    (model / ".gitattributes").write_text("*.bin\n")
    return home


def test_it_writes_two_towers_that_hnclip_joins(packages, tmp_path, capsys) -> None:
    photo_towers.main(tmp_path / "towers", packages)
    assert "model card: apache-2.0" in capsys.readouterr().out
    model = hnclip.load(f"{tmp_path / 'towers' / 'image'}+{tmp_path / 'towers' / 'text'}")
    assert model.image_size == 224
    assert model.image_mean.flatten().tolist() == pytest.approx([127 / 255] * 3)
    assert not (tmp_path / "towers" / "text" / ".gitattributes").exists()


def test_weights_of_another_network_raise(weights) -> None:
    for other in (
        {name: tensor for name, tensor in weights.items() if name != "_conv_stem.weight"},
        {**weights, "_extra.weight": torch.zeros(1)},
    ):
        with pytest.raises(ValueError, match="EfficientNet-Lite0"):
            photo_towers.convert(other)
    model = photo_towers.convert(weights)
    model.encoder.blocks[3].squeeze_excite.expand.bias.data.fill_(2.0)
    with pytest.raises(ValueError, match="block 3"):
        photo_towers.check_gates(model)


class Original:
    """Features of the converted tower itself, some of them moved."""

    def __init__(self, model, moved: float) -> None:
        self.model, self.moved = model, moved

    def extract_features(self, pixels):
        return self.model(pixels).last_hidden_state + self.moved


@torch.no_grad()
def test_a_converted_tower_is_compared_with_the_original(packages, weights, tmp_path, monkeypatch) -> None:
    about = packages / f"{photo_towers.ORIGINAL}-0.1.0.dist-info"
    shutil.copytree(packages / f"{photo_towers.TEXT}-0.1.0.dist-info", about)
    text = (about / "METADATA").read_text().replace(photo_towers.TEXT, photo_towers.ORIGINAL)
    (about / "METADATA").write_text(text)
    model = photo_towers.convert(weights)
    monkeypatch.setattr(photo_towers, "open_original", lambda *_: Original(model, 0.0))
    photo_towers.main(tmp_path / "towers", packages)
    monkeypatch.setattr(photo_towers, "open_original", lambda *_: Original(model, 0.01))
    with pytest.raises(ValueError, match="differ from the original's"):
        photo_towers.main(tmp_path / "towers", packages)


def test_missing_packages_and_unknown_licences_raise(packages, tmp_path) -> None:
    with pytest.raises(ValueError, match=f"{photo_towers.IMAGE}, {photo_towers.TEXT} not found in"):
        photo_towers.main(tmp_path / "towers", tmp_path)
    about = packages / f"{photo_towers.IMAGE}-0.1.0.dist-info"
    (about / "LICENSE").write_text("All rights reserved: no use permitted\n")
    package = photo_towers.find_package(photo_towers.IMAGE, packages)
    with pytest.raises(ValueError, match="licence"):
        photo_towers.check_licence(package)
