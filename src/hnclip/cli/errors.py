"""Errors that a user can do something about, and those of the program."""

from __future__ import annotations

import json
from pathlib import Path

PACKAGE = Path(__file__).parents[1]


def user_message(error: Exception) -> str | None:
    """The message of an error that a user can do something about; None for one of the program, which needs its
    traceback.

    Errors of the operating system, of input that cannot be decoded, and those that this package raises itself are for
    the user. A ValueError from inside a library says that we called it wrongly.
    """
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        from hnclip.config import one_line

        return one_line(error)
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return f"not enough memory; smaller batches need less (--micro-batch, --batch): {error}"
    if isinstance(error, OSError | UnicodeError | json.JSONDecodeError):
        return str(error)
    if isinstance(error, ValueError | RuntimeError) and error.__traceback__ is not None:
        trace = error.__traceback__
        while trace.tb_next is not None:
            trace = trace.tb_next
        if Path(trace.tb_frame.f_code.co_filename).is_relative_to(PACKAGE):
            return str(error)
    return None
