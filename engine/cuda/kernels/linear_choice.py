"""Chooses which kernel multiplies a few rows by a weight on a GPU: hearthd's own (triton_linear) or torch's. Both are measured in
idle time, once for each size; until then torch's is used. Choices are kept in a file, which later engines read.

A product of gates and ups has a choice of its own: hearthd's kernel with the activation in it, or torch's and then the kernel of
the activation.

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
from typing import Any, NamedTuple, TypeVar

import torch
import triton
from torch import Tensor
from torch.nn import functional

from engine.cuda.kernels import triton_linear, triton_rows
from engine.memory.out_of_memory import lacks_memory
from loader import cached_file
from loader.threads import Thread

log = logging.getLogger("engine")

SOURCES = Path(triton_linear.__file__), Path(triton_rows.__file__)
REPEATS = 7
MEASURE_TRIES = 3  # after so many tries torch's kernel stays: the times are too close, or vary too much, to choose by
FLUSH_BYTES = 128 << 20  # written between two measurements; more than the cache holds, so that weights come from memory
HEAD_START = 32  # such writes before the first measurement; they take 1.5 ms on an H100, in which the host launches all the rest
HEAD_START_TRIES = 3  # each try has twice the head start of the one before
NOT_KEPT = "which kernels multiply few rows is not kept for the next engine: %s: %s"


class Product(NamedTuple):
    """A weight [N, K] that steps multiply by, and the activation of the product: gelu(gate) * up if gelu, silu(gate) * up if not,
    none if gelu is None."""

    weight: Tensor
    gelu: bool | None = None


# Rows, N, K, dtype and Product.gelu of a product.
Size = tuple[int, int, int, torch.dtype, bool | None]

Name = TypeVar("Name")

_ours_wins: dict[Size, bool] = {}
_tries: Counter[Size] = Counter()
_kept_in: Path | None = None


class _Noting(threading.local):
    products: list[Product] | None = None  # of this thread's products; other threads' are not noted


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
    if _takes_ours(x, weight, bias, None):
        return ours(x, weight, bias)
    return functional.linear(x, weight, bias)


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool) -> Tensor | None:
    """Returns gate_and_mul of the product of `linear`, computed by hearthd's kernel alone if that was measured to be faster at this
    size. Returns None if it was not, and where products are noted or all kernels launched: the caller then computes both, because
    steps with LoRA adapters take the product without the activation, whatever was chosen."""
    warms_up = _noting.products is not None or _launching.both
    if _takes_ours(x, weight, bias, gelu) and not warms_up:
        return ours(x, weight, bias, gelu)
    return None


def _takes_ours(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool | None) -> bool:
    """Returns whether hearthd's kernel computes a product, which is noted in the context of `weights_of_products`. In that of
    `both_kernels` the kernel is launched."""
    if _noting.products is not None:
        _noting.products.append(Product(weight, gelu))
    rows = few_rows(x.shape[0])
    if rows and _launching.both:
        launch_ours(x, weight, bias, gelu)
    return bool(rows) and _ours_wins.get((rows, *weight.shape, x.dtype, gelu), False)


def ours(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool | None = None) -> Tensor:
    out = x.new_empty(x.shape[0], weight.shape[0] if gelu is None else weight.shape[0] // 2)
    triton_linear.few_rows_linear(x, weight, bias, out, gelu)
    return out


def gate_and_mul(gate_up: Tensor, gelu: bool) -> Tensor:
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    triton_rows.gate_and_mul(gate_up, gelu, out)
    return out


def torchs(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool | None = None) -> Tensor:
    """Returns what `ours` returns, computed by torch's kernel and, unless gelu is None, that of the activation."""
    made = functional.linear(x, weight, bias)
    return made if gelu is None else gate_and_mul(made, gelu)


