"""Measures how fast a mixture of experts decodes on the cpu device, against reading the weights that a token needs.

A checkpoint of 16 experts, 2 a token, with 245 M parameters (52 M of them for a token) in bfloat16 is loaded by an engine's runner
and decodes one token a step from recorded steps. In turns with these steps the one-row kernel reads matrices as long as the model.
A share of 1 means that a step takes as long as reading, at that bandwidth, what it reads: attention, routers, the experts that were
chosen, and the head. usage: python -m benchmarks.experts [--threads N] [--rounds N] [--cpu-time]

--cpu-time: the clock of this process's CPU time instead of the wall's, for a machine that others use, with one thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.run import machine
from engine.contracts.loads import LoadTask
from engine.cpu.backend import CpuBackend
from engine.cpu.memory import CpuMemory
from engine.cpu.model import CpuModel
from engine.cpu.ops import CpuOps
from engine.loading.runner import TorchRunner
from engine.protocol import Configure, LoadModel
from loader.models.catalog import scan_one
from loader.shapes.model_shape import ModelShape
from loader.sizes.layout import num_parameters, parameter_shapes
from scheduler.batch.plan import BatchPlan, make_sequence_table

CHUNK_BYTES, BLOCK_TOKENS, CONTEXT, STEPS = 2 << 20, 16, 256, 16
CONFIG: dict[str, Any] = {
    "vocab_size": 16000,
    "hidden_size": 1024,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_local_experts": 16,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 1024,
}


def write(folder: Path) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(7)
    MixtralForCausalLM(MixtralConfig(**CONFIG)).to(torch.bfloat16).save_pretrained(folder)


def loaded(folder: Path, threads: int, cache_dir: str) -> CpuModel:
    seen = scan_one(folder)
    chunks = -(-seen.weights_bytes["bfloat16"] // CHUNK_BYTES)
    memory = CpuMemory(chunks + 64, CHUNK_BYTES, [])
    options = Configure("cpu:0", memory.num_chunks, CHUNK_BYTES, 64 << 20, 512, BLOCK_TOKENS, 10.0, threads, cache_dir=cache_dir)
    backend = CpuBackend(memory, options)
    runner = TorchRunner(backend, options, None)
    runner._kernels.result()
    backend._ops = CpuOps(cache_dir)
    backend._ops.prepare("bfloat16", threads)
    spec = LoadModel(1, "moe", str(folder), "bfloat16", seen.fingerprint, 1 << 40, 0, 0, CONTEXT + STEPS, 8, [1])
    model = runner.load(LoadTask(spec, np.arange(64, 64 + chunks, dtype=np.int32), lambda done, total: None, lambda: False))
    assert isinstance(model, CpuModel)
    return model


def step_bytes(shape: ModelShape) -> int:
    """Returns how many bytes of weights a step of one token reads."""
    assert shape.experts is not None
    total = 0.0
    for name, dims in parameter_shapes(shape).items():
        share = shape.experts.num_chosen / shape.experts.num_experts if ".experts." in name else 1.0
        total += 0 if "embed_tokens" in name else share * np.prod(dims)
    return int(2 * total)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.experts", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--cache-dir", default=str(Path.home() / ".cache" / "hearthd" / "kernels"))
    options = parser.parse_args()
    clock = time.process_time if options.cpu_time else time.perf_counter
    with tempfile.TemporaryDirectory() as name:
        write(Path(name))
        model = loaded(Path(name), options.threads, options.cache_dir)
    shape = model.shape
    read_bytes = step_bytes(shape)
    table = make_sequence_table(8, CONTEXT + STEPS, -(-(CONTEXT + STEPS) // BLOCK_TOKENS), 1)
    table.block_tables[0][:] = np.arange(table.block_tables[0].size, dtype=np.int32).reshape(table.block_tables[0].shape)
    table.tokens[0] = np.random.default_rng(3).integers(2, shape.vocab_size, table.tokens.shape[1])
    table.num_tokens[0], table.temperature[:] = CONTEXT + STEPS, 0.0

    def plan(first: int, num: int) -> BatchPlan:
        slot, computed, new = (np.array([value], np.int32) for value in (0, first, num))
        return BatchPlan(0, "moe", slot, computed, new, np.ones(1, np.bool_))

    for first in range(0, CONTEXT, 128):
        model.execute(plan(first, 128), table)
    matrices = [torch.randn(4096, shape.hidden_size).to(torch.bfloat16) for _ in range(64)]
    row = torch.randn(1, shape.hidden_size).to(torch.bfloat16)
    steps_s, read_s = [], []
    for _ in range(options.rounds + 1):
        begin = clock()
        for at in range(STEPS):
            model.execute(plan(CONTEXT + at, 1), table)
        steps_s.append((clock() - begin) / STEPS)
        begin = clock()
        for matrix in matrices:
            model._ops.linear(row, matrix)
        read_s.append(clock() - begin)
    step_s, bandwidth = statistics.median(steps_s[1:]), sum(one.nbytes for one in matrices) / statistics.median(read_s[1:])
    told = {
        "benchmark": "experts",
        "parameters": num_parameters(shape),
        "threads": options.threads,
        "clock": "cpu" if options.cpu_time else "wall",
        "step_ms": round(step_s * 1e3, 3),
        "step_mb": round(read_bytes / 1e6, 1),
        "one_row_gb_s": round(bandwidth / 1e9, 2),
        "share_of_one_row": round(read_bytes / step_s / bandwidth, 3),
        "recorded": bool(model._steps.decodes),
    }
    print(json.dumps(told | machine()), flush=True)


if __name__ == "__main__":
    main()
