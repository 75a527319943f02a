"""The model card of a saved directory, and the record of its training."""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hnclip.util.files import read_json
from hnclip.util.tables import markdown_table

if TYPE_CHECKING:
    from hnclip.models.dual_encoder import DualEncoder

log = logging.getLogger(__name__)

CARD, TRAINING = "README.md", "training.json"
DIRECTIONS = {"text_to_image": "T→I", "image_to_text": "I→T"}
RECALLS = ("R@1", "R@5", "R@10")


@dataclass(frozen=True)
class Training:
    """The run that trained a model. It stays with the model through every conversion.

    Args:
        base: the model that was fine-tuned, as it was named.
        data: the data and their size.
        objective: terms and their settings by name.
        command: the command that repeats the run.
        metrics: by the name of the split, as `hnclip.evaluation.summarize` returns them.
        epoch: the epoch of the run that the model is from; 0 is the model before training.
        weights: checksums of the files of weights in the directory, which have none of their own.
    """

    base: str
    data: str
    objective: Mapping[str, Any]
    command: str
    metrics: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    epoch: int | None = None
    weights: Mapping[str, str] = field(default_factory=dict, compare=False)


def write_card(model: DualEncoder, directory: Path, *, adapter_of: str | None = None) -> None:
    """Write the model card, and the record of the training if there is one, after the weights."""
    (directory / CARD).write_text(model_card(model, adapter_of=adapter_of), encoding="utf-8")
    if model.provenance is not None:
        training = replace(model.provenance, weights=_checksums(directory))
        (directory / TRAINING).write_text(json.dumps(asdict(training), indent=2) + "\n", encoding="utf-8")


def read_training(directory: Path) -> Training | None:
    """The record that `write_card` wrote; None if there is none."""
    file = directory / TRAINING
    if not file.is_file():
        return None
    try:
        return Training(**read_json(file))
    except TypeError as error:
        raise ValueError(f"{file} is not the record of a training ({error}); delete it to open the model") from error


def warn_of_changed_weights(directory: Path, training: Training | None) -> None:
    """Warn if a file of weights is not the one that was saved with the record. Not an error: it may be on purpose."""
    if training is None or not training.weights:
        return
    for name, checksum in _checksums(directory).items():
        if training.weights.get(name) != checksum:
            log.warning(
                f"{directory / name} has changed since it was saved: if that was not on purpose, it is damaged; "
                f"restore it or train again (delete {directory / TRAINING} to keep the change)"
            )


def _checksums(directory: Path) -> dict[str, str]:
    return {file.name: _checksum(file) for file in sorted(directory.glob("*.safetensors"))}


def _checksum(file: Path) -> str:
    value = 0
    with file.open("rb") as handle:
        while part := handle.read(2**22):
            value = zlib.crc32(part, value)
    return f"{value:08x}"


def model_card(model: DualEncoder, *, adapter_of: str | None = None) -> str:
    """README.md of a saved model, with the front matter that the Hugging Face hub reads.

    Args:
        adapter_of: the base model, if the directory contains only its adapters.
    """
    from huggingface_hub import ModelCardData

    front_matter = ModelCardData(
        library_name="transformers" if adapter_of is None else "peft",
        pipeline_tag="feature-extraction",
        tags=["image-text-retrieval", "hnclip", model.family.kind],
    ).to_yaml()
    image = model.image_transform
    resize = "squashed to" if image.squash else f"shortest side to {image.shortest or image.size}, centre crop of"
    parts = [
        f"---\n{front_matter}\n---",
        "# Image–text retrieval model" if adapter_of is None else f"# Adapter of {adapter_of}",
        f"{model.source}.",
        f"Texts of up to {model.context} tokens. Images {resize} {image.size} × {image.size} pixels "
        f"({image.resample}). Inverse temperature {model.scale.item():.2f}.",
    ]
    if model.untrained_projections:
        parts.append("The projections that join the two towers are random: train the model before use.")
    if model.provenance is None:
        parts.append("There is no record of a training with hnclip: the weights are those of the source.")
    else:
        parts += _training(model.provenance)
    name = model.family.backbone_name
    alone = f"""```python
from transformers import AutoProcessor, {name}

model, processor = {name}.from_pretrained(path), AutoProcessor.from_pretrained(path)
```"""
    merge = "`hnclip convert path merged/` writes the adapted model as a plain directory."
    parts.append(f"""## Usage

```python
import hnclip

model = hnclip.load(path)
similarity = model.similarity(model.encode(["a long caption …"]), model.encode(["image.jpg"]))
```

{alone if adapter_of is None else merge}""")
    return "\n\n".join(parts) + "\n"


def _training(training: Training) -> list[str]:
    parts = [
        "## Training",
        f"Base: {training.base}. Data: {training.data}.",
        markdown_table(["objective", "value"], [[name, str(value)] for name, value in training.objective.items()]),
        f"```sh\n{training.command}\n```",
    ]
    if training.metrics:
        columns = [(direction, recall) for direction in DIRECTIONS for recall in RECALLS]
        headers = ["split", *(f"{DIRECTIONS[direction]} {recall}" for direction, recall in columns)]
        rows = [
            [split, *(f"{metrics[direction][recall]:.1f}" for direction, recall in columns)]
            for split, metrics in training.metrics.items()
        ]
        parts += ["## Results", "Recall in percent.", markdown_table(headers, rows)]
    return parts
