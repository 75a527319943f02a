"""The card of a model directory: what it is, what it was trained on and how, what was measured, how to open it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hnclip.evaluate.table import format_results
from hnclip.files import read_settings
from hnclip.tables import markdown_table

if TYPE_CHECKING:
    from hnclip.models.dual_encoder import DualEncoder


CARD, TRAINING = "README.md", "training.json"


@dataclass(frozen=True)
class Training:
    """What a card says of the run that made a model. It stays with the model through every conversion.

    Args:
        base: what was fine-tuned, as it was named.
        data: the data, and how much of it.
        objective: terms and their settings by name.
        metrics: by the name of the split, as `RetrievalMetrics.to_dict` gives them.
        command: the command that does the run again.
    """

    base: str
    data: str
    objective: Mapping[str, Any]
    command: str
    metrics: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def write_card(model: DualEncoder, directory: Path, *, adapter_of: str | None = None) -> None:
    """The card of a saved model, and what is known of its training for programs."""
    (directory / CARD).write_text(model_card(model, adapter_of=adapter_of), encoding="utf-8")
    if model.provenance is not None:
        (directory / TRAINING).write_text(json.dumps(asdict(model.provenance), indent=2) + "\n", encoding="utf-8")


def read_training(directory: Path) -> Training | None:
    """What `write_card` wrote of a model's training; None where there is nothing."""
    file = directory / TRAINING
    if not file.is_file():
        return None
    try:
        return Training(**read_settings(file))
    except TypeError as error:
        raise ValueError(f"{file} does not tell of a training: {error}; delete it to go without") from error


def model_card(model: DualEncoder, *, adapter_of: str | None = None) -> str:
    """README.md of a saved model, with the front matter that the Hugging Face hub reads.

    Args:
        adapter_of: the base model, where the directory holds its adapters alone.
    """
    title = "# Image–text retrieval model" if adapter_of is None else f"# Adapter of {adapter_of}"
    parts = [_front_matter(model, adapter_of), title, f"{model.source}.", _shape(model)]
    if model.provenance is None:
        parts.append("Nothing is said here of how the weights were trained: they are those of the source.")
    else:
        parts += _training(model.provenance)
    parts.append(_opening(model, adapter_of))
    return "\n\n".join(parts) + "\n"


def _front_matter(model: DualEncoder, adapter_of: str | None) -> str:
    tags = ["image-text-retrieval", "hnclip", model.family.kind]
    library = "transformers" if adapter_of is None else "peft"
    lines = [f"library_name: {library}", "pipeline_tag: feature-extraction", "tags:", *(f"- {tag}" for tag in tags)]
    return "\n".join(["---", *lines, "---"])


def _shape(model: DualEncoder) -> str:
    image = model.image_transform
    way = "squashed to" if image.squash else f"shortest side to {image.shortest or image.size}, centre crop of"
    return (
        f"Captions of up to {model.context} tokens. Pictures {way} {image.size} × {image.size} pixels "
        f"({image.resample}). Inverse temperature {model.scale.item():.2f}."
    )


def _training(training: Training) -> list[str]:
    settings = [[name, f"{value}"] for name, value in training.objective.items()]
    parts = [
        "## Training",
        f"Base: {training.base}. Data: {training.data}.",
        markdown_table(["objective", "value"], settings),
        f"```sh\n{training.command}\n```",
    ]
    if training.metrics:
        parts += ["## Results", "Recall in percent.", format_results(training.metrics, table=markdown_table)]
    return parts


def _opening(model: DualEncoder, adapter_of: str | None) -> str:
    name = model.family.backbone_class().__name__
    alone = f"""```python
from transformers import AutoProcessor, {name}

model, processor = {name}.from_pretrained(path), AutoProcessor.from_pretrained(path)
```"""
    merge = "`hnclip convert path merged/` writes the adapted model as a plain directory."
    return f"""## How to open it

```python
import hnclip

model = hnclip.load(path)
text = model.encode_texts(model.tokenize(["a long caption …"])).vectors
```

{alone if adapter_of is None else merge}"""
