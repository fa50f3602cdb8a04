"""Measures how soon a cold LoRA adapter answers: `python -m benchmarks.adapter_loads --model DIR [--adapters 12] [--rank 32]`.

A daemon serves the model and adapters of it. Each adapter is asked for one token twice: with its file dropped from the page cache,
so that it is read from the drive, and again when it is in the device's memory; then the base is asked. Beside them the same file is
read by a plain loop from the drive. Prints a table to standard error and one JSON line: medians in milliseconds, and what a cold
adapter may take (the aim): 1.2 times the plain read and 50 ms more than the base.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.server import Server
from engine.host.processor import this_processor
from loader.configs.adapter_matrices import adapted_matrices
from loader.models.catalog import scan_one

READ_BYTES = 1 << 20


def write_adapter(folder: Path, base: Path, rank: int, seed: int) -> Path:
    """Writes an adapter of all matrices that adapters may change, of random numbers, and returns its weights' path."""
    shape = scan_one(base).shape
    assert shape is not None
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for matrix in adapted_matrices(shape):
        for name, outputs in zip(matrix.names, matrix.outputs, strict=True):
            for half, dims in (("A", (rank, matrix.inputs)), ("B", (outputs, rank))):
                held = torch.randn(dims, generator=generator).mul_(0.01).to(torch.bfloat16)
                tensors[f"base_model.model.{matrix.prefix}{name}.lora_{half}.weight"] = held
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "base_model_name_or_path": base.name}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder / "adapter_model.safetensors"


def drop_from_cache(path: Path) -> None:
    """Has the page cache forget a file."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def read_ms(path: Path) -> float:
    began = time.perf_counter()
    with open(path, "rb", buffering=0) as file:
        while file.read(READ_BYTES):
            pass
    return 1e3 * (time.perf_counter() - began)


def token_ms(url: str, model: str) -> float:
    """Returns how long one token of a short prompt takes, with the HTTP around it."""
    body = json.dumps({"model": model, "prompt": "What is a socket?", "max_tokens": 1, "temperature": 0}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=60) as response:
        response.read()
    return 1e3 * (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--adapters", type=int, default=12)
    parser.add_argument("--rank", type=int, default=32)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hearth-bench-", dir=options.model.parent) as folder:
        models = Path(folder)
        base = models / "base"
        base.symlink_to(options.model.resolve())
        names = [f"adapter-{number}" for number in range(options.adapters)]
        files = [write_adapter(models / name, base, options.rank, number) for number, name in enumerate(names)]
        with Server(models, ["cpu=4GiB"]) as server:
            for model in ("base", names[0]):  # the base's load, and kernels of adapters
                token_ms(server.url, model)
            taken: dict[str, list[float]] = {"plain_read": [], "cold": [], "warm": [], "base": []}
            for name, file in zip(names[1:], files[1:], strict=True):
                drop_from_cache(file)
                taken["plain_read"].append(read_ms(file))
                drop_from_cache(file)
                taken["cold"].append(token_ms(server.url, name))
                taken["warm"].append(token_ms(server.url, name))
                taken["base"].append(token_ms(server.url, "base"))
        file_bytes = files[0].stat().st_size
    median = {kind: round(statistics.median(values), 2) for kind, values in taken.items()}
    aim = round(1.2 * median["plain_read"] + 50 + median["base"], 2)
    result = {"benchmark": "adapter_loads", "model": options.model.name, "rank": options.rank, "file_bytes": file_bytes}
    result |= {"adapters": options.adapters - 1, "median_ms": median, "aim_ms": aim}
    result["cpu_features"] = sorted(this_processor().features)
    for kind, value in (*median.items(), ("aim: 1.2 x plain read + 50 ms + base", aim)):
        print(f"{kind:40} {value:8.2f} ms", file=sys.stderr)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
