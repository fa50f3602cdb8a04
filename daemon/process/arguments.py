"""A variant of argparse whose errors are one line: what is wrong, what was perhaps meant, and where to find help."""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from config.nearest import nearest
from daemon.errors import EXIT_USAGE

_UNKNOWN_CHOICE = re.compile(r"argument (\S+): invalid choice: '(.*)' \(choose from ", re.S)


class ArgumentParser(argparse.ArgumentParser):
    """An argparse parser that reports an error on one line and exits with EXIT_USAGE. Its sub-parsers are of this class, too."""

    _first_flags: Sequence[str] = ()  # the words that parse_args was given before the first that is not a flag

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Returns the parsed arguments; the parameters are argparse's. Exits with an error for an argument that is not accepted.
        That error comes from the parser of the given command, which suggests the command's own flags."""
        words = sys.argv[1:] if args is None else args
        self._first_flags = list(itertools.takewhile(lambda word: word.startswith("-"), words))
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self._command(found)._refuse(unknown[0])
        return found

    def error(self, message: str) -> NoReturn:
        if _UNKNOWN_CHOICE.match(message) is not None:  # perhaps the value of a flag that there is not
            for word in self._first_flags:
                if not any(flag.startswith(word.partition("=")[0]) for flag in self._flags()):  # argparse takes beginnings of flags
                    self._refuse(word)
        self.exit(EXIT_USAGE, f"{self.prog}: {self._plain(message)}\n")

    def _command(self, found: argparse.Namespace) -> ArgumentParser:
        """Returns the sub-parser of the command that was given, or this parser if it has no commands. found: the arguments that
        were parsed."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                return action.choices.get(getattr(found, action.dest), self)
        return self

    def _refuse(self, word: str) -> NoReturn:
        """Ends the program with an error about `word`, an argument that is not accepted, which may suggest a similar flag."""
        if not word.startswith("-"):
            text = f"{word!r} is one word too many; `{self.prog} --help` tells what it takes"
        else:
            text = f"there is no {word}{_near(word.partition('=')[0], self._flags())}; `{self.prog} --help` lists what there is"
        self.exit(EXIT_USAGE, f"{self.prog}: {text}\n")

    def _flags(self) -> list[str]:
        return [flag for action in self._actions for flag in action.option_strings]

    def _plain(self, message: str) -> str:
        choice = _UNKNOWN_CHOICE.match(message)
        if choice is not None:
            allowed = next((list(map(str, one.choices or ())) for one in self._actions if choice[1] in _names(one)), [])
            near = _near(choice[2], allowed)
            return f"{choice[1]}: {choice[2]!r} is " + (f"unknown{near}" if near else f"none of {', '.join(allowed)}")
        return f"{message.removeprefix('argument ')}; `{self.prog} --help` tells what it takes"


def _names(action: argparse.Action) -> set[str]:
    """Returns the names by which an error message of argparse may call the argument that `action` describes."""
    return {"/".join(action.option_strings), str(action.metavar), action.dest}


def _near(word: str, known: Iterable[str]) -> str:
    close = nearest(word, known)
    return f"; did you mean {close}?" if close else ""
