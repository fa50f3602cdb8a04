"""Records a step: keeps its kernel calls with their arguments, while the step runs for the first time.

Together with engine/cpu/programs/replay.py, which makes the calls again, this is on the CPU what a CUDA graph is on a GPU. A
program (the recorded calls of a step) holds addresses: of weights, of the KV arena, of the model's input arrays
(engine/cpu/recording/inputs.py) and of intermediate results. While a step is recorded, engine/cpu/ops.py makes its calls through
the recorder, and gets the memory for their results from the recorder. If a model computes anything by torch outside of these calls,
the recorder notices, and the recording is discarded."""

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
_REGION_BYTES = 256 << 20  # bytes of address space; pages that no step touches take no memory


@dataclass(slots=True, frozen=True)
class _Piece:
    """A part of the scratch region that is in use: the bytes from `begin` to before `end`. lent: returns the tensor that uses this
    part, or None once that tensor is destroyed, which frees the part."""

    begin: int
    end: int
    lent: Callable[[], Tensor | None]  # returns the tensor that uses it; None once that is destroyed


class Scratch:
    """Memory for the results of calls within steps, shared by all programs of a process, because only one step runs at a time.

    A result is placed in the first sufficient gap between results that are in use. All programs, of whatever size or model,
    therefore use the same pages: as many as the largest program needs (at most work_space.recorded_bytes, and 0.5 MB for each
    thread if weights are packed). A result's memory is free again once its tensor is destroyed. So recorded calls, which are kept,
    must not hold that tensor, only other views of its memory."""

    def __init__(self, num_bytes: int = _REGION_BYTES) -> None:
        self._num_bytes = num_bytes
        self._region: Tensor | None = None
        self._pieces: list[_Piece] = []  # pieces in use, in order of address
        self.most_bytes = 0  # the highest end of a piece so far

    def take(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Returns uninitialised memory [num_rows, width] of this dtype in a free part of the scratch region, or, if no free part is
        large enough, in new memory."""
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
    """One kernel call of a step. args: numbers, numpy arrays, and tensors that no other code holds (views that were made for this
    call)."""

    kernel: Callable[..., Any]
    args: tuple[Any, ...]


class Recorder:
    """Makes the kernel calls of a step and keeps them in `calls`.
    scratch: the memory for results.
    watches: whether to look for torch functions that are called outside of kernel calls, which makes recording a third slower.
    missed: the name of the first torch function that was found in this way, which means that the calls are not the whole step; "":
    there was none.
    dry: whether calls are recorded without being made."""

    def __init__(self, scratch: Scratch, watches: bool = True, dry: bool = False) -> None:
        self.calls: list[Call] = []
        self.missed = ""
        self._scratch, self._watches, self._dry = scratch, watches, dry
        self._calling = False
        self._thread = threading.get_ident()  # a model's first step may run at the same time, in another thread

    @property
    def is_open(self) -> bool:
        """Returns whether a kernel call that the calling thread makes now is to be recorded. Within a recorded call the result is
        False, because an inner call is a part of the recorded one."""
        return not self._calling and self._thread == threading.get_ident()

    def empty(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        return self._scratch.take(num_rows, width, dtype)

    def call(self, kernel: Callable[..., Any], *args: Any) -> None:
        """Makes a kernel call, unless the recorder is dry, and keeps it. args: numbers, numpy arrays, and tensors that no other
        code holds (views that were made for this call)."""
        if not self._dry:
            self._calling = True
            try:
                kernel(*args)
            finally:
                self._calling = False
        self.calls.append(Call(kernel, args))

    def watch(self) -> AbstractContextManager[Any]:
        """Returns a context manager in which torch functions that are called outside of kernel calls are found (see `missed`). If
        `watches` is False, the context manager does nothing."""
        return _Watch(self) if self._watches else nullcontext()

    def notice(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Receives each torch function that Python calls, with its arguments. If the function computes something outside of a
        kernel call, and is the first such function, stores its name in `missed`."""
        if not self._calling and not _computes_nothing(function.__name__, args):
            self.missed = self.missed or function.__name__


_recorder: Recorder | None = None  # of the step that is being recorded, if any


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Returns a context manager in which kernel calls that this thread makes by this module's function `call` are kept in the
    recorder."""
    global _recorder
    _recorder = recorder
    try:
        with recorder.watch():
            yield
    finally:
        _recorder = None


def is_recording() -> bool:
    """Returns whether a step is being recorded in this thread."""
    recorder = _recorder
    return recorder is not None and recorder.is_open


def call(kernel: Callable[..., Any], *args: Any) -> None:
    """Calls a kernel with these arguments, and records the call if this thread is recording a step. args must not contain a tensor
    that the model holds, only other views of its memory: a recorded call is kept, and the memory of a tensor in it would stay in
    use for as long."""
    recorder = _recorder
    if recorder is None or not recorder.is_open:
        kernel(*args)
    else:
        recorder.call(kernel, *args)


def empty(like: Tensor, num_rows: int, width: int, dtype: torch.dtype | None = None) -> Tensor:
    """Returns uninitialised memory [num_rows, width] for the result of a kernel call. While a step is being recorded, the memory is
    taken from the recorder's scratch region. dtype: None: the dtype of `like`."""
    recorder = _recorder
    if recorder is None or not recorder.is_open:
        return like.new_empty(num_rows, width, dtype=dtype)
    return recorder.empty(num_rows, width, dtype or like.dtype)


def into(out: Tensor, function: Callable[..., Tensor], *args: Any) -> None:
    """Calls `function` with args and copies the tensor that it returns to `out`."""
    out.copy_(function(*args))


# Functions of torch that make views, that return uninitialised memory, and that report a tensor's properties (__get__: attributes).
_VIEWS = {"view", "t", "transpose", "unsqueeze", "squeeze", "narrow", "split", "chunk", "unbind", "tensor_split", "detach", "numpy"}
_MEMORY = {"empty", "new_empty", "from_numpy"}
_FACTS = {"__get__", "__len__", "size", "dim", "stride", "numel", "element_size", "is_contiguous", "data_ptr", "__hash__"}
_HARMLESS = _VIEWS | _MEMORY | _FACTS


def _computes_nothing(name: str, args: tuple[Any, ...]) -> bool:
    """Returns whether a call of the torch function with this name only makes a view, reserves memory or reports a tensor's
    properties."""
    if name != "__getitem__":
        return name in _HARMLESS
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    return all(isinstance(one, int | slice) for one in index)


class _Watch(TorchFunctionMode):
    """A torch mode that reports each torch function that Python calls to a recorder. It is not a TorchDispatchMode because the
    first use of one imports torch._dynamo, which takes 0.9 s in the middle of a step."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._recorder.notice(func, args)
        return func(*args, **(kwargs or {}))
