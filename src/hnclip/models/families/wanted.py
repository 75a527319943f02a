"""What is asked of a tower beside its global vectors."""

from __future__ import annotations

from typing import Literal, TypeAlias

Wanted: TypeAlias = Literal["vectors", "tokens", "hidden"]
