"""Running a recorded step again.

Calls of compiled kernels that follow one another are laid out once and then made without Python between them
(engine/kernels/native.py); what torch computes is called in its place.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from engine.contracts import BoolArray, IntArray
from engine.kernels.compiled import compilation, direct
from engine.steps.program import Call


class _Part(Protocol):
    """Some of a program's calls, first to before end."""

    first: int
    end: int

    def run(self, shared: bool, seconds: npt.NDArray[np.float64] | None) -> None:
        """shared: whether threads share what they do not always share. seconds: added to, of each call."""
        ...


class _PythonCall:
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


_Forms = tuple[tuple[Any, Sequence[Any]], tuple[Any, Sequence[Any]]]  # (compiled kernel, arguments): for one thread, and for all


class _NativePart:
    def __init__(self, forms: Sequence[_Forms], first: int) -> None:
        from engine.kernels.native import NativeCalls

        self.first, self.end = first, first + len(forms)
        varies = any(one is not other for one, other in forms)
        self._serial = NativeCalls([one for one, _ in forms])
        self._shared = NativeCalls([other for _, other in forms]) if varies else self._serial

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
        seconds += passed * (spent_s / passed.sum())


class Replay:
    """Makes the same calls, in order, as often as it is run."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = calls
        self.seconds: npt.NDArray[np.float64] | None = None  # [calls], once somebody wants to know
        self._is_shared: Callable[[], bool] | None = None
        self._varying_on: tuple[int, ...] = ()
        self._parts: list[_Part] = []

    @property
    def is_native(self) -> bool:
        """Whether Python makes none of the calls."""
        self.lay_out()
        return all(isinstance(part, _NativePart) for part in self._parts)

    def run(self) -> None:
        self.lay_out()
        shared = self._is_shared is not None and self._is_shared()
        seconds = self.seconds
        for part in self._parts:
            part.run(shared, None if seconds is None else seconds[part.first : part.end])

    def lay_out(self) -> None:
        """What the first run does, and later ones find done."""
        if not self._parts:
            self._parts = self._lay_out()

    def watch(self) -> None:
        """From here on the seconds of each call are added up."""
        self.seconds = np.zeros(len(self.calls))

    def _lay_out(self) -> list[_Part]:
        parts: list[_Part] = []
        run: list[_Forms] = []
        for at, call in enumerate(self.calls):
            forms = self._forms(call)
            if forms is not None:
                run.append(forms)
                continue
            if run:
                parts.append(_NativePart(run, at - len(run)))
                run = []
            parts.append(_PythonCall(call, at))
        if run:
            parts.append(_NativePart(run, len(self.calls) - len(run)))
        return parts

    def _forms(self, call: Call) -> _Forms | None:
        """None: Python makes this call."""
        kernel: Any = call.kernel
        vary = getattr(kernel, "forms", None)
        if vary is None:
            found = compilation(kernel, call.args)
            return None if found is None else ((found, call.args),) * 2
        serial, shared = ((compilation(*form), form[1]) for form in vary(call.args))
        if serial[0] is None:
            return None
        if shared[0] is None:  # only one thread has kernels
            return serial, serial
        # asked once a step: the contexts of a step are the same in all layers
        depends_on = kernel.depends_on(call.args)
        if self._is_shared is None:
            self._is_shared, self._varying_on = partial(kernel.is_shared, call.args), depends_on
        return (serial, shared) if depends_on == self._varying_on else None


class Drawing(Replay):
    """calls leave ids [N] and bad [N], as ops.sample gives them."""

    def __init__(self, calls: Sequence[Call], ids: IntArray, bad: BoolArray) -> None:
        super().__init__(calls)
        self.ids, self.bad = ids, bad


class ChunkProgram(Replay):
    """calls leave the normed hidden states [T, width], and those of tokens that are sampled from where all chunks leave them."""

    def __init__(self, calls: Sequence[Call], hidden: Tensor) -> None:
        super().__init__(calls)
        self.hidden = hidden.view(hidden.shape)


class Head(Replay):
    """calls leave the logits [N, V]. drawings: of tokens from these, by number of rows and whether all of them are greedy."""

    def __init__(self, calls: Sequence[Call], logits: Tensor) -> None:
        super().__init__(calls)
        self.logits = logits.view(logits.shape)
        self.drawings: dict[tuple[int, bool], Drawing] = {}


class DecodeProgram(Head):
    """calls leave the normed hidden states [N, width] as well."""

    def __init__(self, calls: Sequence[Call], hidden: Tensor, logits: Tensor) -> None:
        super().__init__(calls, logits)
        self.hidden = hidden.view(hidden.shape)
