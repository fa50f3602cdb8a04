"""Chooses the kernel that multiplies few rows on a GPU: ours (triton_linear), or the one that torch picks. Both are measured, once
for each size, in idle time. Until then torch's is used. What was chosen is kept in a file for the next engine.

Shapes: M rows, K inputs, N outputs.
"""

from __future__ import annotations

import hashlib
import json
import logging
import statistics
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import triton
from torch import Tensor
from torch.nn import functional

from engine.cuda.kernels import triton_linear
from loader import cached_file
from loader.threads import Thread

log = logging.getLogger("engine")

SOURCE = Path(triton_linear.__file__)
REPEATS = 7
MEASURE_TRIES = 3  # after so many tries torch's kernel stays: the times are too close, or vary too much, to choose by
FLUSH_BYTES = 128 << 20  # written between two measurements; more than the cache holds, so that weights come from memory
HEAD_START = 32  # such writes before the first measurement; they take 1.5 ms on an H100, in which the host launches all the rest
HEAD_START_TRIES = 3  # each try has twice the head start of the one before

# Rows, N, K and dtype of a product.
Size = tuple[int, int, int, torch.dtype]

Name = TypeVar("Name")

_ours_wins: dict[Size, bool] = {}
_tries: Counter[Size] = Counter()
_kept_in: Path | None = None


class _Noting(threading.local):
    weights: list[Tensor] | None = None  # of this thread's products; other threads' are not noted


_noting = _Noting()


class _Launching(threading.local):
    both = False  # whether this thread's products of few rows launch both kernels


_launching = _Launching()


def launches_both() -> bool:
    """Returns whether the calling thread is inside `both_kernels`, and so must launch all kernels that could serve a product."""
    return _launching.both


def few_rows(num_rows: int) -> int:
    """Returns the number of rows for which the kernel of a product of num_rows rows is chosen: num_rows rounded up to 1, 2 or 4.
    Returns 0 if num_rows is too large for our kernel."""
    return 0 if num_rows > triton_linear.MAX_ROWS else 1 << (num_rows - 1).bit_length()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns x [M, K] @ weight [N, K] transposed, plus bias [N], by the kernel that was measured to be the faster one; torch's for
    sizes that have not been measured, or have too many rows for ours."""
    if _noting.weights is not None:
        _noting.weights.append(weight)
    rows = few_rows(x.shape[0])
    if rows and _launching.both:
        launch_ours(x, weight, bias)
    if rows and _ours_wins.get((rows, *weight.shape, x.dtype), False):
        return ours(x, weight, bias)
    return functional.linear(x, weight, bias)


def ours(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = x.new_empty(x.shape[0], weight.shape[0])
    triton_linear.few_rows_linear(x, weight, bias, out)
    return out


def launch_ours(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Launches our kernel without a bias, as `measure` does, and again with the bias if there is one, and drops the results. This
    makes Triton compile every form that later steps may need."""
    ours(x, weight, None)
    if bias is not None:
        ours(x, weight, bias)


@contextmanager
def both_kernels() -> Iterator[None]:
    """Inside the context, products of this thread launch all kernels that may serve them in a later step, not only the one that is
    chosen: for few rows ours beside torch's, and for experts and quantised weights those for few and for many rows. So all of them
    are compiled."""
    _launching.both = True
    try:
        yield
    finally:
        _launching.both = False


@contextmanager
def weights_of_products() -> Iterator[list[Tensor]]:
    """Yields a list that collects the weights of all calls of `linear` that this thread makes inside the context, in their
    order."""
    weights: list[Tensor] = []
    _noting.weights = weights
    try:
        yield weights
    finally:
        _noting.weights = None


def one_of_each_size(weights: Iterable[Tensor]) -> list[Tensor]:
    return list({(*weight.shape, weight.dtype): weight for weight in weights}.values())


def size_of(weight: Tensor, num_rows: int) -> Size:
    return few_rows(num_rows), weight.shape[0], weight.shape[1], weight.dtype


def is_open(weight: Tensor, num_rows: int) -> bool:
    """Returns whether the kernel for products of weight [N, K] with num_rows rows has yet to be chosen."""
    return size_of(weight, num_rows) not in _ours_wins


def uses_ours(weight: Tensor, num_rows: int) -> bool:
    return _ours_wins.get(size_of(weight, num_rows), False)


