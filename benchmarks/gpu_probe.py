"""Tries whether the GPU still answers: a context, a small allocation, a fill and a copy back, through the driver alone, so
without the seconds that importing torch takes. Prints one JSON line; exits 1 if a call is refused. One that hangs is ended by its
caller.

usage: python -m benchmarks.gpu_probe
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from typing import Any

NUM_BYTES, VALUE = 1 << 20, 0x5A


class Refused(Exception):
    """Raised for a driver call that failed; the message names it and its code."""


def probe(driver: Any) -> dict[str, float]:
    """Returns seconds and the memory of device 0. driver: libcuda. Raises Refused."""
    began_s = time.perf_counter()

    def call(name: str, *arguments: Any) -> None:
        code = getattr(driver, name)(*arguments)
        if code:
            raise Refused(f"{name}: CUDA error {code}")

    device, context, address = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    back = (ctypes.c_ubyte * NUM_BYTES)()
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(NUM_BYTES))
    call("cuMemsetD8_v2", address, ctypes.c_ubyte(VALUE), ctypes.c_size_t(NUM_BYTES))
    call("cuMemcpyDtoH_v2", ctypes.byref(back), address, ctypes.c_size_t(NUM_BYTES))
    call("cuMemFree_v2", address)
    if bytes(back) != bytes([VALUE]) * NUM_BYTES:
        raise Refused("what was written is not what was read back")
    seconds = time.perf_counter() - began_s
    return {"seconds": round(seconds, 2), "free_gib": round(free.value / 2**30, 2), "total_gib": round(total.value / 2**30, 2)}


def main() -> int:
    try:
        print(json.dumps(probe(ctypes.CDLL("libcuda.so.1"))), flush=True)
    except (OSError, AttributeError, Refused) as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
