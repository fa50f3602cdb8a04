"""Prints what a run is of: python -m tests.aarch64.versions"""

from __future__ import annotations

import importlib.metadata
import mmap
import platform

import llvmlite.binding

from engine.host.processor import this_processor

PACKAGES = ("torch", "numba", "llvmlite", "numpy", "llguidance", "tokenizers", "transformers", "uvloop")


def main() -> None:
    found = llvmlite.binding.get_host_cpu_features()
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    print(f"Python {platform.python_version()} on {platform.machine()}, pages of {mmap.PAGESIZE} bytes")
    print(f"{versions}; LLVM {'.'.join(map(str, llvmlite.binding.llvm_version_info))}")
    print(f"hearthd says: {', '.join(sorted(this_processor().features)) or 'nothing'}; {this_processor().describe()}")
    names = ", ".join(sorted(name for name, has in found.items() if has))
    print(f"LLVM says: {llvmlite.binding.get_host_cpu_name()} with {names or 'nothing'}")


if __name__ == "__main__":
    main()
