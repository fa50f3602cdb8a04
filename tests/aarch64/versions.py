"""Prints what a run is of: python -m tests.aarch64.versions"""

from __future__ import annotations

import ctypes
import importlib.metadata
import mmap
import platform

import llvmlite.binding

_AT_HWCAP, _AT_HWCAP2 = 16, 26
PACKAGES = ("torch", "numba", "llvmlite", "numpy", "llguidance", "tokenizers", "transformers", "uvloop")


def main() -> None:
    getauxval = ctypes.CDLL(None).getauxval
    getauxval.restype, getauxval.argtypes = ctypes.c_ulong, (ctypes.c_ulong,)
    found = llvmlite.binding.get_host_cpu_features()
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    print(f"Python {platform.python_version()} on {platform.machine()}, pages of {mmap.PAGESIZE} bytes")
    print(f"{versions}; LLVM {'.'.join(map(str, llvmlite.binding.llvm_version_info))}")
    print(f"the system says: AT_HWCAP {getauxval(_AT_HWCAP):#x}, AT_HWCAP2 {getauxval(_AT_HWCAP2):#x}")
    names = ", ".join(sorted(name for name, has in found.items() if has))
    print(f"LLVM says: {llvmlite.binding.get_host_cpu_name()} with {names or 'nothing'}")


if __name__ == "__main__":
    main()
