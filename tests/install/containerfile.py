"""Containerfiles, read as far as ours goes: stages of instructions."""

from __future__ import annotations

import re
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Instruction:
    """text: what follows the name, with continued lines joined."""

    name: str
    text: str


@dataclass(slots=True)
class Stage:
    """image: what it is built from. name: "" for a stage without one. instructions: those behind FROM."""

    image: str
    name: str
    instructions: list[Instruction] = field(default_factory=list)

    def all(self, name: str) -> list[str]:
        return [one.text for one in self.instructions if one.name == name]


def arguments_before(text: str) -> dict[str, str]:
    """ARG lines before the first FROM: name -> default."""
    head = text.partition("\nFROM ")[0]
    return dict(re.findall(r"^ARG (\w+)=(\S+)$", head, re.M))


def read(text: str) -> list[Stage]:
    """Raises ValueError for a line that is no instruction."""
    stages: list[Stage] = []
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines():
        found = re.match(r"([A-Z]+)\s+(\S.*)$", line)
        if found is None:
            raise ValueError(f"no instruction: {line!r}")
        name, rest = found.groups()
        if name == "FROM":
            image, _, called = rest.partition(" AS ")
            stages.append(Stage(image, called))
        elif stages:
            stages[-1].instructions.append(Instruction(name, rest))
        elif name != "ARG":
            raise ValueError(f"before the first FROM: {line!r}")
    return stages
