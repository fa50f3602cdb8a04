"""Joins the parts of a tensor that the ranks, the devices of a split model, have computed (Numba), through memory that their
processes share (engine/host/rank_memory.py).

Each rank copies a piece of its part into one of its two buffers, publishes the piece (a store with release), waits until all ranks
have published theirs (loads with acquire), and reads all buffers in the order of the ranks. Two buffers used alternately are
enough: a rank that publishes piece n has read all of piece n - 1, so once all have published n, the buffers of n - 1 may be
overwritten.

A rank waits by spinning, for SPIN_NS at most. Then it sleeps in the kernel (futex(2)) until the counter that it waits for grows.
Waking a sleeping rank takes several times as long as a sum, so a late rank wakes the sleepers already when its step begins
(engine/cpu/ranks.py), and these then spin for WOKEN_SPIN_NS. A rank stops waiting once the group is broken. The results of that
call and of all later ones have no meaning.

Shapes: T tokens or rows, W width, S ranks."""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba import int64, njit, types, void
from numba.core import cgutils
from numba.extending import intrinsic

from engine.cpu.kernels.lanes import load, store
from engine.cpu.kernels.rank_words import GATHER_ROWS, LINE_WORDS, PIECES, PUBLISHED, SLEEPERS, SUM_ROWS
from engine.cpu.kernels.vectors import LANES
from engine.host.shared_words import EVERYBODY, FUTEX, FUTEX_WAIT, FUTEX_WAKE

SPIN_NS = 60_000  # longer than what ranks of equal shares differ by in a step; the core then serves others
WOKEN_SPIN_NS = 200_000  # longer than a late rank takes from the beginning of its step to its first piece
_SPINS_BETWEEN_LOOKS = 64  # at the clock, and at whether the group is broken
SLEEP_NS = 20_000_000  # a sleeping rank looks this often whether the group is broken
_MONOTONIC = 1
_I64, _I32 = ir.IntType(64), ir.IntType(32)
_OPTIONS: dict[str, Any] = {"error_model": "numpy", "cache": True, "nogil": True}
_HELPER: dict[str, Any] = {"error_model": "numpy"}


def _place(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    """Returns a pointer to word `index` of an int64 array that is an argument of an intrinsic. The array's rows must lie end to
    end."""
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [index])


def _atomic_load(ordering: str) -> Any:
    @intrinsic
    def load_word(typing_context: Any, words: Any, index: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.load_atomic(_place(context, builder, signature.args[0], *args), ordering, 8)

        return types.int64(words, types.int64), generate

    return load_word


_load_acquire, _load_in_order, _load_relaxed = _atomic_load("acquire"), _atomic_load("seq_cst"), _atomic_load("monotonic")


@intrinsic
def _store_in_order(typing_context: Any, words: Any, index: Any, value: Any) -> Any:
    """Stores a value to words[index] (int64), sequentially consistent: no later sequentially consistent load is moved before the
    store. So either this rank sees that another rank sleeps, or the other rank sees the value before it begins to sleep."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[2], _place(context, builder, signature.args[0], *args[:2]), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(words, types.int64, types.int64), generate


@intrinsic
def _add_in_order(typing_context: Any, words: Any, index: Any, value: Any) -> Any:
    """Adds a value to words[index] (int64) atomically, sequentially consistent: no later sequentially consistent load is moved
    before it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.atomic_rmw("add", _place(context, builder, signature.args[0], *args[:2]), args[2], "seq_cst")
        return context.get_dummy_value()

    return types.void(words, types.int64, types.int64), generate


@intrinsic
def _pause(typing_context: Any) -> Any:
    """Tells the processor that the surrounding loop waits for another core (PAUSE on x86, YIELD on Arm)."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if platform.machine() == "x86_64":
            kind, name, values = ir.FunctionType(ir.VoidType(), []), "llvm.x86.sse2.pause", []
        else:
            kind, name, values = ir.FunctionType(ir.VoidType(), [_I32]), "llvm.aarch64.hint", [_I32(1)]
        builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values)
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def _now_ns(typing_context: Any) -> Any:
    """Returns the time of the system's monotonic clock in nanoseconds, int64."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        time = cgutils.alloca_once(builder, ir.ArrayType(_I64, 2))
        kind = ir.FunctionType(_I32, [_I32, time.type])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "clock_gettime"), [_I32(_MONOTONIC), time])
        seconds, rest = (builder.load(cgutils.gep_inbounds(builder, time, 0, at)) for at in range(2))
        return builder.add(builder.mul(seconds, _I64(1_000_000_000)), rest)

    return types.int64(), generate


