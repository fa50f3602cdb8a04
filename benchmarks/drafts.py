"""Measures what drafted tokens gain: `python -m benchmarks.drafts --model DIR [--streams 1 32] [--tokens 160] [--passes 3]
[--adaptive] [--kinds known wrong nothing] [--quantize packed]`.

The engine's own model and batch scheduler, driven by hand. First the sequences run without drafts; then a drafter that knows their
texts drafts for them and errs at each token with a set rate, so a draft's acceptance is known. Runs alternate, and each is compared
with the run without drafts before it; the texts must be the same in float32. Prints one JSON line a case and a table:

- acceptance x depth: tokens a second over those without drafts, with at most `depth` drafted tokens a sequence and step;
- adaptive: the scheduler chooses how many (depth 0 in the JSON);
- wrong: drafts that never hold, nothing: sampled texts in which prompt lookup finds nothing. Both should cost nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice, repeat
from pathlib import Path

import numpy as np

from benchmarks.forward import BLOCK_TOKENS, load_model
from engine.contracts.steps import Proposed
from engine.cpu.model import CpuModel
from engine.host.processor import this_processor
from engine.protocol import SamplingParams
from scheduler.batch.batch_scheduler import BatchLimits, BatchScheduler
from scheduler.batch.block_pool import BlockPool
from scheduler.batch.chunk_pool import ChunkPool
from scheduler.batch.drafting import Drafter
from scheduler.batch.group_cache import GroupCache
from scheduler.batch.kv_cache import KVCache
from scheduler.batch.plan import IntArray
from scheduler.batch.prompt_lookup import looked_up
from scheduler.batch.request import BatchRequest
from scheduler.batch.step_limits import StepLimits
from scheduler.batch.step_room import StepRoom

PROMPT = 32
ACCEPTANCES, DEPTHS = (0.5, 0.7, 0.9, 1.0), (1, 2, 3, 5, 7)


class Texts:
    """The prompts of a benchmark and what follows each, once it is known."""

    def __init__(self, num: int, vocab_size: int) -> None:
        self.prompts = np.random.default_rng(0).integers(8, vocab_size, (num, PROMPT)).astype(np.int32)
        self.vocab_size = vocab_size
        self._of: dict[bytes, list[int]] = {}

    def learn(self, outputs: Sequence[Sequence[int]]) -> None:
        for prompt, output in zip(self.prompts, outputs, strict=True):
            self._of[prompt.tobytes()] = [*prompt.tolist(), *output]

    def drafter(self, acceptance: float, depth: int) -> Drafter:
        """Returns one whose tokens hold with that chance, `depth` of them at most (0: as many as it is asked for)."""
        rng = np.random.default_rng(1)

        def draft(tokens: IntArray, num: int) -> IntArray:
            at, num = len(tokens), min(num, depth) if depth else num
            right = self._of[tokens[:PROMPT].tobytes()][at : at + num]
            wrong = rng.random(len(right)) >= acceptance
            return ((np.array(right, np.int64) + wrong) % self.vocab_size).astype(np.int32)

        return draft


@dataclass(slots=True)
class Run:
    """Sequences that ran to their end. seconds, num_steps: of steps that only decode."""

    outputs: list[list[int]]
    seconds: float = 0.0
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0


def run(
    model: CpuModel,
    limits: StepLimits,
    texts: Texts,
    tokens: int,
    temperature: float,
    drafter: Drafter | None,
    spoil: Callable[[Proposed], None] | None = None,
) -> Run:
    """Runs all sequences to their end. limits: learns what steps cost. spoil: has the model's predictor draft, too, and changes
    what it has drafted."""
    slots, longest = max(32, 2 * len(texts.prompts)), PROMPT + tokens + 1
    blocks, block_bytes = len(texts.prompts) * -(-longest // BLOCK_TOKENS), model.kv_groups[0].block_bytes
    kv = KVCache([GroupCache(BlockPool(ChunkPool(blocks, block_bytes, blocks), block_bytes, 0), BLOCK_TOKENS)])
    scheduler = BatchScheduler("m", kv, BatchLimits(slots, longest, 512, (), "f", ""), drafter, spoil is not None)
    for number, prompt in enumerate(texts.prompts, 1):
        params = SamplingParams(max_tokens=tokens, temperature=temperature, seed=number, ignore_eos=True)
        scheduler.submit(BatchRequest(number, prompt, PROMPT, params))
    done = Run([[] for _ in texts.prompts])
    while True:
        begin = time.perf_counter()
        plan = scheduler.plan(0, StepRoom(limits))
        if plan is None:
            return done
        result = model.execute(plan, scheduler.table)
        outcome = scheduler.finish_step(plan, result.ids, result.bad)
        limits.note(plan, result.seconds)
        if result.proposed is not None and spoil is not None:
            spoil(result.proposed)
            scheduler.take_proposals(result.proposed.slots, result.proposed.counts, result.proposed.tokens)
            if plan.all_decode:
                told_s = result.proposed.seen_s, result.proposed.drafting_s
                limits.proposing.note(len(result.proposed.slots), result.proposed.tokens.shape[1], *told_s)
        if plan.all_decode:
            done.seconds += time.perf_counter() - begin
            done.num_steps += 1
        told = iter(outcome.ids)
        for request_id, count in zip(outcome.request_ids, outcome.counts or repeat(1), strict=False):
            done.outputs[request_id - 1] += islice(told, count)
        done.num_drafted += sum(outcome.drafted)
        done.num_accepted += len(outcome.ids) - len(outcome.request_ids)


def cases() -> list[tuple[str, float, int]]:
    """(kind, acceptance, depth)"""
    fixed = [("known", acceptance, depth) for acceptance in ACCEPTANCES for depth in DEPTHS]
    return [*fixed, *(("known", acceptance, 0) for acceptance in ACCEPTANCES), ("wrong", 0.0, 0), ("nothing", 0.0, 0)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.drafts", description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--adaptive", action="store_true", help="only the cases in which the scheduler chooses how many")
    parser.add_argument("--kinds", nargs="+", default=["known", "wrong", "nothing"], choices=("known", "wrong", "nothing"))
    parser.add_argument("--quantize", default="", choices=("", "int8", "packed"), help="the weight format in memory")
    options = parser.parse_args()
    for num in options.streams:
        sizes = (max(32, 2 * num), PROMPT + options.tokens + 24)
        model, shape, _ = load_model(options.model, options.dtype, *sizes, quantize=options.quantize)
        texts, limits = Texts(num, shape.vocab_size), StepLimits(turn_s=0.01, stretch=2.0)
        rows: list[tuple[str, float, int, float, float]] = []
        for kind, acceptance, depth in cases():
            if (options.adaptive and depth) or kind not in options.kinds:
                continue
            temperature = 1.0 if kind == "nothing" else 0.0
            ratios, held = [], []
            drafter = looked_up if kind == "nothing" else texts.drafter(acceptance, depth)
            for _ in range(options.passes + 1):  # the first one records steps and learns what they cost
                plain = run(model, limits, texts, options.tokens, temperature, None)
                texts.learn(plain.outputs)
                drafting = run(model, limits, texts, options.tokens, temperature, drafter)
                if model.dtype == "float32" and plain.outputs != drafting.outputs:
                    raise SystemExit("drafts changed a text")
                ratios.append(plain.seconds / drafting.seconds)
                held.append(drafting.num_accepted / max(1, drafting.num_drafted))
            row = kind, acceptance, depth, statistics.median(ratios[1:]), statistics.median(held[1:])
            rows.append(row)
            print(
                json.dumps(
                    {
                        "benchmark": "drafts",
                        "model": options.model.name,
                        "dtype": model.dtype,
                        "quantize": options.quantize,
                        "streams": num,
                        "kind": kind,
                        "acceptance": acceptance,
                        "depth": depth,
                        "ratio": round(row[3], 3),
                        "ratios": [round(ratio, 3) for ratio in ratios[1:]],
                        "accepted_of_drafted": round(row[4], 3),
                        "processor": this_processor().describe(),
                    }
                ),
                flush=True,
            )
        print(f"\n{options.model.name}, {num} streams: tokens a second over those without drafts")
        print(f"{'':>12} " + " ".join(f"{'depth ' + str(depth):>9}" if depth else f"{'adaptive':>9}" for depth in (*DEPTHS, 0)))
        found = {(kind, acceptance, depth): ratio for kind, acceptance, depth, ratio, _ in rows}
        for kind, acceptance in [*(("known", acceptance) for acceptance in ACCEPTANCES), ("wrong", 0.0), ("nothing", 0.0)]:
            cells = [found.get((kind, acceptance, depth)) for depth in (*DEPTHS, 0)]
            name = f"{acceptance:.0%} hold" if kind == "known" else kind
            print(f"{name:>12} " + " ".join(f"{'':>9}" if cell is None else f"{cell:>9.2f}" for cell in cells))
        model.release()


if __name__ == "__main__":
    main()
