"""Calls NCCL (https://docs.nvidia.com/deeplearning/nccl), which exchanges tensors between the GPUs of a host.

NCCL is called directly, and not through torch.distributed, for two reasons. A process group of torch has a thread that ends the
process if an exchange fails, but the other models of an engine must not be affected. And torch runs exchanges on streams of its
own, but they must be on the stream of steps, on which all engines of a group launch in the same order.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from engine.cuda.collectives import ID_BYTES
from engine.host.tcp_sockets import shut_down, tcp_sockets

LIBRARY = "libnccl.so.2"  # torch has loaded it
_SUCCESS, _SYSTEM_ERROR, _SUM = 0, 2, 0  # of ncclResult_t, and of ncclRedOp_t
_FAMILIES = ": under systemd it needs RestrictAddressFamilies=AF_UNIX AF_INET AF_NETLINK (docs/operations.md)"
_TYPES = {
    torch.uint8: 1,
    torch.int32: 2,
    torch.float16: 6,
    torch.float32: 7,
    torch.bfloat16: 9,
}  # of ncclDataType_t
_SETTINGS = {
    # By default NCCL connects ranks for an algorithm when it is first used, which takes all ranks at once. But each engine captures
    # its graphs when it is idle, so everything is connected at the beginning.
    "NCCL_RUNTIME_CONNECT": "0",
    # Ranks find each other through sockets of this host alone.
    "NCCL_SOCKET_IFNAME": "lo",
    # A buffer that a rank gives up is then still there for a rank that reads it at that moment.
    "NCCL_CUMEM_ENABLE": "1",
    # By default each process that has connected opens a port of this host, at which it tells everyone about its connections.
    "NCCL_RAS_ENABLE": "0",
}


class NcclError(RuntimeError):
    """Raised if NCCL refuses a call or cannot carry it out."""


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * ID_BYTES),)


class Nccl:
    """The functions of NCCL that hearthd calls (an engine.cuda.collectives.Connects). library: the loaded library. Methods raise
    NcclError."""

    def __init__(self, library: Any) -> None:
        self._library, self._sockets_before = library, frozenset[int]()  # before it began to connect
        pointer, number = ctypes.c_void_p, ctypes.c_int
        buffers = (pointer, pointer, ctypes.c_size_t, number)
        for name, arguments in (
            ("ncclGetVersion", (ctypes.POINTER(number),)),
            ("ncclGetUniqueId", (ctypes.POINTER(_UniqueId),)),
            ("ncclCommInitRank", (ctypes.POINTER(pointer), number, _UniqueId, number)),
            ("ncclCommAbort", (pointer,)),
            ("ncclAllReduce", (*buffers, number, pointer, pointer)),
            ("ncclAllGather", (*buffers, pointer, pointer)),
            ("ncclBroadcast", (*buffers, number, pointer, pointer)),
        ):
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, number
        library.ncclGetErrorString.argtypes, library.ncclGetErrorString.restype = (number,), ctypes.c_char_p

    def version(self) -> tuple[int, int, int]:
        code = ctypes.c_int()
        self.call("ncclGetVersion", ctypes.byref(code))
        major, rest = divmod(code.value, 10_000)
        return major, rest // 100, rest % 100

    def new_id(self) -> bytes:
        group_id, self._sockets_before = _UniqueId(), tcp_sockets()
        self.call("ncclGetUniqueId", ctypes.byref(group_id))
        return ctypes.string_at(ctypes.byref(group_id), ID_BYTES)

    def connect(self, group_id: bytes, rank: int, size: int) -> NcclGroup:
        """Connects the calling thread's current device with the other ranks (devices) of its split model, and returns its
        connection (see Connects.connect). An engine sees one GPU, so the current device is its own."""
        if rank:  # rank 0 has opened some when it made the id
            self._sockets_before = tcp_sockets()
        communicator = ctypes.c_void_p()
        self.call("ncclCommInitRank", ctypes.byref(communicator), size, _UniqueId.from_buffer_copy(group_id), rank)
        return NcclGroup(self, communicator)

    def give_up(self) -> None:
        """Ends the wait of another thread in `connect`, by shutting down all sockets that this process has opened since that call.
        NCCL waits for a rank by polling a socket. No other split model is affected, because an engine connects one at a time.

        ncclCommAbort could end the wait only for a non-blocking communicator, in which each exchange takes a new thread
        (https://github.com/NVIDIA/nccl, ncclGroupEndInternal in src/group.cc)."""
        shut_down(self._sockets_before)

    def call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code != _SUCCESS:
            text = self._library.ncclGetErrorString(code) or b"?"
            hint = _FAMILIES if code == _SYSTEM_ERROR and name in ("ncclGetUniqueId", "ncclCommInitRank") else ""
            raise NcclError(f"{name}: {text.decode(errors='replace')} ({code}){hint}; NCCL_DEBUG=INFO tells more")


class NcclGroup:
    """One rank of a communicator of NCCL (an engine.cuda.collectives.Collectives)."""

    def __init__(self, nccl: Nccl, communicator: ctypes.c_void_p) -> None:
        self._nccl, self._communicator = nccl, communicator

    def join(self, agreed: Callable[[bool], bool]) -> None:
        """Does nothing, because NCCL has no faster ways that would have to be prepared."""

    def sum(self, x: Tensor) -> None:
        self._nccl.call("ncclAllReduce", x.data_ptr(), x.data_ptr(), x.numel(), _TYPES[x.dtype], _SUM, *self._where())

    def share_first(self, x: Tensor) -> None:
        self._nccl.call("ncclBroadcast", x.data_ptr(), x.data_ptr(), x.numel(), _TYPES[x.dtype], 0, *self._where())

    def gather(self, part: Tensor, out: Tensor) -> None:
        self._nccl.call("ncclAllGather", part.data_ptr(), out.data_ptr(), part.numel(), _TYPES[part.dtype], *self._where())

    def abort(self) -> None:
        self._nccl.call("ncclCommAbort", self._communicator)

    def release(self) -> None:
        """Does nothing, because `abort` has freed everything."""

    def _where(self) -> tuple[ctypes.c_void_p, int]:
        """Returns the last two arguments of every NCCL exchange: the communicator, and the current stream."""
        return self._communicator, torch.cuda.current_stream().cuda_stream


@functools.cache
def nccl() -> Nccl:
    """Returns the NCCL library of this process. Raises NcclError if there is none."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        return Nccl(ctypes.CDLL(LIBRARY))
    except (OSError, AttributeError) as error:
        raise NcclError(f"models cannot be split over GPUs without NCCL: {error}") from None
