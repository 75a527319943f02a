"""What Parquet files and Hugging Face datasets have in common: columns in memory as Arrow keeps them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hnclip.data.needs import needs


def picture_columns(schema: Any) -> list[str]:
    """The columns that hold pictures: bytes, or Hugging Face's struct of bytes and path."""
    types = needs("pyarrow", "Parquet files need", "data").types

    def is_bytes(kind: Any) -> bool:
        return types.is_binary(kind) or types.is_large_binary(kind)

    def holds_picture(kind: Any) -> bool:
        if types.is_struct(kind):
            return any(field.name == "bytes" and is_bytes(field.type) for field in kind)
        return is_bytes(kind)

    return [field.name for field in schema if holds_picture(field.type)]


def plain_rows(batch: Any) -> Iterator[dict[str, Any] | UnicodeDecodeError]:
    """The rows of a batch as Python values; in place of a row with text that is not UTF-8, the error."""
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:
        for row in range(batch.num_rows):
            try:
                yield batch.slice(row, 1).to_pylist()[0]
            except UnicodeDecodeError as error:
                yield error
