"""Measures where a step's time goes, and compares it with what the machine's memory and arithmetic allow.

The engine's own parts (batch scheduler, model, sampler, message) run decode steps, prompts and both together without a daemon, with
a clock around every kernel (recorded steps have their own): products with weights, attention, sampling, row-wise kernels (norms,
rotary embedding, activations), and what is left, which is Python, numpy and torch's glue. `bound_ms` is the larger of bytes ÷
bandwidth and operations ÷ rate of every product, and the KV read ÷ bandwidth; bandwidth is that of the one-row kernel over
2 GiB of matrices, one after the other (a single one may stay in the processor's cache), the rate that of F.linear at 128 rows, both
of this run.
usage: python -m benchmarks.roofline [--model mid,one-b] [--steps 30] [--only decode,prefill,mixed,sampled or machine]
"""

from __future__ import annotations

import argparse
import json
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from engine.host.process import prepare_process

prepare_process()  # before torch is imported

import numpy as np  # noqa: E402
import torch  # noqa: E402

from benchmarks.checkpoints import make  # noqa: E402
from benchmarks.huge_pages import placed  # noqa: E402
from benchmarks.server import ROOT  # noqa: E402
from engine.contracts.loads import LoadTask  # noqa: E402
from engine.cpu.backend import CpuBackend  # noqa: E402
from engine.cpu.memory import CpuMemory  # noqa: E402
from engine.cpu.model import CpuModel  # noqa: E402
from engine.cpu.ops import CpuOps  # noqa: E402
from engine.cpu.programs.replay import ChunkProgram, LogitsProgram, Replay  # noqa: E402
from engine.host.process import num_cores  # noqa: E402
from engine.loading.runner import TorchRunner  # noqa: E402
from engine.ops import reference  # noqa: E402
from engine.protocol import JOURNAL_BYTES, Configure, LoadModel, SamplingParams, TokensOut, encode, write_journal  # noqa: E402
from engine.serve.served_models import ServedModels  # noqa: E402
from loader.models.catalog import scan_one  # noqa: E402
from loader.shapes import dtypes, kv_layout  # noqa: E402
from loader.shapes.model_shape import ModelShape  # noqa: E402
from loader.sizes import layout, work_space  # noqa: E402
from scheduler.batch.request import BatchRequest  # noqa: E402

ops = CpuOps(str(ROOT / ".cache"))

MACHINE_BYTES = 2 << 30  # of matrices that the bandwidth is measured with
CHUNK_BYTES = 2 << 20
BLOCK_TOKENS = 16
MAX_BATCHED_TOKENS = 512
CONTEXT_TOKENS = 192
KINDS = ("decode", "sampled", "prefill", "mixed")
GREEDY, SAMPLED = SamplingParams(1 << 20, temperature=0.0), SamplingParams(1 << 20, temperature=0.8, top_p=0.95, seed=7)


