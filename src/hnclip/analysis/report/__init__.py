"""A report: one HTML file that needs nothing else, with its figures and numbers as files beside it."""

from __future__ import annotations

from .blocks import Beside, Block, Companions, Drawing, Findings, Gap, Table, Text
from .page import HTML, JSON, Section, write_report

__all__ = [
    "HTML",
    "JSON",
    "Beside",
    "Block",
    "Companions",
    "Drawing",
    "Findings",
    "Gap",
    "Section",
    "Table",
    "Text",
    "write_report",
]
