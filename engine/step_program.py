"""A decode step as a list of kernel calls with their arguments: recorded while it runs for the first time, then run again as it is.

The counterpart of a CUDA graph. A program holds addresses: of weights, of the KV arena, of the model's input arrays
(engine/decode_steps.py) and of intermediate results. While a step is recorded, engine/ops.py has the recorder make its calls and
takes memory for results from it; what a model does besides, with torch itself, is noticed and makes the recording worthless.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

MAX_RECORDED_ROWS = 128  # of a larger step calls are a small part


@dataclass(slots=True)
class _Buffer:
    memory: Tensor  # bytes
    lent: Callable[[], Tensor | None] = lambda: None  # who has it


class Scratch:
    """Memory of intermediate results, shared by all programs of a process: one step runs at a time.

    A result's memory is free again when its tensor has died: what is recorded must hold other views of it.
    """

    def __init__(self) -> None:
        self._buffers: list[_Buffer] = []

    def take(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """[num_rows, width], undefined. However many rows there are, they begin where the buffer does."""
        capacity = MAX_RECORDED_ROWS * width * dtype.itemsize  # pages that no step touches take no memory
        buffer = next((own for own in self._buffers if len(own.memory) == capacity and own.lent() is None), None)
        if buffer is None:
            buffer = _Buffer(torch.empty(capacity, dtype=torch.uint8))
            self._buffers.append(buffer)
        taken = buffer.memory[: num_rows * width * dtype.itemsize].view(dtype).view(num_rows, width)
        buffer.lent = weakref.ref(taken)
        return taken


class Recorder:
    """Makes the calls of a step and keeps them. missed: what was computed beside them, so that they are not the whole step."""

    def __init__(self, scratch: Scratch) -> None:
        self.calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self.missed = ""
        self._scratch = scratch
        self._calling = False
        self.thread = threading.get_ident()  # a first step may be running beside it, in another

    def empty(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        return self._scratch.take(num_rows, width, dtype)

    def call(self, kernel: Callable[..., Any], *args: Any) -> None:
        """args: arrays, or tensors that nobody else holds."""
        self._calling = True
        try:
            kernel(*args)
        finally:
            self._calling = False
        self.calls.append((kernel, args))

    def watch(self) -> TorchDispatchMode:
        """While entered, computations of torch that are not part of a call are noticed."""
        return _Watch(self)

    def notice(self, operation: Any) -> None:
        if not self._calling and not operation.is_view and not operation.name().startswith(("aten::empty", "aten::new_empty")):
            self.missed = self.missed or operation.name()


_recorder: Recorder | None = None  # of the step that is being recorded


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """What this thread calls through `call` meanwhile makes up the recorder's program."""
    global _recorder
    _recorder = recorder
    try:
        with recorder.watch():
            yield
    finally:
        _recorder = None


def is_recording() -> bool:
    recorder = _recorder
    return recorder is not None and recorder.thread == threading.get_ident()


def call(kernel: Callable[..., Any], *args: Any) -> None:
    """args hold no tensor that the model has: it would seem to be in use as long as the program is kept."""
    recorder = _recorder
    if recorder is None or recorder.thread != threading.get_ident():
        kernel(*args)
    else:
        recorder.call(kernel, *args)


def empty(like: Tensor, num_rows: int, width: int) -> Tensor:
    """For a call's result."""
    recorder = _recorder
    if recorder is None or recorder.thread != threading.get_ident():
        return like.new_empty(num_rows, width)
    return recorder.empty(num_rows, width, like.dtype)


def into(out: Tensor, function: Callable[..., Tensor], *args: Any) -> None:
    """Makes a call of a function that returns its result."""
    out.copy_(function(*args))


class _Watch(TorchDispatchMode):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._recorder.notice(func)
        return func(*args, **(kwargs or {}))


class StepProgram:
    """calls, in order, leave the normed hidden states [T, width] and the logits [T, V]."""

    def __init__(self, calls: list[tuple[Callable[..., Any], tuple[Any, ...]]], hidden: Tensor, logits: Tensor) -> None:
        self.calls, self.hidden, self.logits = calls, hidden.view(hidden.shape), logits.view(logits.shape)

    def run(self) -> None:
        for kernel, args in self.calls:
            kernel(*args)
