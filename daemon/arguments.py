"""argparse whose errors are one line: what is wrong, what was meant perhaps, where to look."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator
from typing import NoReturn

from daemon.errors import EXIT_USAGE

_UNKNOWN_FLAG = re.compile(r"unrecognized arguments: (.*)\Z", re.S)
_UNKNOWN_CHOICE = re.compile(r"argument (\S+): invalid choice: '(.*)' \(choose from ", re.S)


class ArgumentParser(argparse.ArgumentParser):
    """Its sub-parsers are of the same kind."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: {self._plain(message)}\n")

    def _plain(self, message: str) -> str:
        unknown = _UNKNOWN_FLAG.match(message)
        if unknown is not None:
            word = unknown[1].split(" ")[0]
            if not word.startswith("-"):
                return f"{word!r} is one word too many; `{self.prog} --help` tells what it takes"
            return f"there is no {word}{_near(word.partition('=')[0], _flags(self))}; `{self.prog} --help` lists what there is"
        choice = _UNKNOWN_CHOICE.match(message)
        if choice is not None:
            allowed = next((list(map(str, one.choices or ())) for one in self._actions if choice[1] in _names(one)), [])
            near = _near(choice[2], allowed)
            return f"{choice[1]}: {choice[2]!r} is " + (f"unknown{near}" if near else f"none of {', '.join(allowed)}")
        return f"{message.removeprefix('argument ')}; `{self.prog} --help` tells what it takes"


def _names(action: argparse.Action) -> set[str]:
    """By which an error may call it."""
    return {"/".join(action.option_strings), str(action.metavar), action.dest}


def _flags(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Its own and those of its commands."""
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _flags(command)


def _near(word: str, known: Iterable[str]) -> str:
    from difflib import get_close_matches  # for errors alone

    close = get_close_matches(word, list(known), 1, 0.6)
    return f"; did you mean {close[0]}?" if close else ""
