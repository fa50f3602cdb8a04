"""Chooses which kernel multiplies a few rows by a weight on a GPU: hearthd's own (triton_linear) or torch's. Both are measured in
idle time, once for each size; until then torch's is used. Choices are kept in a file, which later engines read.

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
from engine.memory.out_of_memory import lacks_memory
from loader import cached_file
from loader.threads import Thread

log = logging.getLogger("engine")

SOURCE = Path(triton_linear.__file__)
REPEATS = 7
MEASURE_TRIES = 3  # after so many tries torch's kernel stays: the times are too close, or vary too much, to choose by
FLUSH_BYTES = 128 << 20  # written between two measurements; more than the cache holds, so that weights come from memory
HEAD_START = 32  # such writes before the first measurement; they take 1.5 ms on an H100, in which the host launches all the rest
HEAD_START_TRIES = 3  # each try has twice the head start of the one before
NOT_KEPT = "which kernels multiply few rows is not kept for the next engine: %s: %s"

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
    """Returns whether the calling thread is in the context of `both_kernels`, so that a product must launch every kernel that could
    compute it."""
    return _launching.both


def few_rows(num_rows: int) -> int:
    """Returns num_rows rounded up to 1, 2 or 4, the numbers of rows for which kernels are chosen. Returns 0 if hearthd's kernel
    does not take so many rows."""
    return 0 if num_rows > triton_linear.MAX_ROWS else 1 << (num_rows - 1).bit_length()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns x [M, K] @ weight [N, K] transposed, plus bias [N]. It is computed by hearthd's kernel if that was measured to be
    faster at this size, else by torch's."""
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
    """Launches hearthd's kernel without a bias, as `measure` does, then with the bias if there is one, and drops the results.
    Triton thereby compiles every form of the kernel that later steps may launch."""
    ours(x, weight, None)
    if bias is not None:
        ours(x, weight, bias)


@contextmanager
def both_kernels() -> Iterator[None]:
    """Returns a context in which each product of this thread launches every kernel that a later step may use for it, so that all
    are compiled: for few rows hearthd's kernel and torch's; for experts and quantised weights the kernels for few rows and those
    for many."""
    _launching.both = True
    try:
        yield
    finally:
        _launching.both = False


@contextmanager
def weights_of_products() -> Iterator[list[Tensor]]:
    """Returns a context that yields a list. Each call of `linear` by this thread in the context appends its weight to the list."""
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
    """Returns whether no kernel has been chosen yet for products of num_rows rows with weight [N, K]."""
    return size_of(weight, num_rows) not in _ours_wins


def uses_ours(weight: Tensor, num_rows: int) -> bool:
    return _ours_wins.get(size_of(weight, num_rows), False)


def keep_in(folder: Path) -> None:
    """Loads earlier choices from a file in the folder, and makes later choices be written to this file. The file's name depends on
    the kind of GPU, the versions of torch and Triton, and the source of hearthd's kernel. A file that is missing or cannot be read
    counts as empty."""
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
        try:
            Thread(target=_write, args=(_kept_in,), name="kernels").start()
        except MemoryError as error:  # the next choice writes this one, too
            log.warning(NOT_KEPT, _kept_in, error)


_writing = threading.Lock()


def _write(path: Path) -> None:
    """Replaces the file `path`, in one step, by all choices made so far. Calls in several threads run one after the other, each
    with the choices made by then. An OSError becomes a warning in the log."""
    with _writing:
        rows = [[*size[:3], str(size[3]).removeprefix("torch."), wins] for size, wins in list(_ours_wins.items())]
        try:
            cached_file.replace(path, json.dumps(rows).encode())
        except OSError as error:
            log.warning(NOT_KEPT, path, error)


def measure(weight: Tensor, num_rows: int) -> dict[str, float]:
    """Measures both kernels for weight [N, K] with num_rows rows on the current stream of a GPU. Returns their median seconds, as
    {"torch": ..., "triton": ...}, or {} if a kernel was chosen already, there is not enough free memory, or the host launches too
    slowly to measure.

    If one kernel is clearly faster, `linear` uses it from then on. If MEASURE_TRIES calls find neither clearly faster, torch's
    stays."""
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
    """Returns the seconds that each of several calls of both kernels took, as {"torch": [...], "triton": [...]}. Returns None if
    there is not enough free memory, or if the host launches too slowly to measure (times_s)."""
    try:
        # On the host: torch <= 2.12 refuses to sample from a GPU's default generator while any thread captures a graph
        # (pytorch#172390). The seed is fixed, so that no random state that others read changes.
        drawn = torch.randn(num_rows, weight.shape[1], generator=torch.Generator().manual_seed(1))
        x = drawn.to(weight.device, weight.dtype)
        flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=weight.device)
        return times_s({"torch": lambda: functional.linear(x, weight), "triton": lambda: ours(x, weight, None)}, flush)
    except RuntimeError as error:
        if not lacks_memory(error):
            raise
        return None


def apart(one: list[float], other: list[float]) -> bool:
    """Returns whether two samples of times differ clearly: their middle halves (between the quartiles) do not overlap. So single
    times that something disturbed do not matter."""
    one_low, _, one_high = statistics.quantiles(one, n=4)
    other_low, _, other_high = statistics.quantiles(other, n=4)
    return one_high < other_low or other_high < one_low


def times_s(calls: dict[Name, Callable[[], Any]], flush: Tensor) -> dict[Name, list[float]] | None:
    """Measures the calls on the device, one after the other, REPEATS times over. Returns each call's seconds, by the call's name.
    Before each call, a write to `flush` (a tensor larger than the GPU's cache) empties the cache.

    The device is first given other work that lasts until the host has launched all calls, so that launches do not affect the times.
    Returns None if the host did not finish before that work in any of HEAD_START_TRIES tries."""
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
