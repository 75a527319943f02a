"""Numbers, durations and names for people."""

from __future__ import annotations


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


def slugify(*names: str) -> str:
    """Names joined into a file name of at most 60 characters, of which the last are kept.

    >>> slugify("convergence", "scenes/park")
    'convergence-scenes-park'
    """
    plain = ("".join(letter if letter.isalnum() else "-" for letter in name).strip("-") for name in names)
    return "-".join(plain)[-60:].strip("-")
