"""Counts the bytes that a program for a GPU holds there at a time, without a GPU: its tensors are meta tensors, which have a size
and no memory."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _CudaIsMeta(TorchFunctionMode):
    """Makes tensors that are asked for on cuda meta tensors, and page-locked ones ordinary ones."""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = {key: _place(value) for key, value in (options or {}).items() if key != "pin_memory"}
        return function(*map(_place, arguments), **options)


def _place(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("meta")
    return "meta" if isinstance(value, str) and value.startswith("cuda") else value


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most_bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        made = function(*arguments, **(options or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "meta":
                self._count(tensor.untyped_storage())
        return made

    def _count(self, storage: Any) -> None:
        self.held_bytes()
        ref = StorageWeakRef(storage)
        self.held.setdefault(ref.cdata, (ref, storage.nbytes()))
        self.most_bytes = max(self.most_bytes, self.held_bytes())

    def held_bytes(self) -> int:
        self.held = {key: (ref, size) for key, (ref, size) in self.held.items() if not ref.expired()}
        return sum(size for _, size in self.held.values())


class CountedMemory:
    """`with CountedMemory() as memory:`; memory.most_bytes is the most that tensors on cuda held at a time."""

    def __enter__(self) -> CountedMemory:
        self._counting, self._modes = _Counting(), _CudaIsMeta()
        self._counting.__enter__()
        self._modes.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._modes.__exit__(kind, error, trace)
        self._counting.__exit__(kind, error, trace)

    @property
    def most_bytes(self) -> int:
        return self._counting.most_bytes

    def held_bytes(self) -> int:
        """Returns what tensors on cuda hold now."""
        return self._counting.held_bytes()
