"""Numbers, durations, names and command-line options as text."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any


def counted(number: int, noun: str) -> str:
    """A number with its noun.

    >>> counted(1, "record"), counted(1200, "record")
    ('1 record', '1,200 records')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """A duration in one or two units.

    >>> duration(40), duration(700), duration(12_000)
    ('40 s', '12 min', '3 h 20 min')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def readable_size(count: int) -> str:
    """A number of bytes in a decimal unit.

    >>> readable_size(40), readable_size(1_530_000), readable_size(120_000_000_000)
    ('40 B', '1.5 MB', '120 GB')
    """
    size, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while size >= 999.5 and len(units) > 1:
        size /= 1000
        units.pop(0)
    return f"{size:.1f} {units[0]}" if size < 9.95 and units[0] != "B" else f"{size:.0f} {units[0]}"


def slugify(*names: str) -> str:
    """Names joined into a file name of at most 60 characters, of which the last are kept.

    >>> slugify("convergence", "scenes/park")
    'convergence-scenes-park'
    """
    plain = ("".join(letter if letter.isalnum() else "-" for letter in name).strip("-") for name in names)
    return "-".join(plain)[-60:].strip("-")


def option_words(config: Any, default: Any, prefix: str = "") -> list[str]:
    """The command-line options that turn the default into this configuration, with `prefix` before their names.

    Args:
        config, default: dataclasses of one type.
    """
    words: list[str] = []
    for spec in fields(config):
        value, usual = getattr(config, spec.name), getattr(default, spec.name)
        flag = prefix + spec.name.replace("_", "-")
        if is_dataclass(value):
            words += option_words(value, usual, f"{flag}.")
        elif value == usual:
            continue
        elif isinstance(value, bool):
            group, dot, name = flag.rpartition(".")
            words.append(f"--{flag}" if value else f"--{group}{dot}no-{name}")
        elif isinstance(value, dict):
            words += [f"--{flag}", *(str(item) for pair in value.items() for item in pair)]
        else:
            words += [f"--{flag}", str(value)]
    return words
