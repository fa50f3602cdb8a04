"""Runs a recorded step again.

Adjacent calls of compiled kernels are laid out in memory once, and are then made without Python between them
(engine/cpu/programs/native.py). Calls of torch between these are made from Python."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from engine.cpu.programs.program import Call
from engine.host.compiled import compilation, direct
from scheduler.batch.plan import BoolArray, IntArray

if TYPE_CHECKING:
    from engine.cpu.programs.native import NativeCalls


class _Part(Protocol):
    """A group of adjacent calls of a program (a recorded step) that run together: those with the indices `first` to before
    `end`."""

    first: int
    end: int

    def run(self, shared: bool, seconds: npt.NDArray[np.float64] | None) -> None:
        """Makes the calls. shared: whether kernels with two variants run in the variant for all threads, else in the one for one
        thread. seconds [end - first]: the seconds that each call takes are added to its entry; None: calls are not timed."""
        ...


class _PythonCall:
    """A single call of a program (a recorded step) that is made from Python. at: the call's index in the program."""

    def __init__(self, call: Call, at: int) -> None:
        self.first, self.end = at, at + 1
        self._kernel, self._args = direct(call.kernel, call.args), call.args

    def run(self, shared: bool, seconds: npt.NDArray[np.float64] | None) -> None:
        if seconds is None:
            self._kernel(*self._args)
            return
        begin = time.perf_counter()
        self._kernel(*self._args)
        seconds[0] += time.perf_counter() - begin


_Forms = tuple[tuple[Any, Sequence[Any]], tuple[Any, Sequence[Any]]]  # (kernel, arguments) for one thread, and for all threads


class _NativePart:
    """A group of adjacent calls of compiled kernels in a program (a recorded step), made without Python between them. serial,
    shared: the calls in the kernels' variants for one thread, and for all threads. first, end: the indices of these calls in the
    program, from `first` to before `end`."""

    def __init__(self, serial: NativeCalls, shared: NativeCalls, first: int, end: int) -> None:
        self.first, self.end = first, end
        self._serial, self._shared = serial, shared

    @classmethod
    def of(cls, forms: Sequence[_Forms], first: int) -> _NativePart:
        """Lays out consecutive calls in memory and returns them as a part of a program. forms: for each call, its variants for one
        thread and for all threads. first: index of the first call in the program."""
        from engine.cpu.programs.native import NativeCalls

        varies = any(one is not other for one, other in forms)
        serial = NativeCalls([one for one, _ in forms])
        shared = NativeCalls([other for _, other in forms]) if varies else serial
        return cls(serial, shared, first, first + len(forms))

    def followed_by(self, other: _NativePart) -> _NativePart:
        """Returns a new part that makes this part's calls and then those of `other`, without Python between them."""
        serial, shared = self._serial.followed_by(other._serial), self._shared.followed_by(other._shared)
        return _NativePart(serial, shared, self.first, self.end + other.end - other.first)

    def run(self, shared: bool, seconds: npt.NDArray[np.float64] | None) -> None:
        calls = self._shared if shared else self._serial
        if seconds is None:
            calls.run()
            return
        ticks = np.empty(self.end - self.first + 1, np.int64)
        begin = time.perf_counter()
        calls.run(ticks)
        spent_s = time.perf_counter() - begin
        passed = np.diff(ticks)
        # all 0 where LLVM knows no clock that a program may read, as on aarch64 before LLVM 22
        seconds += passed * (spent_s / passed.sum()) if passed.any() else spent_s / len(passed)


