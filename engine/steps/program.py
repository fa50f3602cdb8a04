"""Recording a step: its kernel calls with their arguments, as it runs for the first time.

With engine/steps/replay.py, which makes the calls again, the counterpart of a CUDA graph. A program holds addresses: of weights, of
the KV arena, of the model's input arrays (engine/steps/inputs.py) and of intermediate results. While a step is recorded,
engine/ops.py has the recorder make its calls and takes memory for results from it; what a model does besides, with torch itself, is
noticed and makes the recording worthless.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_ALIGN_BYTES = 64
_REGION_BYTES = 256 << 20  # of address space: pages that no step touches take no memory


@dataclass(slots=True, frozen=True)
class _Piece:
    begin: int
    end: int
    lent: Callable[[], Tensor | None]  # who has it


class Scratch:
    """Memory of intermediate results, shared by all programs of a process: one step runs at a time.

    A result lies in the first gap between those that live, so programs of all sizes and models use the same pages, as many as the
    largest needs (work_space.recorded_bytes at most, and 0.5 MB a thread where weights are packed). Its memory is free again when
    its tensor has died: what is recorded must hold other views of it.
    """

    def __init__(self, num_bytes: int = _REGION_BYTES) -> None:
        self._num_bytes = num_bytes
        self._region: Tensor | None = None
        self._pieces: list[_Piece] = []  # in order
        self.most_bytes = 0  # that were in use

    def take(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """[num_rows, width], undefined. Once the region is full, memory of its own."""
        if self._region is None:
            self._region = torch.empty(self._num_bytes, dtype=torch.uint8)
        num_bytes = num_rows * width * dtype.itemsize
        self._pieces = [piece for piece in self._pieces if piece.lent() is not None]
        begin = at = 0
        for piece in self._pieces:
            if piece.begin - begin >= num_bytes:
                break
            begin, at = -(-piece.end // _ALIGN_BYTES) * _ALIGN_BYTES, at + 1
        end = begin + num_bytes
        if end > self._num_bytes:
            return torch.empty(num_rows, width, dtype=dtype)
        self.most_bytes = max(self.most_bytes, end)
        taken = self._region[begin:end].view(dtype).view(num_rows, width)
        self._pieces.insert(at, _Piece(begin, end, weakref.ref(taken)))
        return taken


@dataclass(slots=True, frozen=True)
class Call:
    """Of a step. args: arrays and numbers, or tensors that nobody else holds."""

    kernel: Callable[..., Any]
    args: tuple[Any, ...]


class Recorder:
    """Makes the calls of a step and keeps them. missed: what was computed beside them, so that they are not the whole step.
    watches: whether that is looked for, which takes a third as long as recording does. dry: no call is made."""

    def __init__(self, scratch: Scratch, watches: bool = True, dry: bool = False) -> None:
        self.calls: list[Call] = []
        self.missed = ""
        self._scratch, self._watches, self._dry = scratch, watches, dry
        self._calling = False
        self.thread = threading.get_ident()  # a first step may be running beside it, in another

    def empty(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        return self._scratch.take(num_rows, width, dtype)

    def call(self, kernel: Callable[..., Any], *args: Any) -> None:
        """args: arrays, or tensors that nobody else holds."""
        if not self._dry:
            self._calling = True
            try:
                kernel(*args)
            finally:
                self._calling = False
        self.calls.append(Call(kernel, args))

    def watch(self) -> AbstractContextManager[Any]:
        """While entered, computations of torch that are not part of a call are noticed."""
        return _Watch(self) if self._watches else nullcontext()

    def notice(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        if not self._calling and not _computes_nothing(function.__name__, args):
            self.missed = self.missed or function.__name__


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


# Of torch and its tensors: what gives views and undefined memory, and what tells of a tensor (attributes come as __get__).
_VIEWS = {"view", "t", "transpose", "unsqueeze", "squeeze", "narrow", "split", "chunk", "unbind", "tensor_split", "detach", "numpy"}
_MEMORY = {"empty", "new_empty", "from_numpy"}
_FACTS = {"__get__", "__len__", "size", "dim", "stride", "numel", "element_size", "is_contiguous", "data_ptr", "__hash__"}
_HARMLESS = _VIEWS | _MEMORY | _FACTS


def _computes_nothing(name: str, args: tuple[Any, ...]) -> bool:
    if name != "__getitem__":
        return name in _HARMLESS
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    return all(isinstance(one, int | slice) for one in index)


class _Watch(TorchFunctionMode):
    """Sees torch's functions as they are called from Python. Not a TorchDispatchMode, whose first use imports torch._dynamo: 0.9 s
    in the middle of a step."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._recorder.notice(func, args)
        return func(*args, **(kwargs or {}))
