"""What the pages of docs/ tell an administrator to write or type, read out of their text, so that the text itself is tried."""

from __future__ import annotations

import re
from typing import TypeVar

FENCE = re.compile(r"^```\w*\n(.*?)^```$", re.M | re.S)
SPAN = re.compile(r"`([^`]+)`")

T = TypeVar("T")


class NotFound(Exception):
    """The page has no such text, or more than one; the message says which."""


def block(page: str, containing: str) -> str:
    """Returns the one fenced block that contains a text. Raises NotFound."""
    return _only([found for found in FENCE.findall(page) if containing in found], f"a block with {containing!r}")


def spans(page: str, containing: str) -> list[str]:
    """Returns what is set as code in the one paragraph that contains a text, line breaks taken as spaces. Raises NotFound."""
    paragraphs = [one for one in FENCE.sub("", page).split("\n\n") if containing in one]
    return [" ".join(found.split()) for found in SPAN.findall(_only(paragraphs, f"a paragraph with {containing!r}"))]


def typed_after(shown: str, command: str) -> str:
    """Returns what a block shows between a command and the next one: the text that is written into an editor. Raises NotFound."""
    lines = shown.splitlines(keepends=True)
    at = _only([number for number, line in enumerate(lines) if line.startswith("$") and command in line], f"$ … {command}")
    rest = lines[at + 1 :]
    return "".join(rest[: next((number for number, line in enumerate(rest) if line.startswith("$")), len(rest))])


def commands(shown: str) -> list[str]:
    """Returns the commands of a block, as root types them: without `$`, sudo and comments."""
    lines = [line.removeprefix("$ ").partition("   ")[0].strip() for line in shown.splitlines() if line.startswith("$ ")]
    return [line.replace("sudo ", "") for line in lines]


def _only(found: list[T], what: str) -> T:
    if len(found) != 1:
        raise NotFound(f"{what}: there are {len(found)}, not one")
    return found[0]