class Replay:
    """A sequence of recorded calls, which `run` repeats in order."""

    def __init__(self, calls: Sequence[Call], after: Replay | None = None) -> None:
        """calls: the calls to make, in order. after: a Replay whose calls each run makes before `calls`; None: there is none."""
        self._own, self._after = calls, after
        self.calls: Sequence[Call] = calls if after is None else (*after.calls, *calls)
        self.seconds: npt.NDArray[np.float64] | None = None  # [calls], None until `watch`
        self._is_shared: Callable[[], bool] | None = None
        self._varying_on: tuple[int, ...] = ()
        self._parts: list[_Part] = []
        self._is_native = False

    @property
    def is_native(self) -> bool:
        """Returns whether all calls are of compiled kernels, so that a run makes all of them without Python between them."""
        if not self._parts:
            self.lay_out()
        return self._is_native

    def run(self) -> None:
        """Makes all recorded calls again, in order: first those of `after` (the Replay that this one follows, if any), then its
        own."""
        if not self._parts:
            self.lay_out()
        shared = self._is_shared is not None and self._is_shared()
        seconds = self.seconds
        for part in self._parts:
            part.run(shared, None if seconds is None else seconds[part.first : part.end])

    def lay_out(self) -> None:
        """Lays out the calls of compiled kernels in memory, for `run`. The first `run` does this itself if it was not done
        before."""
        if self._parts:
            return
        before: list[_Part] = []
        after = self._after
        if after is not None:
            after.lay_out()
            before, self._is_shared, self._varying_on = after._parts, after._is_shared, after._varying_on
        self._parts = _joined(before, self._lay_out(len(self.calls) - len(self._own)))
        self._is_native = all(isinstance(part, _NativePart) for part in self._parts)

    def watch(self) -> None:
        """Makes each later `run` add the seconds that each call takes to the array `seconds` [calls], which begins with zeros."""
        self.seconds = np.zeros(len(self.calls))

    def _lay_out(self, first: int) -> list[_Part]:
        """Lays out this object's own calls (not those of `after`) in memory, and returns them as parts. first: the index of the
        first own call in the whole program."""
        parts: list[_Part] = []
        run: list[_Forms] = []
        for at, call in enumerate(self._own, first):
            forms = self._forms(call)
            if forms is not None:
                run.append(forms)
                continue
            if run:
                parts.append(_NativePart.of(run, at - len(run)))
                run = []
            parts.append(_PythonCall(call, at))
        if run:
            parts.append(_NativePart.of(run, len(self.calls) - len(run)))
        return parts

    def _forms(self, call: Call) -> _Forms | None:
        """Returns a call as two pairs (compiled kernel, arguments): for the kernel's variant for one thread and for the one for all
        threads; the same pair twice if there is only one variant. Returns None if the call must be made from Python."""
        kernel: Any = call.kernel
        vary = getattr(kernel, "forms", None)
        if vary is None:
            found = compilation(kernel, call.args)
            return None if found is None else ((found, call.args),) * 2
        serial, shared = ((compilation(*form), form[1]) for form in vary(call.args))
        if serial[0] is None:
            return None
        if shared[0] is None:  # only the form for one thread is compiled
            return serial, serial
        # is_shared is called once a step for all layers, because their contexts are the same
        depends_on = kernel.depends_on(call.args)
        if self._is_shared is None:
            self._is_shared, self._varying_on = partial(kernel.is_shared, call.args), depends_on
        return (serial, shared) if depends_on == self._varying_on else None


def _joined(before: list[_Part], behind: list[_Part]) -> list[_Part]:
    """Returns both lists of parts as one list. If `before` ends and `behind` begins with calls of compiled kernels, these become
    one part."""
    if before and behind and isinstance(before[-1], _NativePart) and isinstance(behind[0], _NativePart):
        return [*before[:-1], before[-1].followed_by(behind[0]), *behind[1:]]
    return before + behind


class Drawing(Replay):
    """The recorded sampling of N tokens from logits. Its calls write ids [N], the sampled tokens, and bad [N], whether a row's
    logits hold NaN or an infinity. step: the decode step that computes the logits, and whose calls each run makes first; None: the
    caller must compute the logits before `run`."""

    def __init__(self, calls: Sequence[Call], ids: IntArray, bad: BoolArray, step: DecodeProgram | None = None) -> None:
        super().__init__(calls, step)
        self.ids, self.bad = ids, bad


class ChunkProgram(Replay):
    """A recorded step with chunks of prompts. Its calls write the hidden states after the final norm to `hidden` [T, width]. They
    also copy the states from which tokens are sampled to memory that all chunk programs of the model share."""

    def __init__(self, calls: Sequence[Call], hidden: Tensor) -> None:
        super().__init__(calls)
        self.hidden = hidden.view(hidden.shape)


class LogitsProgram(Replay):
    """The recorded computation of logits [N, V]. drawings: the recorded sampling from these logits, by (number of rows, whether all
    rows take their most likely token). In a DecodeProgram the drawings also run the decode step."""

    def __init__(self, calls: Sequence[Call], logits: Tensor) -> None:
        super().__init__(calls)
        self.logits = logits.view(logits.shape)
        self.drawings: dict[tuple[int, bool], Drawing] = {}


class DecodeProgram(LogitsProgram):
    """A recorded decode step of N rows. Its calls write the hidden states after the final norm to `hidden` [N, width], and the
    logits to `logits` [N, V]. In a pipeline stage before the last one the calls pass states on to the next stage instead; `hidden`
    and `logits` then have no meaning."""

    def __init__(self, calls: Sequence[Call], hidden: Tensor, logits: Tensor) -> None:
        super().__init__(calls, logits)
        self.hidden = hidden.view(hidden.shape)
