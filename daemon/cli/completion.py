"""Implements `hearth completion bash|zsh|fish`, which prints a script that is generated from the parser, so that it has all
commands and flags. The script asks the daemon for the models' names.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field

from daemon.cli.client import Client

SHELLS = ("bash", "zsh", "fish")
# metavars of positional arguments that are names of models
_MODELS = ("NAME", "MODEL|REQUEST")
# prints one name per line; it relies on the JSON having one value per line
_NAMES = """hearth %s models --json 2>/dev/null | sed -n 's/^ *"name": "\\(.*\\)",$/\\1/p'"""


@dataclass(slots=True)
class Option:
    flags: list[str]
    help: str
    value: str  # metavar of the flag's value, "" for a switch


@dataclass(slots=True)
class Command:
    name: str
    help: str
    options: list[Option] = field(default_factory=list)
    argument: str = ""  # metavar of the positional argument
    choices: list[str] = field(default_factory=list)  # allowed values of the positional argument

    @property
    def wants_model(self) -> bool:
        return self.argument in _MODELS


def options_of(parser: argparse.ArgumentParser) -> list[Option]:
    found = []
    for action in parser._actions:
        if action.option_strings and action.help != argparse.SUPPRESS:
            value = "" if action.nargs == 0 else str(action.metavar or action.dest.upper())
            found.append(Option(list(action.option_strings), action.help or "", value))
    return found


def commands_of(parser: argparse.ArgumentParser) -> list[Command]:
    """Returns all commands that `hearth`'s parser defines, each with its help, options and argument, in the parser's order."""
    (group,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    helps = {choice.dest: choice.help or "" for choice in group._choices_actions}
    found = []
    for name, one in group.choices.items():
        command = Command(name, helps[name], options_of(one))
        for action in one._actions:
            if not action.option_strings:
                command.argument = str(action.metavar or action.dest.upper())
                command.choices = [str(choice) for choice in action.choices or ()]
        found.append(command)
    return found


def completion(client: Client, options: argparse.Namespace) -> None:
    print(script(options.shell, options.parser), end="")


def script(shell: str, parser: argparse.ArgumentParser) -> str:
    makers: dict[str, Callable[[list[Command]], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
    return makers[shell](commands_of(parser))


def _bash(commands: list[Command]) -> str:
    cases = []
    for command in commands:
        flags = " ".join(flag for option in command.options for flag in option.flags)
        words = "$(_hearth_models)" if command.wants_model else " ".join(command.choices)
        cases.append(f'        {command.name}) flags="{flags}"; words="{words}" ;;')
    every = " ".join(command.name for command in commands)
    return f"""# bash completion of hearth, made by `hearth completion bash`
_hearth_models() {{
    {_NAMES % '"${control[@]}"'}
}}
_hearth() {{
    local cur=${{COMP_WORDS[COMP_CWORD]}} command="" flags="--json --control --help" words="{every}" i
    local -a control=()
    COMPREPLY=()
    if [[ ${{COMP_WORDS[COMP_CWORD - 1]}} == --control ]]; then
        mapfile -t COMPREPLY < <(compgen -f -- "$cur")
        return
    fi
    for ((i = 1; i < COMP_CWORD; i++)); do
        case ${{COMP_WORDS[i]}} in
            --control) control=(--control "${{COMP_WORDS[i + 1]}}"); ((i++)) ;;
            -*) ;;
            *) [[ -n $command ]] && return; command=${{COMP_WORDS[i]}} ;;
        esac
    done
    [[ $cur == -* && -z $command ]] && words=""
    case $command in
{chr(10).join(cases)}
    esac
    [[ $cur == -* ]] && words=$flags
    mapfile -t COMPREPLY < <(compgen -W "$words" -- "$cur")
}}
complete -F _hearth hearth
"""


def _quoted(text: str) -> str:
    """Returns the text without single quotes, so that it can be put between single quotes in both zsh and fish. Colons and brackets
    are special in zsh's _arguments, too; `_zsh` replaces those."""
    return text.replace("'", "")


def _zsh(commands: list[Command]) -> str:
    lines = [f"        '{command.name}:{_quoted(command.help)}'" for command in commands]
    cases = []
    for command in commands:
        specs = []
        for option in command.options:
            text = _quoted(option.help).replace("[", "(").replace("]", ")").replace(":", ";")
            value = f":{option.value.lower()}:_files" if option.value else ""
            specs += [f"'{flag}[{text}]{value}'" for flag in option.flags]
        if command.wants_model:
            specs.append("'1:model:_hearth_models'")
        elif command.choices:
            specs.append(f"'1:{command.argument.lower()}:({' '.join(command.choices)})'")
        cases.append(f"        {command.name}) _arguments {' '.join(specs)} ;;")
    return f"""#compdef hearth
# zsh completion of hearth, made by `hearth completion zsh`
_hearth_models() {{
    local -a names
    names=("${{(@f)$({_NAMES % ""})}}")
    compadd -a names
}}
_hearth() {{
    local -a commands
    commands=(
{chr(10).join(lines)}
    )
    local context state line
    _arguments -C '--json[print JSON]' '--control[control socket]:socket:_files' '1:command:->command' '*::argument:->argument'
    case $state in
        command) _describe -t commands command commands ;;
        argument)
            case $line[1] in
{chr(10).join("        " + case for case in cases)}
            esac ;;
    esac
}}
_hearth "$@"
"""


def _fish(commands: list[Command]) -> str:
    lines = [
        "# fish completion of hearth, made by `hearth completion fish`",
        "function __hearth_models",
        f"    {_NAMES % ''}",
        "end",
        "complete -c hearth -f",
    ]
    for command in commands:
        lines.append(f"complete -c hearth -n __fish_use_subcommand -a {command.name} -d '{_quoted(command.help)}'")
        seen = f"-n '__fish_seen_subcommand_from {command.name}'"
        for option in command.options:
            flags = " ".join(f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}" for flag in option.flags)
            lines.append(f"complete -c hearth {seen} {flags}{' -r -F' if option.value else ''} -d '{_quoted(option.help)}'")
        if command.wants_model:
            lines.append(f"complete -c hearth {seen} -a '(__hearth_models)'")
        elif command.choices:
            lines.append(f"complete -c hearth {seen} -a '{' '.join(command.choices)}'")
    return "\n".join(lines) + "\n"
