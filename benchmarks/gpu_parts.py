"""The parts of `make gpu`, and the three commands that run them. Each part is a process of its own with seconds of its own."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class Part:
    """module and arguments; limit_s: the time that is its own, whatever the others do; in_workers: whether pytest runs it in
    several processes where it can."""

    name: str
    arguments: tuple[str, ...]
    limit_s: float
    in_workers: bool = False

    @property
    def is_tests(self) -> bool:
        return self.arguments[0] == "pytest"

    def command(self) -> list[str]:
        """Returns its arguments as it is run with. Asked when it begins: pytest-xdist may have been installed just before."""
        return [*self.arguments, *(_workers() if self.in_workers else ())]


MOST_WORKERS = 14  # of 16 cores: Triton compiles in each of them


def _workers() -> tuple[str, ...]:
    """Kernels are compiled in several processes where pytest can have them."""
    number = max(1, min(MOST_WORKERS, (os.cpu_count() or 1) - 2))
    return ("-n", str(number)) if importlib.util.find_spec("xdist") else ()


# Another torch's warnings are no failures; addopts of pyproject.toml refuses settings of plugins that may be missing there.
SETTINGS = ("-W", "default", "-o", "addopts=", "-o", "timeout=90", "-p", "no:cacheprovider", "-p", "benchmarks.gpu_failures")
TESTS = ("pytest", "-q", *SETTINGS)

# The most valuable first: where time does not suffice, that of the first is cut last.
COMMANDS: dict[str, tuple[Part, ...]] = {
    "correctness": (
        Part("cache", ("benchmarks.gpu_cache",), 25),
        Part("tests", (*TESTS, "tests/gpu"), 180, in_workers=True),
        Part("soak", ("benchmarks.gpu_soak",), 110),
        Part("sanitizer", ("benchmarks.gpu_sanitizer",), 140),
    ),
    "speed": (
        Part("forward", ("benchmarks.gpu_forward",), 85),
        Part("mixed", ("benchmarks.gpu_mixed",), 64),
        Part("adapters", ("benchmarks.gpu_adapters",), 28),
        Part("forward-1b", ("benchmarks.gpu_forward", "--model", "1b"), 46),
        Part("sampling", ("benchmarks.gpu_sampling",), 43),
        Part("profile", ("benchmarks.gpu_profile",), 44),
        Part("kernels", ("benchmarks.gpu_kernels",), 54),
        Part("throughput", ("benchmarks.gpu_throughput", "--engine", "ours"), 40),
        Part("ncu", ("benchmarks.gpu_ncu",), 36),
    ),
    "system": (
        Part("server", ("benchmarks.gpu_server", "--what", "serve"), 145),
        Part("cohost", ("benchmarks.gpu_server", "--what", "cohost"), 66),
        Part("evictions", ("benchmarks.gpu_evictions",), 80),
        Part("adoption", ("benchmarks.gpu_adoption",), 80),
        Part("memory", ("benchmarks.gpu_memory",), 35),
        Part("loading", ("benchmarks.gpu_loading", "--rounds", "1"), 45),
    ),
}
# Run by their names alone.
OTHERS = (
    Part("peer", ("benchmarks.gpu_throughput", "--engine", "both"), 130),
    Part("confined", ("benchmarks.gpu_server", "--what", "confined"), 150),
    Part("tiles", ("benchmarks.gpu_tiles",), 240),
    Part("split", ("benchmarks.gpu_split",), 400),
)
PARTS = {part.name: part for parts in (*COMMANDS.values(), OTHERS) for part in parts}
ALL = ",".join(COMMANDS)


def chosen(names: str) -> list[Part]:
    """Returns the parts of commands and parts named with commas between, each once, in that order. Raises KeyError with a name
    that is unknown."""
    parts: dict[str, Part] = {}
    for name in names.split(","):
        for part in COMMANDS[name] if name in COMMANDS else (PARTS[name],):
            parts[part.name] = part
    return list(parts.values())
