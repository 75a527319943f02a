"""`hnclip completion`: a script that completes commands and options in a shell.

Own scripts, because those of tyro complete no paths of positional arguments, and start Python for every word.
"""

from __future__ import annotations

import re
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field
from io import StringIO
from typing import Annotated, Literal

import tyro

from hnclip.cli.commands import COMMANDS, options_class
from hnclip.cli.options import Output, OutputGroup, Printed, parse_options

# Files where no command is expected and no option begun.
BASH = """\
_hnclip() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" words=""
    case "${{COMP_WORDS[*]:1:COMP_CWORD-1}} " in
        " ") words="{commands}" ;;
{cases}
    esac
    [[ $current == -* || $words != -* ]] || words=""
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _hnclip hnclip
"""
ZSH = "autoload -U +X bashcompinit && bashcompinit\n"


@dataclass(frozen=True)
class Completion:
    """Print a script for a shell. Bash: add `source <(hnclip completion bash)` to ~/.bashrc; zsh: the same with zsh to
    ~/.zshrc; fish: `hnclip completion fish > ~/.config/fish/completions/hnclip.fish`."""

    shell: Annotated[tyro.conf.Positional[Literal["bash", "zsh", "fish"]], tyro.conf.arg(metavar="bash|zsh|fish")]
    """The shell that reads the script."""
    output: OutputGroup = field(default_factory=Output)

    def run(self) -> Printed:
        flags = {name: command_flags(name) for name in COMMANDS}
        first = sorted({name.split()[0] for name in COMMANDS})
        seconds: dict[str, list[str]] = {}
        for group, *second in map(str.split, COMMANDS):
            seconds.setdefault(group, []).extend(second)
        groups = {group: names for group, names in seconds.items() if names}
        script = (_fish if self.shell == "fish" else _bash)(first, groups, flags)
        script = ZSH + script if self.shell == "zsh" else script
        return Printed(script.rstrip(), {"shell": self.shell, "script": script})


def command_flags(name: str) -> list[str]:
    """The options of a command, as its help names them."""
    return list(dict.fromkeys(re.findall(r"(?m)^\W*(--[a-z][\w.-]*)", command_help(name))))


def command_help(name: str) -> str:
    """What `hnclip NAME --help` prints."""
    printed = StringIO()
    with redirect_stdout(printed), suppress(SystemExit):
        parse_options(options_class(name), name, ["--help"])
    return printed.getvalue()


def _bash(first: list[str], groups: dict[str, list[str]], flags: dict[str, list[str]]) -> str:
    # The longer names first: `data check` before `data`.
    words = sorted({**flags, **groups}.items(), key=lambda item: -len(item[0].split()))
    cases = "\n".join(f'        "{name} "*) words="{" ".join(found)}" ;;' for name, found in words)
    return BASH.format(cases=cases, commands=" ".join(first))


def _fish(first: list[str], groups: dict[str, list[str]], flags: dict[str, list[str]]) -> str:
    lines = [f'complete -c hnclip -f -n __fish_use_subcommand -a "{" ".join(first)}"']
    for group, names in groups.items():
        missing = f"__fish_seen_subcommand_from {group}; and not __fish_seen_subcommand_from {' '.join(names)}"
        lines.append(f'complete -c hnclip -f -n "{missing}" -a "{" ".join(names)}"')
    for name, own in flags.items():
        seen = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in name.split())
        lines += [f'complete -c hnclip -n "{seen}" -l {flag.removeprefix("--")}' for flag in own]
    return "\n".join(lines) + "\n"
