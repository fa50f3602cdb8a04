"""Puts a thread to sleep until another thread wakes it, by means of a word in memory that several processes share (futex(2))."""

from __future__ import annotations

import ctypes
import platform
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 98)  # number of the system call
FUTEX_WAIT, FUTEX_WAKE, EVERYBODY = 0, 1, (1 << 31) - 1  # on memory that processes share; how many are woken

Words = npt.NDArray[np.int64]


def wake_all(words: Words, index: int) -> None:
    """Wakes all threads, of any process, that sleep in sleep_while for the word words[index]."""
    _syscall()(FUTEX, _address(words, index), FUTEX_WAKE, EVERYBODY, None, None, 0)


def sleep_while(words: Words, index: int, value: int, most_s: float) -> None:
    """Sleeps until another thread calls wake_all for the word words[index], for at most most_s seconds. Returns at once if the
    lower 32 bits of the word differ from those of `value`. It may also wake up spuriously and return early."""
    seen, most = ctypes.c_uint32(value & 0xFFFFFFFF), _Time(int(most_s), int(most_s % 1 * 1e9))
    _syscall()(FUTEX, _address(words, index), FUTEX_WAIT, seen, ctypes.byref(most), None, 0)


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _address(words: Words, index: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(words.ctypes.data + index * words.itemsize)


@cache
def _syscall() -> Any:
    return ctypes.CDLL(None, use_errno=True).syscall