def launch_ours(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool | None = None) -> None:
    """Launches hearthd's kernel without a bias, as `measure` does, then with the bias if there is one, and drops the results.
    Triton thereby compiles every form of the kernel that later steps may launch."""
    ours(x, weight, None, gelu)
    if bias is not None:
        ours(x, weight, bias, gelu)


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
def weights_of_products() -> Iterator[list[Product]]:
    """Returns a context that yields a list. Each product of this thread in the context is appended to the list."""
    products: list[Product] = []
    _noting.products = products
    try:
        yield products
    finally:
        _noting.products = None


def one_of_each_size(products: Iterable[Product]) -> list[Product]:
    return list({size_of(product, 1): product for product in products}.values())


def size_of(product: Product, num_rows: int) -> Size:
    weight, gelu = product
    return few_rows(num_rows), weight.shape[0], weight.shape[1], weight.dtype, gelu


def is_open(product: Product, num_rows: int) -> bool:
    """Returns whether no kernel has been chosen yet for this product with num_rows rows."""
    return size_of(product, num_rows) not in _ours_wins


def uses_ours(product: Product, num_rows: int) -> bool:
    return _ours_wins.get(size_of(product, num_rows), False)


def keep_in(folder: Path) -> None:
    """Loads earlier choices from a file in the folder, and makes later choices be written to this file. The file's name depends on
    the kind of GPU, the versions of torch and Triton, and the source of hearthd's kernels. A file that is missing or cannot be read
    counts as empty."""
    global _kept_in
    measured = f"{torch.cuda.get_device_name()} {torch.__version__} {triton.__version__}".encode()
    measured += b"".join(source.read_bytes() for source in SOURCES)
    _kept_in = path = folder / f"products-{hashlib.blake2b(measured, digest_size=12).hexdigest()}.json"
    try:
        lines = json.loads(path.read_text())
        chosen = {(rows, n, k, getattr(torch, dtype), gelu): bool(wins) for rows, n, k, dtype, gelu, wins in lines}
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
        rows = [[*size[:3], str(size[3]).removeprefix("torch."), size[4], wins] for size, wins in list(_ours_wins.items())]
        try:
            cached_file.replace(path, json.dumps(rows).encode())
        except OSError as error:
            log.warning(NOT_KEPT, path, error)


def measure(product: Product, num_rows: int) -> dict[str, float]:
    """Measures both ways to compute a product of num_rows rows, with its activation, on the current stream of a GPU: torch's and
    hearthd's kernel. Returns their median seconds, as {"torch": ..., "triton": ...}, or {} if a kernel was chosen already, there
    is not enough free memory, or the host launches too slowly to measure.

    If one is clearly faster, `linear` or `gated_linear` uses it from then on. If MEASURE_TRIES calls find neither clearly faster,
    torch's stays."""
    size = size_of(product, num_rows)
    if size in _ours_wins:
        return {}
    _tries[size] += 1
    times = _measured_s(product, num_rows)
    if times is not None and apart(times["torch"], times["triton"]):
        _choose(size, statistics.median(times["triton"]) < statistics.median(times["torch"]))
    elif _tries[size] >= MEASURE_TRIES:
        _choose(size, False)
    return {} if times is None else {name: statistics.median(seconds) for name, seconds in times.items()}


def _measured_s(product: Product, num_rows: int) -> dict[str, list[float]] | None:
    """Returns the seconds that each of several calls of both kernels took, as {"torch": [...], "triton": [...]}. Returns None if
    there is not enough free memory, or if the host launches too slowly to measure (times_s)."""
    weight, gelu = product
    try:
        # On the host: torch <= 2.12 refuses to sample from a GPU's default generator while any thread captures a graph
        # (pytorch#172390). The seed is fixed, so that no random state that others read changes.
        drawn = torch.randn(num_rows, weight.shape[1], generator=torch.Generator().manual_seed(1))
        x = drawn.to(weight.device, weight.dtype)
        flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=weight.device)
        ways = {"torch": lambda: torchs(x, weight, None, gelu), "triton": lambda: ours(x, weight, None, gelu)}
        return times_s(ways, flush)
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
