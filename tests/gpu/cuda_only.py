"""What only a CUDA device runs, found in the code: `python -m tests.gpu.cuda_only` prints the table of docs/gpu.md."""

from __future__ import annotations

import ast
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]
CALLS = re.compile(r"\btorch\.cuda\.|\bdriver\.cu[A-Z]|\bpynvml\.|\bCudaMemory\(")
POSSIBLE = re.compile(CALLS.pattern.replace(r"\b", ""))  # in a text without white space


def found() -> dict[str, list[str]]:
    """File -> its functions and classes, outermost ones, with a call that needs a device or its driver."""
    files: dict[str, list[str]] = {}
    for package in ("engine", "loader", "daemon"):
        for path in sorted((ROOT / package).rglob("*.py")):
            text = path.read_text()
            if not POSSIBLE.search("".join(text.split())):  # few files have any; unparsing all takes seconds
                continue
            names = [
                node.name
                for node in ast.parse(text).body
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
                and CALLS.search(ast.unparse(node))  # without comments
            ]
            if names:
                files[str(path.relative_to(ROOT))] = names
    return files


def table() -> str:
    rows = [f"| `{file}` | {', '.join(f'`{name}`' for name in names)} |" for file, names in found().items()]
    return "\n".join(["| file | calls of CUDA's driver, torch.cuda or NVML in |", "|---|---|", *rows]) + "\n"


if __name__ == "__main__":
    print(table(), end="")
