"""The table of commands, and the help on all of them. Imports nothing but the standard library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

AGAIN = "the same command continues"
RESUME = "continue with hnclip train --resume {out}"
NOTHING = "nothing was written"


@dataclass(frozen=True)
class Command:
    """A command.

    Args:
        options: "module:Class" in `hnclip.cli`: a dataclass of options, with a method `run`.
        help: one line for `hnclip --help`.
        interrupted: what to do after Ctrl-C; may name options, as {out}.
    """

    options: str
    help: str
    interrupted: str = NOTHING


COMMANDS = {
    "demo": Command("train:Demo", "fine-tune the bundled model with InfoNCE and HN-CLIP, write a report", AGAIN),
    "train": Command("train:Train", "fine-tune a model on image–caption pairs; --resume continues a run", RESUME),
    "eval": Command("evaluate:Eval", "retrieval metrics of models on benchmarks or your data"),
    "compare": Command("evaluate:Compare", "two models on the same queries, by a paired bootstrap"),
    "diagnose": Command("evaluate:Diagnose", "what your captions mean for training: similarity, advice", AGAIN),
    "index": Command("search:Index", "build or update an index of images", AGAIN),
    "search": Command("search:Search", "find images by a description or an image, or captions"),
    "serve": Command("search:Serve", "a web page to search an index, and an HTTP API"),
    "convert": Command("models:Convert", "read a model of any layout, write a Hugging Face directory or ONNX"),
    "interpolate": Command("models:Interpolate", "mix a model with its fine-tuned version, against forgetting"),
    "encode": Command("data:Encode", "images and captions to embeddings on disk, with any number of processes", AGAIN),
    "data check": Command("data:Check", "look for problems in data before training"),
    "data cache": Command("data:Cache", "list or delete cached images"),
    "prepare regions": Command("data:PrepareRegions", "regions of images, for methods that need them", AGAIN),
    "prepare text": Command("data:PrepareText", "captions without words of appearance", AGAIN),
    "study": Command("study:StudyOptions", "tables and figures of the paper, and more controls, on your data", AGAIN),
    "docs": Command("docs:Docs", "read the documentation"),
    "completion": Command("completion:Completion", "completion of commands and options for your shell"),
}

EXIT_CODES = """\
exit codes: 0 success; 1 an error, or invalid records of `data check`; 2 wrong arguments; 130 interrupted"""


def options_class(name: str) -> Any:
    """The dataclass of a command's options."""
    module, _, kind = COMMANDS[name].options.partition(":")
    return getattr(import_module(f"hnclip.cli.{module}"), kind)


def help_text(names: Sequence[str] = ()) -> str:
    """Help on some commands, or on all."""
    shown = names or [*COMMANDS]
    width = max(map(len, shown))
    lines = ["usage: hnclip COMMAND [options]        hnclip COMMAND --help for the options", ""]
    lines += [] if names else ["image–text retrieval for long, nearly identical captions", ""]
    lines += [f"  {name:<{width}}  {COMMANDS[name].help}" for name in shown]
    lines += [] if names else ["", f"  {'--version':<{width}}  print the version", "", EXIT_CODES]
    return "\n".join(lines)
