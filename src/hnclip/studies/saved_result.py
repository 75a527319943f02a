"""A `Result` on disk: numbers as JSON, ranks as tensors, in one file that appears whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from hnclip.evaluate.ranks import Ranks
from hnclip.evaluate.result import PerQuery, Result
from hnclip.util.files import replace_file

_PARTS = {"queries": "", "held_out_queries": "held_out_"}  # fields of `Result`, and what their tensors are called


def write_result(path: Path, result: Result) -> None:
    """Write a result with its queries."""
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {name: value for name, value in vars(result).items() if name not in _PARTS}
    for name, prefix in _PARTS.items():
        queries: PerQuery | None = getattr(result, name)
        if queries is not None:
            tensors |= {f"{prefix}{key}": value.contiguous() for key, value in vars(queries.ranks).items()}
            tensors[f"{prefix}groups"] = queries.groups.contiguous()
            values[f"{prefix}ids"] = queries.ids
    with replace_file(path) as partial:
        save_file(tensors, partial, metadata={"result": json.dumps(values)})


def read_result(path: Path) -> Result:
    """What `write_result` wrote."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            values = json.loads((file.metadata() or {})["result"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no dictionary
        found: dict[str, Any] = {}
        for name, prefix in _PARTS.items():
            ids = values.pop(f"{prefix}ids", None)
            if ids is not None:
                ranks = Ranks(*(tensors[f"{prefix}{key}"] for key in ("text_to_image", "image_to_text", "owner")))
                found[name] = PerQuery(ranks, tensors[f"{prefix}groups"], tuple(ids))
        return Result(**values, **found)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is no evaluation of a study ({error}): delete it, and it is measured again"
        ) from error
