"""Measures how long two processes take to add up what they have computed, and how fast a model decodes that is split over them.

`python -m benchmarks.ranks [--only sums,plans,decode] [--shape NAME] [--rows N,N] [--rounds N]` prints one JSON line and a table
for each part.

sums: a sum of 8 KiB over two ranks, each a process on a core of its own, through engine/cpu/ranks.py and through gloo
(torch.distributed), in turn: in a loop, where the other rank is spinning, and from sleep, from when the rank that comes 2 ms late
calls to when the one that has slept returns; through shared memory also where the late rank begins a step and prepares it for 50 us
before it calls. What the system takes to wake a process (eventfd) stands beside it.

plans: the plan of a step of 16 rows, through what engines use for it, each process on a core of its own: from when the leader
begins to post it to when the follower has it, and to when the follower has noted the step's requests in its journal and begins the
step. In a loop, where the follower is spinning; the same after each rank has read 16 MiB, as a step reads weights; and after 2 ms
of sleep.

decode: decode steps of a model of one of benchmarks.checkpoints' shapes, with weights drawn at random, split over two processes of
one thread, beside the same in one process of two threads, in turn. The shape "mixture" has 16 layers of 32 experts, 8 of them for a
token. It is measured with each expert divided among the processes, and with half of the experts on each of them. norms_us: what all
norms of a step take that read what ranks have just added up, two a layer, with their rows in the caches as the sums leave them: the
most that sums could save which did the norms' work. norms_percent: of the split model's step, both in their fastest round.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

from engine.host.process import prepare_process

prepare_process()  # before torch is imported

import numpy as np  # noqa: E402
import torch  # noqa: E402

from benchmarks.checkpoints import SHAPES  # noqa: E402
from benchmarks.forward import BLOCK_TOKENS, make_table  # noqa: E402
from benchmarks.rank_plans import AFTER_READING, FROM_SLEEP, SPINNING, PlanRank, new_exchange  # noqa: E402
from benchmarks.run import table  # noqa: E402
from benchmarks.server import ROOT  # noqa: E402
from engine.cpu.memory import CpuMemory  # noqa: E402
from engine.cpu.model import CpuModel  # noqa: E402
from engine.cpu.ops import CpuOps  # noqa: E402
from engine.cpu.programs.program import Recorder, Scratch, recording  # noqa: E402
from engine.cpu.programs.replay import Replay  # noqa: E402
from engine.cpu.ranks import SharedRanks  # noqa: E402
from engine.host.processor import this_processor  # noqa: E402
from engine.host.rank_memory import LINE_BYTES, rank_memory_bytes  # noqa: E402
from engine.memory.weight_range import WeightRange  # noqa: E402
from engine.protocol import LoadModel  # noqa: E402
from loader.configs.hf_config import parse_config  # noqa: E402
from loader.shapes.kv_layout import block_bytes  # noqa: E402
from loader.shapes.model_shape import Division  # noqa: E402
from loader.sizes.layout import weights_bytes  # noqa: E402
from loader.sizes.slices import split  # noqa: E402
from scheduler.batch.plan import BatchPlan  # noqa: E402

MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_experts": 32,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 384,
}
MODELS: dict[str, dict[str, Any]] = SHAPES | {"mixture": MIXTURE}
SIZE = 2
VALUES = (2, 2048)  # bfloat16, 8 KiB
PLAN_ROWS = 16
SHARED, GLOO, WAKING = "shared memory", "gloo", "eventfd, without a sum"
LATE_S, PREPARING_S = 0.002, 50e-6
CONTEXT, CHUNK_BYTES, MOST_ROWS = 192, 2 << 20, 64


class Process:
    """One of the processes that are measured; it does what it is asked."""

    def __init__(self, rank: int, fd: int, folder: str, doorbells: list[int], exchange: list[int]) -> None:
        self.rank, self._cores, self._doorbells = rank, sorted(os.sched_getaffinity(0)), doorbells
        self._exchange = exchange
        self._plan_rank: PlanRank | None = None
        memory = np.frombuffer(mmap.mmap(fd, 0), np.uint8)
        self.ops = CpuOps(str(ROOT / ".cache"))
        self.ops.prepare("bfloat16", 2, "ranks")
        self.ranks = SharedRanks(self.ops, max(rank, 0), SIZE, memory[:8].view(np.int64), memory[LINE_BYTES:])
        self.folder = folder
        self.model: CpuModel | None = None

    def sums(self, way: str, num: int) -> dict[str, Any]:
        """Returns the microseconds of each of `num` sums in a loop, and when those from sleep began (the late rank) or ended."""
        self._keep_to_core()
        x = torch.zeros(VALUES, dtype=torch.bfloat16)
        add = {SHARED: self._shared, GLOO: self._gloo, WAKING: self._waking}[way](x)
        for _ in range(100):
            add()
        spent, moments = np.empty(num), []
        for at in range(num):
            begin = time.perf_counter()
            add()
            spent[at] = time.perf_counter() - begin
        for told in (False, True) if way == SHARED else (False,):
            for _ in range(100):
                add()
                if self.rank == 1:
                    time.sleep(LATE_S)
                    if told:
                        self._begin_step(len(x))
                    moments.append(time.perf_counter())
                add()
                if self.rank == 0:
                    moments.append(time.perf_counter())
        return {"us": (spent * 1e6).tolist(), "moments": moments[:100], "told_moments": moments[100:]}

    def _begin_step(self, num_rows: int) -> None:
        """Does what comes before the first sum of a step: tells the ranks of the rows, and prepares the step for a while."""
        until_s = time.perf_counter() + PREPARING_S
        self.ranks.count(num_rows, 0)
        while time.perf_counter() < until_s:
            pass

    def plans(self, state: str, num: int) -> dict[str, list[float]]:
        """Returns the moments of each of `num` plans (PlanRank.measure)."""
        self._keep_to_core()
        if self._plan_rank is None:
            meet = self._shared(torch.zeros(VALUES, dtype=torch.bfloat16))
            self._plan_rank = PlanRank(self.rank, self._exchange, meet)
        return self._plan_rank.measure(state, PLAN_ROWS, num)

    def _keep_to_core(self) -> None:
        os.sched_setaffinity(0, {self._cores[self.rank % len(self._cores)]})

    def _shared(self, x: torch.Tensor) -> Any:
        """Returns what adds as recorded steps do."""
        self.ranks.count(len(x), 0)
        recorder = Recorder(Scratch(), dry=True)
        with recording(recorder):
            self.ranks.sum(x)
        return Replay(recorder.calls).run

    def _waking(self, x: torch.Tensor) -> Any:
        """Returns what adds nothing and only has the kernel wake the other rank."""

        def meet() -> None:
            os.eventfd_write(self._doorbells[1 - self.rank], 1)
            os.eventfd_read(self._doorbells[self.rank])

        return meet

    def _gloo(self, x: torch.Tensor) -> Any:
        import torch.distributed as dist

        if not dist.is_initialized():
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            dist.init_process_group("gloo", init_method=f"file://{self.folder}/store", rank=self.rank, world_size=SIZE)
        return lambda: dist.all_reduce(x)

    def load(self, name: str, threads: int, expert_parts: int = 1) -> int:
        """Makes the model, or this rank's share of it. Returns the bytes of its weights."""
        self.model = None
        config = {"architectures": ["LlamaForCausalLM"], "vocab_size": 32000, "torch_dtype": "bfloat16"} | MODELS[name]
        config |= {"max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
        shape = parse_config(json.dumps(config).encode())
        if self.rank >= 0:
            shape = split(shape, self.rank, Division(SIZE, expert_parts))
        num_bytes = weights_bytes(shape, "bfloat16")
        num_chunks = -(-num_bytes // CHUNK_BYTES)
        memory = CpuMemory(num_chunks, CHUNK_BYTES)
        weights = WeightRange(memory, num_bytes)
        weights.map(range(num_chunks))
        weights.prepare(0, num_bytes)
        drawn = (torch.randn(1 << 20, generator=torch.Generator().manual_seed(7)) * 0.02).to(torch.bfloat16)
        every = weights.tensor(0, (num_bytes // 2,), torch.bfloat16)
        for at in range(0, len(every), len(drawn)):
            every[at : at + len(drawn)] = drawn[: len(every) - at]
        self._shape = shape
        spec = LoadModel(1, name, "", "bfloat16", "", num_chunks, 0, 0, CONTEXT + 8, MOST_ROWS, [])
        blocks = MOST_ROWS * -(-(CONTEXT + 8) // BLOCK_TOKENS)
        kv_memory = torch.zeros(blocks * block_bytes(shape, "bfloat16", BLOCK_TOKENS), dtype=torch.uint8)
        ranks = self.ranks if self.rank >= 0 else None
        sizes = (BLOCK_TOKENS, threads)
        self.model = CpuModel(self.ops, spec, shape, weights, memory, Scratch(), *sizes, ranks=ranks, kv_memory=kv_memory)
        self._table = make_table(MOST_ROWS, CONTEXT + 8, shape.vocab_size)
        return num_bytes

    def norms(self, rows: int, num: int) -> list[float]:
        """Returns the seconds of each of `num` times all norms behind sums of a decode step, as the recorded step calls them."""
        x, residual = (torch.randn(rows, self._shape.hidden_size).to(torch.bfloat16) for _ in range(2))
        weight = torch.ones(self._shape.hidden_size, dtype=torch.bfloat16)
        recorder = Recorder(Scratch())
        with recording(recorder):
            for _ in range(2 * self._shape.num_layers):
                self.ops.add_rms_norm(x, residual, weight, 1e-6)
        run, spent = Replay(recorder.calls).run, []
        for at in range(num + 4):
            begin = time.perf_counter()
            run()
            if at >= 4:
                spent.append(time.perf_counter() - begin)
        return spent

    def decode(self, rows: int, num: int) -> list[float]:
        """Returns the seconds of each of `num` decode steps, after some that are recorded and warm up."""
        assert self.model is not None
        ones = np.ones(rows, np.int32)
        plan = BatchPlan(0, "m", np.arange(rows, dtype=np.int32), ones * CONTEXT, ones, ones.astype(np.bool_), all_decode=True)
        spent = []
        for at in range(num + 4):
            begin = time.perf_counter()
            if self.rank <= 0:
                self.model.execute(plan, self._table)
            else:
                self.model.follow(plan, self._table)
            if at >= 4:
                spent.append(time.perf_counter() - begin)
        return spent


class Asked:
    """The other end of a Process: rank 0 or 1, or -1 for one that works alone."""

    def __init__(self, rank: int, fd: int, folder: str, doorbells: list[int], exchange: list[int]) -> None:
        command = [sys.executable, "-m", "benchmarks.ranks", "--process", json.dumps([rank, fd, folder, doorbells, exchange])]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        pipes["pass_fds"] = (fd, *exchange, *doorbells)
        self._process = subprocess.Popen(command, cwd=ROOT, **pipes)

    def ask(self, name: str, *args: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, *args]) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a process ended with {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def _answers(asked: list[Asked], name: str, *args: Any) -> list[Any]:
    for one in asked:
        one.ask(name, *args)
    return [one.answer() for one in asked]


def _at(values: Any, share: float) -> float:
    return round(float(np.percentile(values, 100 * share)), 1)


def measure_sums(ranks: list[Asked], num: int) -> list[dict[str, Any]]:
    """Returns a row for each way and state of the other rank."""
    ways = {SHARED: num, GLOO: num // 10, WAKING: num // 10}
    spent: dict[str, list[float]] = {way: [] for way in ways}
    slept: dict[str, list[float]] = {way: [] for way in ways}
    woken: dict[str, list[float]] = {SHARED: []}
    for _ in range(3):
        for way, times in ways.items():
            waiting, late = _answers(ranks, "sums", way, times)
            spent[way] += waiting["us"]
            for taken, moments in ((slept[way], "moments"), (woken.get(way, []), "told_moments")):
                taken += [(end - begin) * 1e6 for begin, end in zip(late[moments], waiting[moments], strict=True)]
    rows = []
    for state, found in (("spinning", spent), ("from sleep", slept), ("from sleep, first of a step", woken)):
        rows += [{"way": way, "state": state, "us_p50": _at(us, 0.5), "us_p99": _at(us, 0.99)} for way, us in found.items()]
    return rows


def measure_plans(ranks: list[Asked], num: int) -> list[dict[str, Any]]:
    """Returns a row for each state of the follower and its caches."""
    states = (SPINNING, AFTER_READING, FROM_SLEEP)
    taken: dict[tuple[str, str], list[float]] = {(state, until): [] for state in states for until in ("told", "begun")}
    for _ in range(3):
        for state in states:
            leader, follower = _answers(ranks, "plans", state, num)
            for until, moments in follower.items():
                taken[state, until] += [(end - begin) * 1e6 for begin, end in zip(leader["posted"], moments, strict=True)]
    rows = []
    for state in states:
        told, begun = taken[state, "told"], taken[state, "begun"]
        rows.append({"state": state, "us_p50": _at(told, 0.5), "us_p90": _at(told, 0.9), "begun_us_p50": _at(begun, 0.5)})
    return rows


def measure_decode(ranks: list[Asked], alone: Asked, name: str, rows: list[int], rounds: int) -> list[dict[str, Any]]:
    """Returns a row for each number of sequences, and each way to divide a mixture of experts. ratio: of the split model's rate to
    that of one process of two threads, the median of those of the rounds."""
    _answers([alone], "load", name, 2)
    found = []
    for expert_parts in (1, SIZE) if name == "mixture" else (1,):
        _answers(ranks, "load", name, 1, expert_parts)
        about = {"shape": name, "divided": "expert" if expert_parts > 1 else "tensor"}
        found += [about | _decode_rates(ranks, alone, num, rounds) for num in rows]
    return found


def _decode_rates(ranks: list[Asked], alone: Asked, num: int, rounds: int) -> dict[str, Any]:
    """Returns what a decode step of `num` sequences takes of the split model, and of the whole one."""
    split_ms, alone_ms, norms_us = [], [], []
    for _ in range(rounds):
        alone_ms.append(float(np.median(_answers([alone], "decode", num, 12)[0])) * 1e3)
        split_ms.append(float(np.median(_answers(ranks, "decode", num, 12)[0])) * 1e3)
        norms_us.append(float(np.median(_answers(ranks, "norms", num, 100)[0])) * 1e6)
    ratio = float(np.median(np.array(alone_ms) / np.array(split_ms)))
    of_both = {"alone_ms": round(float(np.median(alone_ms)), 2), "split_ms": round(float(np.median(split_ms)), 2)}
    of_norms = (
        min(norms_us) / min(split_ms) / 10
    )  # percent; other work on the machine makes ranks wait for each other, and not norms
    rates = {"split_tokens_s": round(1e3 * num / np.median(split_ms), 1), "ratio": round(ratio, 3)}
    rates["split_least_ms"] = round(min(split_ms), 2)
    return {"rows": num, **of_both, **rates, "norms_us": round(min(norms_us), 1), "norms_percent": round(of_norms, 2)}


def _process(*given: Any) -> None:
    own = Process(*given)
    for line in sys.stdin:
        name, *args = json.loads(line)
        print(json.dumps(getattr(own, name)(*args)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.ranks", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="sums,plans,decode")
    parser.add_argument("--shape", default="one-b", choices=MODELS)
    parser.add_argument("--rows", default="1,8", help="sequences that decode")
    parser.add_argument("--sums", type=int, default=4000)
    parser.add_argument("--plans", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--process", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.process:
        _process(*json.loads(options.process))
        return
    subprocess.run([sys.executable, "-m", "engine.warm", str(ROOT / ".cache"), "bfloat16", "--ranks"], cwd=ROOT, check=True)
    about = {"processor": this_processor().describe(), "load_average": round(os.getloadavg()[0], 1)}
    found: dict[str, Any] = {"benchmark": "ranks", **about}
    with tempfile.TemporaryDirectory() as folder:
        fd = os.memfd_create("ranks")
        os.ftruncate(fd, LINE_BYTES + rank_memory_bytes(SIZE))
        doorbells = [os.eventfd(0, os.EFD_SEMAPHORE) for _ in range(SIZE)]
        asked: list[Asked] = []
        try:
            exchange = new_exchange(SIZE)
            asked += [Asked(rank, fd, folder, doorbells, exchange) for rank in range(SIZE)]
            if "sums" in options.only:
                found["sums"] = measure_sums(asked[:SIZE], options.sums)
            if "plans" in options.only:
                found["plans"] = measure_plans(asked[:SIZE], options.plans)
            if "decode" in options.only:
                asked.append(Asked(-1, fd, folder, doorbells, exchange))
                rows = [int(num) for num in options.rows.split(",")]
                found["decode"] = measure_decode(asked[:SIZE], asked[SIZE], options.shape, rows, options.rounds)
        finally:
            for one in asked:
                one.close()
    print(json.dumps(found))
    for kind in ("sums", "plans", "decode"):
        if kind in found:
            print(f"\n{table(found[kind], {key: key.replace('_', ' ') for key in found[kind][0]})}")


if __name__ == "__main__":
    main()
