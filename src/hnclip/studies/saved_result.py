"""An `EvaluationResult` on disk: numbers as JSON, ranks as tensors, in one file that appears whole or not at all."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from hnclip.evaluate.ranks import Ranks
from hnclip.evaluate.retrieval import EvaluationResult
from hnclip.util.files import replace_file

_TENSORS = ("ranks", "groups", "image", "text", "held_out")  # fields that are not JSON, or not stored


def write_result(path: Path, result: EvaluationResult) -> None:
    """Write a result with its ranks, without its vectors."""
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    for prefix, part in (("", result), ("held_out_", result.held_out)):
        if part is not None:
            found = {**vars(part.ranks), "groups": part.groups}
            tensors |= {f"{prefix}{name}": value.contiguous() for name, value in found.items()}
            values[prefix] = {name: value for name, value in vars(part).items() if name not in _TENSORS}
    with replace_file(path) as partial:
        save_file(tensors, partial, metadata={"result": json.dumps(values)})


def read_result(path: Path) -> EvaluationResult:
    """Read a result of `write_result`."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            values = json.loads((file.metadata() or {})["result"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no dictionary
        parts = {}
        for prefix, part in values.items():
            ranks = Ranks(*(tensors[f"{prefix}{name}"] for name in ("text_to_image", "image_to_text", "owner")))
            part["ids"] = tuple(part["ids"])
            parts[prefix] = EvaluationResult(ranks=ranks, groups=tensors[f"{prefix}groups"], **part)
        return replace(parts[""], held_out=parts.get("held_out_"))
    except (SafetensorError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({error}): delete it, and it is measured again") from error
