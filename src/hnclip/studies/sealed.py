"""Results on disk with checksums: a file that has changed since it was written is never taken for a result."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from torch import Tensor

from hnclip.evaluate.ranks import Ranks
from hnclip.evaluate.retrieval import EvaluationResult
from hnclip.util.files import read_json, replace_file

_CHECKSUM = re.compile(rb'"sha256":"([0-9a-f]{64})"')
_TENSORS = ("ranks", "groups", "image", "text", "held_out")  # fields of a result that are not JSON, or not stored


def write_result(path: Path, result: EvaluationResult) -> None:
    """Write a result with its ranks, without its vectors, as one file of JSON and tensors."""
    from safetensors.torch import save

    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    for prefix, part in (("", result), ("held_out_", result.held_out)):
        if part is not None:
            found = {**vars(part.ranks), "groups": part.groups}
            tensors |= {f"{prefix}{name}": value.contiguous() for name, value in found.items()}
            values[prefix] = {name: value for name, value in vars(part).items() if name not in _TENSORS}
    zeros = "0" * 64
    content = save(tensors, metadata={"result": json.dumps(values), "sha256": zeros})
    checksum = sha256(content).hexdigest()
    with replace_file(path) as partial:
        partial.write_bytes(content.replace(f'"sha256":"{zeros}"'.encode(), f'"sha256":"{checksum}"'.encode(), 1))


def read_result(path: Path) -> EvaluationResult:
    """Read a result of `write_result`. ValueError if any byte of it has changed."""
    from safetensors.torch import load as load_tensors

    content = path.read_bytes()
    saved = _CHECKSUM.search(content)
    plain = content if saved is None else content[: saved.start(1)] + b"0" * 64 + content[saved.end(1) :]
    if saved is None or sha256(plain).hexdigest().encode() != saved[1]:
        raise ValueError(f"{path} is damaged: delete it and give the command again, which measures it anew")
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    tensors, parts = load_tensors(content), {}
    for prefix, part in json.loads(header["__metadata__"]["result"]).items():
        ranks = Ranks(*(tensors[f"{prefix}{name}"] for name in ("text_to_image", "image_to_text", "owner")))
        part["ids"] = tuple(part["ids"])
        parts[prefix] = EvaluationResult(ranks=ranks, groups=tensors[f"{prefix}groups"], **part)
    return replace(parts[""], held_out=parts.get("held_out_"))


def write_sealed(path: Path, content: dict[str, Any]) -> None:
    """Write JSON with its checksum."""
    content = json.loads(json.dumps(content))  # as it is read again
    with replace_file(path) as partial:
        sealed = {"sha256": _json_hash(content), "content": content}
        partial.write_text(json.dumps(sealed, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read_sealed(path: Path) -> dict[str, Any]:
    """Read what `write_sealed` wrote. ValueError if it has changed."""
    try:
        sealed = read_json(path)
        intact = sealed["sha256"] == _json_hash(sealed["content"])
    except (ValueError, KeyError):
        intact = False
    if not intact:
        raise ValueError(f"{path} is damaged: delete it and give the command again, which measures it anew")
    found: dict[str, Any] = sealed["content"]
    return found


def _json_hash(content: Any) -> str:
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def file_hash(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()
