"""Launches of kernels that overlap in part (programmatic dependent launch), on GPUs of compute capability 9.0 and 10.

The programs of an overlapping kernel start while those of the kernel before it on the stream still end, and then wait until that
kernel has ended and all its writes can be read. So the time from one kernel's end to the next one's begin is hidden, and what
nothing on the stream writes, such as weights, can be read during it.

An overlapping kernel has the constexpr OVERLAPS and calls `await_earlier` once in every program: before it reads or overwrites
anything that other kernels write. It is launched with `options`. A kernel may follow any other. One that does not overlap starts
after the one before it has ended. One that does may start when each program of the one before has ended or, in `await_earlier`, has
allowed it: so after any kernel, writes of that kernel may still be unseen before the wait. `await_earlier` allows it after its own
wait, so at most two of these kernels run at a time.

An engine launches kernels so only after it has compared and measured them on its own GPU (overlap_choice.py).
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Compute capabilities of the GPUs on which it is tried. RTX 50 (12.0) can overlap kernels, too, but a launch within a capture has
# failed there with an invalid handle (sglang#18596), and an error within a capture ends the engine.
CAPABILITIES = (90, 100, 103)
SMALLEST_DRIVER = 12030  # of CUDA 12.3, the first whose graphs can hold that kernels overlap ("CUDA Programming Guide", edge data)


class Way(enum.Enum):
    """The ways in which kernels follow each other. APART: each starts when the one before it has ended. OVERLAPPING: they overlap
    in part. WAITING: the kernels of OVERLAPPING, launched as with APART, so that their results are right on any GPU."""

    APART, WAITING, OVERLAPPING = range(3)


# The arguments of a launch: the constexpr OVERLAPS and Triton's option.
OPTIONS: dict[Way, dict[str, Any]] = {
    Way.APART: {"OVERLAPS": False},
    Way.WAITING: {"OVERLAPS": True},
    Way.OVERLAPPING: {"OVERLAPS": True, "launch_pdl": True},
}


class _Forced(threading.local):
    way: Way | None = None


_forced = _Forced()
_used = Way.APART


@triton.jit
def await_earlier(OVERLAPS: tl.constexpr):
    """Waits until the kernel before this one on the stream has ended and its writes can be read, then lets programs of the next
    kernel start. Does nothing if OVERLAPS is not set, because a kernel without it starts only then."""
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()


def use(overlaps: bool) -> None:
    """Sets whether this process launches kernels so that they overlap. Called before the first launch."""
    global _used
    _used = Way.OVERLAPPING if overlaps else Way.APART


def is_used() -> bool:
    """Returns whether this process launches kernels so that they overlap."""
    return _used is Way.OVERLAPPING


@contextmanager
def forced(way: Way) -> Iterator[None]:
    """Returns a context in which all kernels that this thread launches follow each other in this way. Contexts may be nested."""
    before, _forced.way = _forced.way, way
    try:
        yield
    finally:
        _forced.way = before


def options() -> dict[str, Any]:
    """Returns the arguments with which overlapping kernels are launched."""
    return OPTIONS[_forced.way or _used]
