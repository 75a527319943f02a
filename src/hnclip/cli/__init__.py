"""The `hnclip` command: one table of commands, one way to run them.

A command is a dataclass of options, from which tyro builds its help, with a method `run`, which calls the Python
API and returns what is printed. It is imported when the command is called, so that `hnclip --help` is fast.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from typing import Any

from hnclip.cli.commands import COMMANDS, NOTHING, help_text, options_class
from hnclip.cli.errors import user_message
from hnclip.util.console import configure_logging
from hnclip.util.text import did_you_mean

log = logging.getLogger("hnclip")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Returns 0 on success, 1 for an error with a message, 2 for wrong arguments, 130 if interrupted;
    an error of the program itself is raised with its traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # of a terminal or file whose encoding lacks → or γ
            stream.reconfigure(errors="replace")
    words = [*(sys.argv[1:] if arguments is None else arguments)]
    if not words or words[0] in ("-h", "--help", "help"):
        print(help_text())
        return 0
    if words[0] == "--version":
        from hnclip import __version__

        print(f"hnclip {__version__}")
        return 0
    # Some commands have two words: hnclip data check.
    name = next((name for name in (" ".join(words[:2]), words[0]) if name in COMMANDS), None)
    if name is None:
        return _unknown(words)
    return _run(name, words[len(name.split()) :])


def _unknown(words: Sequence[str]) -> int:
    """Help on a group of commands, or what the command may have been meant to be."""
    group = [name for name in COMMANDS if name.startswith(f"{words[0]} ")]
    asked = bool(group) and (len(words) == 1 or words[1] in ("-h", "--help"))
    if asked:
        print(help_text(group))
        return 0 if len(words) > 1 else 2
    name = " ".join(words[:2]) if group else words[0]
    hint = did_you_mean(name, group or {word for known in COMMANDS for word in (known, known.split()[0])})
    print(f"hnclip: there is no command {name!r}{hint}\n\n{help_text(group)}", file=sys.stderr)
    return 2


def _run(name: str, words: Sequence[str]) -> int:
    configure_logging()  # until the options are read
    options: Any = None
    try:
        options = read_options(name, words)
        output = options.output
        configure_logging(quiet=output.quiet or output.json, log_file=output.log_file)
        result = options.run()
        if result is None:
            return 0
        print(json.dumps(result.to_dict(), default=str) if output.json else result.to_text())
        return getattr(result, "exit_code", 0)
    except SystemExit as done:  # help, or options that do not exist
        return int(done.code or 0)
    except BrokenPipeError:  # the reader of the output has closed it
        sys.stdout = None  # otherwise the interpreter tries to flush it on exit
        return 1
    except KeyboardInterrupt:
        again = COMMANDS[name].interrupted.format(**vars(options)) if options else NOTHING
        log.error(f"hnclip {name}: interrupted; {again}")
        return 130
    except Exception as error:
        message = user_message(error)
        if message is None or (options and options.output.traceback):
            raise
        log.error(f"hnclip {name}: {message}")
        return 1 if options else 2


def read_options(name: str, words: Sequence[str]) -> Any:
    """The options of a command from the command line; ValueError if they are wrong."""
    from hnclip.cli.options import parse_options  # imports tyro

    kind = options_class(name)
    words = positional_data(words) if "data" in kind.__dataclass_fields__ else words
    return kind.parse(words) if hasattr(kind, "parse") else parse_options(kind, name, words)


def positional_data(words: Sequence[str]) -> list[str]:
    """The words with the values of `--data` moved to the positional arguments: data may be given in both ways."""
    moved: list[str] = []
    others: list[str] = []
    taking = False
    for word in words:
        if word == "--data":
            taking = True
        elif word.startswith("--data="):
            moved.append(word.removeprefix("--data="))
        elif taking and not word.startswith("-"):
            moved.append(word)
        else:
            taking = False
            others.append(word)
    if "--data" in words and not moved:
        raise ValueError("--data needs a value")
    first = next((place for place, word in enumerate(others) if word.startswith("-") and word != "-"), len(others))
    return [*others[:first], *moved, *others[first:]]
