"""The HED network, its weights from files, and pictures through it."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from threading import Lock

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from hnclip.data.views.shrink import shrunk
from hnclip.models.openai_checkpoint import read_state_dict
from hnclip.util.device import find_device

LONGEST = 1024  # pixels of a side that the network looks at: the first layers need 0.25 GB a tensor for its square
SHORTEST = 16  # pixels of a side that survive four halvings

# Blue, green and red that the trunk was trained without.
MEAN = (104.00698793, 116.66876762, 122.67891434)

# Stages of VGG-16: name, channels and number of convolutions.
STAGES = (("One", 64, 2), ("Two", 128, 2), ("Thr", 256, 3), ("Fou", 512, 3), ("Fiv", 512, 3))


class HedNetwork(nn.Module):
    """VGG-16 without its head; after each of the five stages a score for edges, and the five fused into one.

    Modules are called as in pytorch-hed, so that its weights fit by name.

    Shape:
        pixels: [N, 3, H, W], blue, green, red from 0 to 255, less MEAN; H and W at least SHORTEST
        returns [N, 1, H, W], probabilities
    """

    def __init__(self) -> None:
        super().__init__()
        channels = 3
        for name, width, count in STAGES:
            layers: list[nn.Module] = [] if name == "One" else [nn.MaxPool2d(2)]
            for _ in range(count):
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
                channels = width
            self.add_module(f"netVgg{name}", nn.Sequential(*layers))
        for name, width, _ in STAGES:
            self.add_module(f"netScore{name}", nn.Conv2d(width, 1, 1))
        self.add_module("netCombine", nn.Sequential(nn.Conv2d(len(STAGES), 1, 1), nn.Sigmoid()))

    def forward(self, pixels: Tensor) -> Tensor:
        scores = []
        hidden = pixels
        for name, _, _ in STAGES:
            hidden = self.get_submodule(f"netVgg{name}")(hidden)  # [N, width, H / 2^stage, W / 2^stage]
            score = self.get_submodule(f"netScore{name}")(hidden)
            scores.append(F.interpolate(score, pixels.shape[-2:], mode="bilinear", align_corners=False))
        return self.get_submodule("netCombine")(torch.cat(scores, dim=1))  # [N, 1, H, W]


def read_hed(weights: Path) -> HedNetwork:
    """A network with the weights of a file: safetensors, or what `torch.save` writes, nothing of which is run.

    Tensors are called as in pytorch-hed, `netVggOne.0.weight` and so on, or with the `module` that its published file
    has in place of `net`.
    """
    found = {
        f"net{name.removeprefix('module')}" if name.startswith("module") else name: tensor
        for name, tensor in read_state_dict(weights).items()
    }
    with torch.device("meta"):
        network = HedNetwork()
    expected = network.state_dict()
    layout = f"{weights} does not hold HED as pytorch-hed lays it out (netVggOne.0.weight … netCombine.0.bias)"
    if missing := [name for name in expected if name not in found]:
        raise ValueError(f"{layout}: {len(missing)} tensors are missing, first {missing[0]}")
    if unknown := sorted(set(found) - set(expected)):
        raise ValueError(f"{layout}: nothing is known of {unknown[0]}")
    for name, tensor in expected.items():
        if found[name].shape != tensor.shape:
            raise ValueError(f"{layout}: {name} has shape {list(found[name].shape)}, not {list(tensor.shape)}")
    # Copies: a file that is replaced while it is mapped would change the network.
    copies = {name: tensor.to(torch.float32, copy=True) for name, tensor in found.items()}
    network.load_state_dict(copies, assign=True)
    return network.eval()


_OPENING = Lock()


def opened_hed(weights: Path, mark: str, device: str) -> HedNetwork:
    """`read_hed`, once for all threads. `mark` is the fingerprint of the file: another content is another network."""
    with _OPENING:
        return _opened(weights, mark, device)


@lru_cache(maxsize=1)
def _opened(weights: Path, mark: str, device: str) -> HedNetwork:
    return read_hed(weights).to(find_device(device))


def find_edges(network: HedNetwork, image: Image.Image) -> Image.Image:
    """The map of an RGB picture, from black for no edge to white. A picture with a side beyond LONGEST is looked at
    smaller, and its map enlarged."""
    small = shrunk(image, (LONGEST, LONGEST), Image.Resampling.BICUBIC)
    colours = torch.from_numpy(np.array(small)).flip(2).permute(2, 0, 1)[None]  # [1, 3, H, W] blue, green, red
    device = next(network.parameters()).device
    with torch.inference_mode():
        pixels = colours.to(device, torch.float32) - torch.tensor(MEAN, device=device).view(1, 3, 1, 1)
        # Tiny pictures go on as their last row and column do; what the network says beyond them is cut off.
        room = (0, max(0, SHORTEST - small.width), 0, max(0, SHORTEST - small.height))
        chance = network(F.pad(pixels, room, mode="replicate"))[0, 0, : small.height, : small.width]  # [H, W]
        levels = (chance * 255).round().to(torch.uint8).cpu().numpy()
    return Image.fromarray(levels).resize(image.size, Image.Resampling.BILINEAR)