def keep_in(folder: Path) -> None:
    """Loads the choices that were made before, on the same kind of GPU with the same versions of torch, Triton and our kernel, from
    a file in the folder, and lets later choices be kept in that file. A file that is missing or cannot be read counts as empty."""
    global _kept_in
    measured = f"{torch.cuda.get_device_name()} {torch.__version__} {triton.__version__}".encode() + SOURCE.read_bytes()
    _kept_in = path = folder / f"products-{hashlib.blake2b(measured, digest_size=12).hexdigest()}.json"
    try:
        chosen = {(rows, n, k, getattr(torch, dtype)): bool(wins) for rows, n, k, dtype, wins in json.loads(path.read_text())}
    except FileNotFoundError:
        return
    except (OSError, ValueError, TypeError, AttributeError) as error:
        log.warning("products of few rows are measured anew: %s: %s", path, error)
        return
    for size, wins in chosen.items():
        _ours_wins.setdefault(size, wins)


def _choose(size: Size, wins: bool) -> None:
    _ours_wins[size] = wins
    if _kept_in is not None:  # in a thread, since a file system may hang
        Thread(target=_write, args=(_kept_in,), name="kernels").start()


_writing = threading.Lock()


def _write(path: Path) -> None:
    """Writes all choices made so far to the file `path`, replacing it at once. Of two threads the one that writes later writes the
    newer choices. An OSError becomes a warning in the log."""
    with _writing:
        rows = [[*size[:3], str(size[3]).removeprefix("torch."), wins] for size, wins in list(_ours_wins.items())]
        try:
            cached_file.replace(path, json.dumps(rows).encode())
        except OSError as error:
            log.warning("which kernels multiply few rows is not kept for the next engine: %s: %s", path, error)


def measure(weight: Tensor, num_rows: int) -> dict[str, float]:
    """Measures both kernels for weight [N, K] with num_rows rows on a GPU, on the current stream, and returns their median seconds,
    as {"torch": ..., "triton": ...}. If one is clearly the faster, `linear` uses it from then on. Returns {} if that is decided
    already, if memory is short, or if the host is too slow. After MEASURE_TRIES without a decision torch's kernel stays.

    The values to multiply are sampled on the host: torch <= 2.12 refuses to sample from a GPU's default generator while any thread
    captures a graph (pytorch#172390), and a fixed seed changes nobody's numbers."""
    size = size_of(weight, num_rows)
    if size in _ours_wins:
        return {}
    _tries[size] += 1
    times = _measured_s(weight, num_rows)
    if times is not None and apart(times["torch"], times["triton"]):
        _choose(size, statistics.median(times["triton"]) < statistics.median(times["torch"]))
    elif _tries[size] >= MEASURE_TRIES:
        _choose(size, False)
    return {} if times is None else {name: statistics.median(seconds) for name, seconds in times.items()}


def _measured_s(weight: Tensor, num_rows: int) -> dict[str, list[float]] | None:
    """Returns the seconds that calls of both kernels took, as {"torch": [...], "triton": [...]}; None if there is not enough free
    memory, or if the host is too slow to measure them (times_s)."""
    try:
        drawn = torch.randn(num_rows, weight.shape[1], generator=torch.Generator().manual_seed(1))
        x = drawn.to(weight.device, weight.dtype)
        flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=weight.device)
        return times_s({"torch": lambda: functional.linear(x, weight), "triton": lambda: ours(x, weight, None)}, flush)
    except torch.OutOfMemoryError:
        return None


def apart(one: list[float], other: list[float]) -> bool:
    """Returns whether the middle halves (between the quartiles) of two samples do not overlap. Single samples that something
    disturbed then decide nothing."""
    one_low, _, one_high = statistics.quantiles(one, n=4)
    other_low, _, other_high = statistics.quantiles(other, n=4)
    return one_high < other_low or other_high < one_low


def times_s(calls: dict[Name, Callable[[], Any]], flush: Tensor) -> dict[Name, list[float]] | None:
    """Returns REPEATS times of each call in seconds, measured on the device, in turns. The cache is flushed before each by a write
    to `flush`.

    The device has other work until the host has launched the last call, so that no launch is measured. None if the host did not
    manage that in HEAD_START_TRIES tries."""
    for call in calls.values():
        call()
    head_start = HEAD_START
    for _ in range(HEAD_START_TRIES):
        for _ in range(head_start):
            flush.zero_()
        taken: list[tuple[Name, Any, Any]] = []
        for _ in range(REPEATS):
            for name, call in calls.items():
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                flush.zero_()
                begin.record()
                call()
                end.record()
                taken.append((name, begin, end))
        was_ahead = not taken[0][1].query()
        taken[-1][2].synchronize()
        if was_ahead:
            return {name: [begin.elapsed_time(end) / 1e3 for own, begin, end in taken if own == name] for name in calls}
        head_start *= 2
    return None