def _futex(builder: Any, place: Any, operation: int, value: Any, timeout: Any) -> Any:
    """Emits a futex(2) call on the low 32 bits of the word at `place`, and returns the call's result. These bits are the word's
    first bytes, because all supported processors are little-endian. operation, value: FUTEX_WAIT with the expected value, or
    FUTEX_WAKE with the number of threads. timeout: the address of a timespec; 0: none."""
    kind = ir.FunctionType(_I64, [_I64], var_arg=True)
    function = cgutils.get_or_insert_function(builder.module, kind, "syscall")
    return builder.call(function, [_I64(FUTEX), builder.ptrtoint(place, _I64), _I64(operation), value, timeout, _I64(0), _I64(0)])


@intrinsic
def _sleep(typing_context: Any, words: Any, index: Any, seen: Any) -> Any:
    """Sleeps until _wake is called for words[index], for SLEEP_NS at most. Does not sleep if the low 32 bits of the word differ
    from those of `seen`. Returns 0 if the thread was woken, else another number (int64)."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        time = cgutils.alloca_once(builder, ir.ArrayType(_I64, 2))
        for at, value in enumerate((0, SLEEP_NS)):
            builder.store(_I64(value), cgutils.gep_inbounds(builder, time, 0, at))
        low = builder.zext(builder.trunc(args[2], _I32), _I64)
        place = _place(context, builder, signature.args[0], *args[:2])
        return _futex(builder, place, FUTEX_WAIT, low, builder.ptrtoint(time, _I64))

    return types.int64(words, types.int64, types.int64), generate


@intrinsic
def _wake(typing_context: Any, words: Any, index: Any) -> Any:
    """Wakes all threads of all processes that sleep on words[index]."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = _place(context, builder, signature.args[0], *args)
        _futex(builder, place, FUTEX_WAKE, _I64(EVERYBODY), _I64(0))
        return context.get_dummy_value()

    return types.void(words, types.int64), generate


@njit(**_HELPER)
def _publish(counters: Any, rank: int, turn: int) -> None:
    """Tells all ranks that rank `rank` has filled its buffer for exchange number `turn`, and wakes those that sleep. counters: [S,
    LINE_WORDS] int64."""
    line = LINE_WORDS * rank
    _store_in_order(counters, line + PUBLISHED, turn)
    if _load_in_order(counters, line + SLEEPERS) > 0:
        _wake(counters, line + PUBLISHED)


@njit(**_HELPER)
def _wait_for(counters: Any, other: int, turn: int, broken: Any) -> bool:
    """Waits until rank `other` has published exchange number `turn`, and returns True; returns False once a device of the split
    model has been lost. It spins for SPIN_NS, then sleeps, and spins again whenever it is woken."""
    word = LINE_WORDS * other + PUBLISHED
    spins, begin_ns, most_ns = 0, int64(0), SPIN_NS
    while _load_acquire(counters, word) < turn:
        spins += 1
        if spins % _SPINS_BETWEEN_LOOKS:
            _pause()
            continue
        if _load_relaxed(broken, 0) != 0:
            return False
        if begin_ns == 0:
            begin_ns = _now_ns()
        elif _now_ns() - begin_ns > most_ns:
            _add_in_order(counters, word + SLEEPERS, 1)
            seen = _load_in_order(counters, word)
            if seen < turn and _sleep(counters, word, seen) == 0:
                begin_ns, most_ns = int64(0), WOKEN_SPIN_NS
            _add_in_order(counters, word + SLEEPERS, -1)
            spins -= 1  # what has woken it is looked at next
    return True


