from __future__ import annotations

import photo_towers
import pytest
import torch
from transformers import EfficientNetConfig, EfficientNetModel

import hnclip
from small_families import write_bert


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


class Original:
    """Features of the converted tower itself, all of them moved."""

    def __init__(self, model, moved: float) -> None:
        self.model, self.moved = model, moved

    def extract_features(self, pixels):
        return self.model(pixels).last_hidden_state + self.moved


@torch.no_grad()
def test_weights_are_converted_and_compared_with_the_original(weights) -> None:
    model = photo_towers.convert(weights)
    photo_towers.check_gates(model)
    assert photo_towers.difference(model, Original(model, 0.0)) < photo_towers.TOLERANCE
    assert photo_towers.difference(model, Original(model, 0.01)) > photo_towers.TOLERANCE
    with pytest.raises(ValueError, match="EfficientNet-Lite0"):
        photo_towers.convert({**weights, "_extra.weight": torch.zeros(1)})
    model.encoder.blocks[3].squeeze_excite.expand.bias.fill_(2.0)
    with pytest.raises(ValueError, match="block 3"):
        photo_towers.check_gates(model)


def test_hnclip_joins_the_towers_of_packages_with_a_known_licence(tmp_path, weights) -> None:
    for name, licence in ((photo_towers.IMAGE, "UNKNOWN"), (photo_towers.TEXT, "MIT")):
        about = tmp_path / f"{name}-0.1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Name: {name}\nVersion: 0.1.0\nLicense: {licence}\n")
        (about / "RECORD").write_text(f"{about.name}/LICENSE,,\n")
        (about / "LICENSE").write_text("All rights reserved\n")
    models, model = tmp_path / photo_towers.IMAGE / "models", tmp_path / photo_towers.TEXT / "model"
    models.mkdir(parents=True)
    model.mkdir(parents=True)
    torch.save(weights, models / "lite0.pth")
    write_bert(model)
    with pytest.raises(ValueError, match="licence"):
        photo_towers.main(tmp_path / "towers", tmp_path)
    (tmp_path / f"{photo_towers.IMAGE}-0.1.0.dist-info" / "LICENSE").write_text("Apache Software License 2.0\n")
    photo_towers.main(tmp_path / "towers", tmp_path)
    joined = hnclip.load(f"{tmp_path / 'towers' / 'image'}+{tmp_path / 'towers' / 'text'}")
    assert joined.image_size == 224
    assert joined.image_mean.flatten().tolist() == pytest.approx([127 / 255] * 3)