@dataclass(slots=True)
class Clocks:
    """Seconds in each sort of kernel. A kernel called by another counts for that one."""

    seconds: dict[str, float] = field(default_factory=dict)
    _inside: bool = False

    def around(self, sort: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            if self._inside:
                return function(*args, **options)
            self._inside = True
            begin = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                self.seconds[sort] = self.seconds.get(sort, 0.0) + time.perf_counter() - begin
                self._inside = False

        return timed

    def watch(self, module: types.ModuleType) -> None:
        """Every kernel of the module, sorted by its name."""
        for name, function in list(vars(module).items()):
            callable_here = callable(function) and not isinstance(function, type) and not name.startswith("_")
            if callable_here and name not in ("prepare", "set_num_threads") and (sort := sort_of(name)):
                setattr(module, name, self.around(sort, function))

    def add(self, program: Program) -> None:
        """A recorded step's own clocks, since `watch_step`."""
        for replay in program.replays():
            assert replay.seconds is not None
            for call, seconds in zip(replay.calls, replay.seconds.tolist(), strict=True):
                sort = sort_of(name_of(call.kernel))
                self.seconds[sort] = self.seconds.get(sort, 0.0) + seconds


@dataclass(slots=True)
class Program:
    """The recordings by which a step is run again: one, or one up to the hidden states and a head."""

    parts: list[ChunkProgram | LogitsProgram]

    def replays(self) -> list[Replay]:
        """Returns a model's replays, including those that sample tokens from logits."""
        drawings = [drawing for part in self.parts if isinstance(part, LogitsProgram) for drawing in part.drawings.values()]
        return [*self.parts, *drawings]


def watch_step(program: Program) -> None:
    """Starts the clocks of its calls."""
    for replay in program.replays():
        replay.watch()


def name_of(kernel: Any) -> str:
    """Returns the name of what a recorded step calls: a kernel, its forms, or a function of torch with some of its arguments."""
    kernel = getattr(kernel, "func", kernel)
    kernel = getattr(kernel, "serial", kernel)
    return str(getattr(kernel, "__name__", type(kernel).__name__))


def sort_of(kernel: str) -> str:
    if "linear" in kernel or kernel in ("mm", "addmm"):
        return "products"
    if "attention" in kernel.lower() or kernel == "gather_context":
        return "attention"
    if kernel.lstrip("_").startswith(("sample", "greedy", "top_logprobs", "penalise")):
        return "sampling"
    return "rows" if any(part in kernel for part in ("norm", "rope", "rota", "silu", "gelu", "gather_rows")) else ""


@dataclass(slots=True)
class Machine:
    bandwidth_gb_s: float
    gflop_s: float


def measure_machine(seconds: float = 1.0) -> Machine:
    """Best of several: one-row products with a model's worth of matrices, and F.linear at 128 rows."""
    matrix = torch.randn(8192, 2048).to(torch.bfloat16)
    one, many = torch.randn(1, 2048).to(torch.bfloat16), torch.randn(128, 2048).to(torch.bfloat16)
    weights = placed(MACHINE_BYTES // matrix.nbytes, *matrix.shape, dtype=matrix.dtype).copy_(matrix)

    def best(run: Callable[[], Any]) -> float:
        shortest, end = float("inf"), time.perf_counter() + seconds
        while time.perf_counter() < end:
            begin = time.perf_counter()
            run()
            shortest = min(shortest, time.perf_counter() - begin)
        return shortest

    ops.prepare("bfloat16", num_cores())
    with torch.inference_mode():
        ops.set_num_threads(num_cores())
        moved = best(lambda: [ops.linear(one, weight) for weight in weights])
        computed = best(lambda: torch.nn.functional.linear(many, matrix))
    return Machine(weights.nbytes / moved / 1e9, 2 * 128 * matrix.numel() / computed / 1e9)


class Steps:
    """One loaded model and its batch scheduler; `run` is what the engine's loop does in a step, less epoll and the socket."""

    def __init__(self, folder: Path, threads: int) -> None:
        checkpoint = scan_one(folder)
        if checkpoint.shape is None or not checkpoint.complete:
            raise SystemExit(f"{folder}: {checkpoint.error or checkpoint.reason}")
        self.shape: ModelShape = checkpoint.shape
        self.dtype = self.shape.dtype
        length = 2048
        kv_chunks = -(-64 * 512 // BLOCK_TOKENS * kv_layout.block_bytes(self.shape, self.dtype, BLOCK_TOKENS) // CHUNK_BYTES)
        weights_chunks = -(-layout.weights_bytes(self.shape, self.dtype) // CHUNK_BYTES)
        num_chunks = kv_chunks + weights_chunks
        configure = Configure(
            "cpu:0", num_chunks, CHUNK_BYTES, 0, MAX_BATCHED_TOKENS, BLOCK_TOKENS, 10.0, threads, cache_dir=str(ROOT / ".cache")
        )
        memory = CpuMemory(num_chunks, CHUNK_BYTES)
        for chunk in range(num_chunks):
            memory.prepare(chunk)  # as an engine does before it has anything to do
        spec = LoadModel(
            1, folder.name, str(folder), self.dtype, checkpoint.fingerprint, weights_chunks, kv_chunks, 0, length, 64, []
        )
        models = ServedModels(configure, memory)
        place = models.take_place(spec)
        task = LoadTask(spec, place.weights, lambda done, total: None, lambda: False)
        hosted = TorchRunner(CpuBackend(memory, configure), configure).load(task)
        assert isinstance(hosted, CpuModel)
        self.hosted = hosted
        models.add(models.make(spec, self.hosted, place))
        self.scheduler = models.by_name[folder.name].scheduler
        self.journal = bytearray(JOURNAL_BYTES)
        self._random = np.random.default_rng(3)
        self._num_requests = 0

    def submit(self, num_tokens: int, params: SamplingParams) -> int:
        self._num_requests += 1
        prompt = self._random.integers(0, self.shape.vocab_size, num_tokens).astype(np.int32)
        self.scheduler.submit(BatchRequest(self._num_requests, prompt, num_tokens, params))
        return self._num_requests

    def run(self) -> None:
        scheduler = self.scheduler
        plan = scheduler.plan(1)
        assert plan is not None
        write_journal(self.journal, scheduler.table.request_id[plan.slots])
        result = self.hosted.execute(plan, scheduler.table)
        outcome = scheduler.finish_step(plan, result.ids, result.bad)
        encode(TokensOut("m", 1, result.seconds, outcome.request_ids, outcome.ids, finish=outcome.finish, cached=outcome.cached))

    def running(self, kind: str, size: int) -> Iterator[None]:
        """Runs what is measured: yields before every step that counts."""
        if kind == "prefill":
            return self.prefill(size)
        if kind == "mixed":
            return self.mixed(8, size)
        return self.decode(size, SAMPLED if kind == "sampled" else GREEDY)

    def record(self, kind: str, size: int) -> Program | None:
        """The program of such steps, recorded before there are clocks around the kernels; it has its own. None: they are too
        large."""
        running = self.running(kind, size)
        for _ in range(3):  # the step is recorded, then how its tokens are drawn
            next(running)
            self.run()
        self.forget_all()
        steps = self.hosted._steps
        has_chunks = kind in ("prefill", "mixed")
        first: ChunkProgram | LogitsProgram | None = (
            steps.chunks.get(work_space.recorded_tokens(size))
            if has_chunks
            else steps.decodes.get(steps._inputs.recorded_rows(size))
        )
        return None if first is None else Program([first, *(steps.heads.values() if has_chunks else ())])

    def forget_all(self) -> None:
        for request_id in range(1, self._num_requests + 1):
            self.scheduler.abort(request_id)

    def decode(self, rows: int, params: SamplingParams) -> Iterator[None]:
        for _ in range(rows):
            self.submit(CONTEXT_TOKENS, params)
        while self.scheduler.num_decoding < rows:
            self.run()
        while True:
            yield

    def prefill(self, num_tokens: int) -> Iterator[None]:
        while True:
            request = self.submit(num_tokens, GREEDY)
            yield
            self.scheduler.abort(request)

    def mixed(self, rows: int, num_tokens: int) -> Iterator[None]:
        running = self.decode(rows, GREEDY)
        while True:
            next(running)
            request = self.submit(num_tokens - rows, GREEDY)
            yield
            self.scheduler.abort(request)

    def num_product_weights(self) -> tuple[int, int]:
        """Weights every token meets, and those of the head, which only sampling rows meet."""
        shapes = layout.parameter_shapes(self.shape)
        every = sum(dims[0] * dims[1] for name, dims in shapes.items() if len(dims) == 2 and ".layers." in name)
        return every, self.shape.vocab_size * self.shape.hidden_size

    def bound_ms(self, machine: Machine, num_tokens: int, num_sampling: int, num_kv_tokens: int) -> float:
        every, head = self.num_product_weights()
        item = dtypes.ITEM_BYTES[self.dtype]
        seconds = (
            num_kv_tokens
            * kv_layout.block_bytes(self.shape, self.dtype, BLOCK_TOKENS)
            / BLOCK_TOKENS
            / machine.bandwidth_gb_s
            / 1e9
        )
        for weights, rows in ((every, num_tokens), (head, num_sampling)):
            seconds += max(weights * item / machine.bandwidth_gb_s, 2 * weights * rows / machine.gflop_s) / 1e9
        return 1e3 * seconds


def account(
    steps: Steps, machine: Machine, clocks: Clocks, kind: str, size: int, num_steps: int, program: Program | None
) -> dict[str, Any]:
    rows = size if kind in ("decode", "sampled") else 8 if kind == "mixed" else 1
    running = steps.running(kind, size)
    for _ in range(3):
        next(running)
        steps.run()
    clocks.seconds.clear()
    if program is not None:
        watch_step(program)
    walls = []
    for _ in range(num_steps):
        next(running)
        begin = time.perf_counter()
        steps.run()
        walls.append(time.perf_counter() - begin)
    if program is not None:
        clocks.add(program)
    steps.forget_all()
    mean_ms = 1e3 * sum(walls) / num_steps
    parts = {sort: 1e3 * clocks.seconds.get(sort, 0.0) / num_steps for sort in ("products", "attention", "rows", "sampling")}
    rest = mean_ms - sum(parts.values())
    num_tokens = size if kind in ("prefill", "mixed") else rows
    num_sampling = rows + (kind == "mixed")
    kv_tokens = 0 if kind == "prefill" else rows * (CONTEXT_TOKENS + num_steps // 2)
    bound = steps.bound_ms(machine, num_tokens, num_sampling, kv_tokens)
    return {
        "benchmark": "roofline",
        "model": steps.hosted.name,
        "kind": kind,
        "size": size,
        "step_ms": round(mean_ms, 3),
        "step_p50_ms": round(1e3 * sorted(walls)[num_steps // 2], 3),
        **{f"{sort}_ms": round(value, 3) for sort, value in parts.items()},
        "python_ms": round(rest, 3),
        "all_but_products_and_attention_percent": round(100 * (mean_ms - parts["products"] - parts["attention"]) / mean_ms, 1),
        "bound_ms": round(bound, 3),
        "bound_share": round(bound / mean_ms, 3),
        "bandwidth_gb_s": round(machine.bandwidth_gb_s, 1),
        "gflop_s": round(machine.gflop_s),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mid,one-b", help="checkpoints of benchmarks.checkpoints")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--only", default=",".join(KINDS))
    options = parser.parse_args()
    if options.only == "machine":
        print(json.dumps({"benchmark": "roofline", "kind": "machine", **asdict(measure_machine())}))
        return
    sizes = {"decode": (1, 4, 8, 32), "sampled": (32,), "prefill": (128, 512), "mixed": (128,)}
    for name in options.model.split(","):
        folder = make(ROOT / ".cache" / "checkpoints", name)
        steps = Steps(folder, options.threads)
        machine = measure_machine()
        programs = {(kind, size): steps.record(kind, size) for kind in options.only.split(",") for size in sizes[kind]}
        clocks = Clocks()
        from engine.cpu.kernels import entry

        clocks.watch(entry)
        clocks.watch(reference)
        torch.nn.functional.linear = clocks.around("products", torch.nn.functional.linear)
        for kind in options.only.split(","):
            for size in sizes[kind]:
                found = account(steps, machine, clocks, kind, size, options.steps, programs.get((kind, size)))
                print(json.dumps(found), flush=True)
        steps.hosted.release()


if __name__ == "__main__":
    main()
