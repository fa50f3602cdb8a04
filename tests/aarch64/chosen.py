"""What the emulated run runs, each with its reason, and what it leaves out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PYTHON = "python3"
KERNEL_CACHE = ".pytest_cache/kernels"  # tests.kernel_cache has it


@dataclass(slots=True, frozen=True)
class Item:
    """argv is run in the copy of the clone."""

    name: str
    why: str
    argv: Sequence[str]


def tests(*args: str) -> Sequence[str]:
    """A test may take as long as it does under emulation."""
    return (PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "timeout=1800", *args)


_INSTALL = """
python3 -m pip install -q --root-user-action=ignore --no-deps --no-build-isolation --target /tmp/installed .
cd /
export PYTHONPATH=/tmp/installed
for command in hearthd hearth; do /tmp/installed/bin/$command --help | head -3; done
"""

CHOSEN = (
    Item("versions", "what is there, and what the processor is said to have", (PYTHON, "-m", "tests.aarch64.versions")),
    Item("install", "pip builds and installs the project, and its commands start", ("sh", "-ec", _INSTALL)),
    Item(
        "memory",
        "mappings, system calls, direct reads: Linux differs between architectures here",
        tests(
            "tests/engine/test_memory.py",
            "tests/engine/test_handles.py",
            "tests/loader/test_direct_io.py",
            # qemu-user answers MADV_POPULATE_WRITE with success and does nothing
            "--deselect=tests/engine/test_memory.py::test_a_part_of_a_range_is_prepared_and_keeps_its_content",
            # and knows neither cachestat nor RWF_NOWAIT, so nothing is found in the page cache
            "--deselect=tests/loader/test_direct_io.py::test_the_page_cache_is_asked",
            "--deselect=tests/loader/test_direct_io.py::test_half_a_range_in_the_cache_is_enough",
        ),
    ),
    Item("kernels", "they compile (kept for the next run)", (PYTHON, "-m", "engine.warm", KERNEL_CACHE)),
    Item("operations", "every kernel against its reference twin, and calls of machine code", tests("tests/engine/ops")),
    Item("models", "whole models against transformers", tests("tests/engine/test_models.py")),
    Item("serving", "a daemon serves a chat in float32, in bfloat16 and with int8 weights", tests("tests/aarch64/serving.py")),
    Item("crash", "an engine that is killed under its streams: they go on, with the same text", tests("tests/e2e/test_crash.py")),
)

LEFT_OUT = (
    ("tests of daemon, scheduler and config", "Python alone, which is the same on every architecture"),
    ("tests/engine/test_threads_apart.py", "a thousand large products, minutes each; it reads /proc, as everywhere"),
    ("tests/gpu, Triton", "no CUDA here; Triton's interpreter is numpy"),
    ("other tests of tests/e2e", "what they add is Python's; each takes minutes where importing torch takes 13 s"),
    ("benchmarks", "what an emulator takes says nothing of a processor"),
)