@njit(**_HELPER)
def _exchange(values: Any, at: int, count: int, own: Any, broken: Any, counters: Any, buffers: Any, rank: int) -> int:
    """Copies `count` values, from index `at` on, into this rank's buffer, publishes them, and waits until all other ranks (devices)
    of the split model have published theirs. Returns the number of this exchange, n >= 1, or 0 if a device of the model has been
    lost. Rank r's values are then in buffers[2 r + n % 2]. counters, buffers: memory that the ranks share. own, broken: this rank's
    own words, and a word that is not 0 once a device has been lost (see sum_ranks)."""
    turn = own[PIECES] + 1
    own[PIECES] = turn
    to = buffers[2 * rank + (turn & 1)]
    for i in range(count):
        to[i] = values[at + i]
    _publish(counters, rank, turn)
    for other in range(counters.shape[0]):
        if not _wait_for(counters, other, turn, broken):
            return 0
    return turn


@njit(inline="always", **_HELPER)
def _add_lanes(values: Any, at: int, buffers: Any, first: int, step: int, num: int) -> None:
    """Adds up `num` elements (16 at most) of all ranks' buffers, in float32 and in the order of the ranks, and writes the sums to
    values from index `at` on. first: the flat index of the first rank's elements in buffers. step: elements from one rank's to the
    next one's."""
    total = load(buffers, first, num)
    for other in range(1, buffers.shape[0] // 2):
        total += load(buffers, first + other * step, num)
    store(values, at, num, total)


def sum_ranks_signature(element: types.Type) -> Any:
    return void(element[:, ::1], int64[::1], int64[::1], int64[:, ::1], element[:, ::1], int64)


@njit(**_OPTIONS)
def sum_ranks(x: Any, own: Any, broken: Any, counters: Any, buffers: Any, rank: int) -> None:
    """Replaces the first own[SUM_ROWS] rows of x [T, W] by the sum of the x of all ranks (devices) of a split model, added up in
    float32, in the order of the ranks, and rounded once. If a device of the model has been lost, x has no meaning afterwards.

    own [OWN_WORDS] int64: words of this rank alone (rank_words.py). broken [1] int64: not 0 once a device of the model has been
    lost. counters [S, LINE_WORDS] int64 and buffers [2 S, elements]: memory that the ranks share; rank r has line r, and buffers 2
    r and 2 r + 1. rank: this rank."""
    values = x.reshape(-1)
    total, room = min(own[SUM_ROWS], x.shape[0]) * x.shape[1], buffers.shape[1]
    for at in range(0, total, room):
        count = min(room, total - at)
        turn = _exchange(values, at, count, own, broken, counters, buffers, rank)
        if turn == 0:
            return
        begin, whole = (turn & 1) * room, count - count % LANES
        for i in range(0, whole, LANES):
            _add_lanes(values, at + i, buffers, begin + i, 2 * room, LANES)
        if whole < count:
            _add_lanes(values, at + whole, buffers, begin + whole, 2 * room, count - whole)


def gather_ranks_signature(element: types.Type) -> Any:
    return void(element[:, ::1], int64[::1], int64[::1], int64[:, ::1], element[:, ::1], int64, element[:, ::1])


@njit(**_OPTIONS)
def gather_ranks(part: Any, own: Any, broken: Any, counters: Any, buffers: Any, rank: int, out: Any) -> None:
    """Joins the parts [T, W] that the ranks (devices) of a split model have computed: writes the first own[GATHER_ROWS] rows of all
    parts side by side, in the order of the ranks, to out [T, S * W]. If a device of the model has been lost, out has no meaning.
    part: this rank's part. own, broken, counters, buffers, rank: as in sum_ranks."""
    values, width = part.reshape(-1), part.shape[1]
    total, room = min(own[GATHER_ROWS], part.shape[0]) * width, buffers.shape[1]
    for at in range(0, total, room):
        end = min(at + room, total)
        turn = _exchange(values, at, end - at, own, broken, counters, buffers, rank)
        if turn == 0:
            return
        for other in range(counters.shape[0]):
            source = buffers[2 * other + (turn & 1)]
            place = at
            while place < end:
                row, column = place // width, place % width
                num = min(width - column, end - place)
                to = out[row]
                for i in range(num):
                    to[other * width + column + i] = source[place - at + i]
                place += num
