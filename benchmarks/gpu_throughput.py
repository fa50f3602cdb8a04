"""200 requests of chat-like lengths (about 220 tokens in, 200 out) through the batch scheduler and a model on the GPU, and the same
through transformers' continuous batching, the peer a machine without other servers has. Same shape, random weights, greedy. both:
one engine after the other, each in a process of its own, and how many times as many tokens a second ours brings.

usage: python -m benchmarks.gpu_throughput [--engine ours|transformers|both] [--model 8b] [--tiny]
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_shapes import BLOCK_TOKENS, CONFIGS, LLAMA, SPARE_BLOCKS, Bench
from engine.protocol import SamplingParams
from scheduler.batch.batch_scheduler import BatchLimits, BatchScheduler
from scheduler.batch.block_pool import BlockPool
from scheduler.batch.chunk_pool import ChunkPool
from scheduler.batch.group_cache import GroupCache
from scheduler.batch.kv_cache import KVCache
from scheduler.batch.request import BatchRequest

MAX_BATCHED_TOKENS = 8192
CHUNK_BLOCKS = 8


def lengths(num_requests: int, mean_in: int, mean_out: int) -> list[tuple[int, int]]:
    """Log-normal, as chats are: many short ones, a few five times the mean."""
    generator = np.random.default_rng(4)
    columns = [np.clip(generator.lognormal(0, 0.8, num_requests) * mean * 0.73, 4, 6 * mean) for mean in (mean_in, mean_out)]
    return list(zip(*(column.astype(int).tolist() for column in columns), strict=True))


def bench_for(name: str, device: str, requests: list[tuple[int, int]]) -> Bench:
    """Returns a model with room for all requests at a time, each at its own length: all at the longest one's would not fit beside
    an 8B model."""
    num, longest = len(requests), max(sum(pair) for pair in requests) + 2
    num_blocks = sum(-(-sum(pair) // BLOCK_TOKENS) + 1 for pair in requests) + SPARE_BLOCKS
    return Bench(name, device, num, longest, num if device == "cuda" else 0, num_blocks=num_blocks)


def ours(name: str, device: str, requests: list[tuple[int, int]]) -> dict[str, Any]:
    num, longest = len(requests), max(sum(pair) for pair in requests) + 2
    bench = bench_for(name, device, requests)
    num_chunks = bench.num_blocks // CHUNK_BLOCKS
    generator = np.random.default_rng(1)
    figures: dict[str, Any] = {}
    for run in ("warm-up", "measured"):
        chunks = ChunkPool(num_chunks, CHUNK_BLOCKS * bench.block_bytes, lease_chunks=num_chunks - 2)
        kv = KVCache([GroupCache(BlockPool(chunks, bench.block_bytes, 2), BLOCK_TOKENS)])
        limits = BatchLimits(num, longest, MAX_BATCHED_TOKENS, (), "bench", bench.dtype)
        scheduler = BatchScheduler(name, kv, limits)
        for number, (num_in, num_out) in enumerate(requests):
            prompt = generator.integers(0, bench.shape.vocab_size, num_in).astype(np.int32)
            params = SamplingParams(max_tokens=num_out, temperature=0.0, ignore_eos=True)
            scheduler.submit(BatchRequest(number + 1, prompt, num_in, params))
        steps = tokens = 0
        host_s = device_s = 0.0
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        while scheduler.runnable:
            planned_s = time.perf_counter()
            plan = scheduler.plan(steps + 1)
            if plan is None:
                break
            pending = bench.model.launch(plan, scheduler.table)
            host_s += time.perf_counter() - planned_s
            result = pending.wait()
            device_s += result.seconds
            told_s = time.perf_counter()
            tokens += len(scheduler.finish_step(plan, result.ids, result.bad).ids)
            host_s += time.perf_counter() - told_s
            steps += 1
        seconds = time.perf_counter() - began_s
        figures = {
            "engine": "ours",
            "run": run,
            "seconds": round(seconds, 3),
            "out_tokens": tokens,
            "out_tokens_per_s": round(tokens / seconds, 1),
            "steps": steps,
            "host_us_per_step": round(host_s / steps * 1e6, 1),
            "cpu_us_per_out_token": round((time.process_time() - began_cpu_s) / tokens * 1e6, 1),
            "device_share": round(device_s / seconds, 3),
        }
    return figures


def transformers_peer(name: str, device: str, requests: list[tuple[int, int]]) -> dict[str, Any]:
    """One token budget for all requests (it has no other), so the same number of tokens comes out: the mean for each."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    shape = {key: value for key, value in (LLAMA | CONFIGS[name]).items() if key not in ("architectures", "torch_dtype")}
    torch.set_default_device(device)
    torch.set_default_dtype(torch.bfloat16 if device == "cuda" else torch.float32)
    config = LlamaConfig(**shape, attn_implementation="sdpa")
    model = LlamaForCausalLM(config).eval()
    torch.set_default_device("cpu")
    num_out = sum(pair[1] for pair in requests) // len(requests)
    generator = np.random.default_rng(1)
    settings = GenerationConfig(max_new_tokens=num_out, do_sample=False, eos_token_id=-1, pad_token_id=0)
    figures: dict[str, Any] = {}
    for run in ("warm-up", "measured"):
        prompts = [generator.integers(0, config.vocab_size, pair[0]).tolist() for pair in requests]
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        told = model.generate_batch(inputs=prompts, generation_config=settings)
        seconds = time.perf_counter() - began_s
        tokens = sum(len(output.generated_tokens) for output in told.values())
        figures = {
            "engine": "transformers",
            "run": run,
            "seconds": round(seconds, 3),
            "out_tokens": tokens,
            "out_tokens_per_s": round(tokens / seconds, 1),
            "cpu_us_per_out_token": round((time.process_time() - began_cpu_s) / max(1, tokens) * 1e6, 1),
        }
        print(json.dumps({"benchmark": "gpu_throughput", "model": name, "requests": len(requests)} | figures), flush=True)
    return figures


def both(arguments: Sequence[str]) -> None:
    """Prints the lines of both engines, and their ratio. arguments: of this script, without the engine."""
    rates = dict[str, float]()
    for engine in ("ours", "transformers"):
        command = [sys.executable, "-m", "benchmarks.gpu_throughput", "--engine", engine, *arguments]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            for text in process.stdout or ():
                print(text, end="", flush=True)
                if text.startswith('{"benchmark": "gpu_throughput"') and (line := json.loads(text))["run"] == "measured":
                    rates[engine] = line["out_tokens_per_s"]
        if process.returncode or engine not in rates:
            sys.exit(f"{engine} ended with {process.returncode}")
    faster = round(rates["ours"] / rates["transformers"], 2)
    print(json.dumps({"benchmark": "gpu_throughput", "what": "ours over transformers", "ours_over_it": faster}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu_throughput", description=__doc__)
    parser.add_argument("--engine", default="ours", choices=("ours", "transformers", "both"))
    parser.add_argument("--model", default="8b", choices=("8b", "1b"))
    parser.add_argument("--tiny", action="store_true", help="interpreted on the CPU, at a size that only shows that this runs")
    options = parser.parse_args()
    if options.engine == "both":
        both(["--model", options.model, *(["--tiny"] if options.tiny else [])])
        return
    device, name = ("cpu", "tiny") if options.tiny else ("cuda", options.model)
    requests = lengths(3, 6, 4) if options.tiny else lengths(200, 220, 200)
    gc.disable()
    if options.engine == "transformers":
        transformers_peer(name, device, requests)
        return
    line = {"benchmark": "gpu_throughput", "model": name, "requests": len(requests)} | ours(name, device, requests)
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
