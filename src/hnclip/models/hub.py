"""Models by their name on the Hugging Face hub: fetched once, then from the local cache; offline mode respected."""

from __future__ import annotations

import re
from pathlib import Path

_NAME = re.compile(r"[\w][\w.-]*/[\w][\w.-]*(@[\w./-]+)?")
_SMALL = ["*.json", "*.txt", "*.model", "*.gz"]
_WEIGHTS = (["*.safetensors"], ["*.bin"])  # the second only where the first is not to be had


def looks_like_hub_name(name: str) -> bool:
    """`owner/model`, or `owner/model@revision`."""
    return _NAME.fullmatch(name) is not None


def fetch_model(name: str) -> Path:
    """The local directory of a hub model. Only what is needed to open it is fetched, no code and no copies in other
    formats. With HF_HUB_OFFLINE=1 nothing is asked for: the model must be in the cache."""
    from huggingface_hub import constants, snapshot_download

    repository, _, revision = name.partition("@")
    try:
        for weights in _WEIGHTS:
            directory = Path(
                snapshot_download(
                    repository, revision=revision or None, allow_patterns=[*_SMALL, *weights], ignore_patterns=["*/*"]
                )
            )
            if any(directory.glob(weights[0])):
                return directory
    except Exception as error:  # the hub client raises its own and its transport's errors for one thing: no model
        where = "in the local cache, and HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "on the hub"
        raise ValueError(
            f"model {name!r} is no file or directory here, and it was not found {where} ({_first_line(error)})"
        ) from error
    raise ValueError(f"hub model {name!r} has no weights that can be read: neither .safetensors nor .bin")


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
