"""`hnclip completion`: a script that completes commands and options in a shell."""

from __future__ import annotations

import re
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field
from io import StringIO
from typing import Annotated, Literal

import tyro

from hnclip.cli.commands import COMMANDS, options_class
from hnclip.cli.options import Output, OutputGroup, Printed

BASH = """\
_hnclip() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" words=""
    case "${{COMP_WORDS[*]:1:COMP_CWORD-1}} " in
{cases}
        "") ;;
    esac
    if [ "$COMP_CWORD" = 1 ]; then words="{commands}"; fi
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
    output: OutputGroup = field(default_factory=Output)

    def run(self) -> Printed:
        flags = {name: command_flags(name) for name in COMMANDS}
        first = sorted({name.split()[0] for name in COMMANDS})
        seconds: dict[str, list[str]] = {}
        for name in COMMANDS:
            group, _, second = name.partition(" ")
            seconds.setdefault(group, []).extend([second] if second else [])
        if self.shell == "fish":
            text = _fish(first, seconds, flags)
        else:
            # The longer names first: `data check` before `data`.
            words = {**flags, **{group: names for group, names in seconds.items() if names}}
            order = sorted(words, key=lambda name: -len(name.split()))
            cases = "\n".join(f'        "{name} "*) words="{" ".join(words[name])}" ;;' for name in order)
            text = BASH.format(cases=cases, commands=" ".join(first))
            text = ZSH + text if self.shell == "zsh" else text
        return Printed(text.rstrip(), {"shell": self.shell, "script": text})


def command_flags(name: str) -> list[str]:
    """The options of a command, as its help names them."""
    return list(dict.fromkeys(re.findall(r"(?m)^\W*(--[a-z][\w.-]*)", command_help(name))))


def command_help(name: str) -> str:
    """What `hnclip NAME --help` prints."""
    printed = StringIO()
    with redirect_stdout(printed), suppress(SystemExit):
        tyro.cli(options_class(name), prog=f"hnclip {name}", args=["--help"])
    return printed.getvalue()


def _fish(first: list[str], seconds: dict[str, list[str]], flags: dict[str, list[str]]) -> str:
    lines = [f'complete -c hnclip -f -n __fish_use_subcommand -a "{" ".join(first)}"']
    for group, names in seconds.items():
        if names:
            missing = f"__fish_seen_subcommand_from {group}; and not __fish_seen_subcommand_from {' '.join(names)}"
            lines.append(f'complete -c hnclip -f -n "{missing}" -a "{" ".join(names)}"')
    for name, own in flags.items():
        seen = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in name.split())
        lines += [f'complete -c hnclip -n "{seen}" -l {flag.removeprefix("--")}' for flag in own]
    return "\n".join(lines) + "\n"
