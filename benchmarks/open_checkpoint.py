"""Memory and time to open Long-CLIP-L from one file of weights: hnclip beside the usual torch.load + load_state_dict.

The true size is 1.7 GB, twice on disk; `--megabytes 150` has fewer layers and words, and the same widths. Each way
opens the file in a process of its own, reads every weight once, then encodes one picture and one full caption. Memory
is the rise of the process's peak resident size since before opening, imports excluded, divided by the size of the file.
The file was written a moment ago, so the disk's speed does not show in the seconds.
"""

from __future__ import annotations

import logging
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hnclip.measure import Report, fresh_result, load_file, machine, resident_peak, restart_peak

log = logging.getLogger("hnclip.bench")

TWIN = Path(__file__).resolve().parents[1] / "tests" / "models" / "openai_twin.py"
WAYS = {
    "hnclip": "hnclip: load_openai_checkpoint",
    "usual": "peer: torch.load or safetensors' load_file + load_state_dict",
}
FULL = 1_711  # megabytes of Long-CLIP-L in fp32
COLUMNS = {
    "way": "way",
    "file": "file",
    "megabytes": "MB",
    "open_seconds": "open s",
    "open_memory": "memory ÷ file",
    "use_memory": "every weight read",
    "encode_seconds": "encode s",
    "encode_memory": "memory ÷ file",
}


@dataclass(frozen=True)
class Options:
    """Opening one file of weights."""

    megabytes: float = FULL
    """Size of the model, at most Long-CLIP-L's."""


def twin(megabytes: float, *, seed: int | None = 0) -> nn.Module:
    """Long-CLIP-L as OpenAI lays it out, in plain torch, with a share of its layers and of its vocabulary."""
    share = min(1.0, megabytes / FULL)
    return load_file(TWIN).OpenAITwin(
        image_size=224,
        patch=14,
        vision_width=1024,
        vision_layers=max(1, round(24 * share)),
        text_width=768,
        text_layers=max(1, round(12 * share)),
        vocabulary=max(600, round(49408 * share)),
        joint=768,
        seed=seed,
    )


def write(directory: Path, megabytes: float) -> list[Path]:
    """Random weights in OpenAI's layout, as `torch.save` and as safetensors write them."""
    from safetensors.torch import save_file

    weights = twin(megabytes).state_dict()
    files = [directory / "longclip.pt", directory / "longclip.safetensors"]
    torch.save(weights, files[0])
    save_file(weights, files[1])
    return files


def open_and_use(way: str, file: str, megabytes: float) -> dict[str, Any]:
    """One row of the table, measured in a process of its own."""
    import transformers.models.clip.modeling_clip  # noqa: F401, importing is not opening
    from safetensors.torch import load_file as load_safetensors

    from hnclip.models.openai_checkpoint import load_openai_checkpoint

    path = Path(file)
    before, start = restart_peak(), time.perf_counter()
    if way == "hnclip":
        model: Any = load_openai_checkpoint(path)[0]
    else:
        weights = load_safetensors(path) if path.suffix == ".safetensors" else torch.load(path, map_location="cpu")
        model = twin(megabytes, seed=None)
        model.load_state_dict(weights)
        del weights
    seconds, opened = time.perf_counter() - start, resident_peak() - before
    with torch.no_grad():
        assert sum(weight.sum().item() for weight in model.parameters())  # every byte is read once
        used, start = resident_peak() - before, time.perf_counter()
        pixels = torch.zeros(1, 3, 224, 224)
        ids = torch.full((1, 248), 5)
        ids[:, -1] = max(600, round(49408 * min(1.0, megabytes / FULL))) - 1  # the end token
        model(pixel_values=pixels, input_ids=ids) if way == "hnclip" else model(pixels, ids)
    size = path.stat().st_size
    return {
        "way": WAYS[way],
        "file": path.suffix,
        "megabytes": size / 1e6,
        "open_seconds": seconds,
        "open_memory": opened / size,
        "use_memory": used / size,
        "encode_seconds": time.perf_counter() - start,
        "encode_memory": (resident_peak() - before) / size,
    }


def run(options: Options) -> Report:
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        log.info("writing the files")
        for file in write(Path(directory), options.megabytes):
            for way in WAYS:
                log.info(f"{file.suffix}: {WAYS[way]}")
                arguments = {"way": way, "file": str(file), "megabytes": options.megabytes}
                rows.append(fresh_result(__file__, "open_and_use", **arguments))
    return Report("open_checkpoint", COLUMNS, rows, machine())
