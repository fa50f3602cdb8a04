"""Measures what a step on a GPU costs the host, on a machine without a GPU (benchmarks/no_driver.py says what is real):
microseconds of a core's time from the plan of a step to its result, for steps that launch each kernel and for those that replay a
graph. Waits are not counted; a core whose caches others use takes longer, and machine_load tells how many there were.

64 rows that decode at scattered places of their sequences; a mixed step has a piece of one more prompt. Rows sample with a
temperature and top_p; in further steps all of them have penalties, log-probabilities, a bias or a grammar's mask as well.
With --stages the first and the last stage of a pipeline are measured instead, in the thread that runs steps: the thread that sends
states is not counted.
JSON lines, then a table.
usage: python -m benchmarks.launch_path [--models 1b,8b] [--steps 200] [--rows 64] [--chunk 128] [--stages 2]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import triton

from benchmarks import no_driver
from benchmarks.gpu_shapes import shape_of
from engine.cuda.backend import MAX_GRAPH_ROWS, MAX_GRAPH_TOKENS
from engine.cuda.model import CudaModel
from engine.cuda.share import CudaShare
from engine.grammar.row_masks import LockedMasks, RowMasks
from engine.protocol import LoadModel, SamplingParams
from engine.sampling.sampler import sampling_rows
from loader.shapes.model_shape import Division
from loader.sizes.slices import split
from scheduler.batch.plan import BatchPlan, make_sequence_table, write_sampling

BLOCK_TOKENS, LENGTH = 16, 4096
WARM_UP_STEPS = 20
GRAPHS = (MAX_GRAPH_ROWS, MAX_GRAPH_TOKENS)
# what rows have besides a temperature and top_p, by the words for it
SETTINGS: dict[str, dict[str, Any]] = {
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    "log-probabilities": {"logprobs": 5},
    "bias": {"logit_bias": dict.fromkeys(range(300), 0.5)},
    "min_tokens": {"min_tokens": LENGTH, "stop_token_ids": [1, 2, 3]},
    "grammar": {},
    "all of these": {"presence_penalty": 0.5, "logprobs": 5, "logit_bias": {7: 0.5}, "min_tokens": LENGTH, "stop_token_ids": [1]},
}
MASKED = ("grammar", "all of these")


class Sequences:
    """num_rows sequences of one length each that decode, and one more whose prompt comes in pieces of `chunk` tokens (0: none
    does). settings: of SETTINGS, or nothing."""

    def __init__(self, num_rows: int, chunk: int, settings: str = "") -> None:
        generator = np.random.default_rng(0)
        self.num_rows, self.chunk = num_rows, chunk
        table = self.table = make_sequence_table(num_rows + 1, LENGTH, LENGTH // BLOCK_TOKENS)
        table.request_id[:] = np.arange(1, num_rows + 2)
        table.tokens[:] = generator.integers(0, 1000, table.tokens.shape)
        table.block_tables[0][:] = generator.permutation(table.block_tables[0].size).reshape(table.block_tables[0].shape)
        self._knows = bool(settings)  # such rows are planned when their tokens are known
        for slot in range(num_rows + 1):
            params = SamplingParams(LENGTH, temperature=0.8, top_p=0.9, seed=slot, **SETTINGS.get(settings, {}))
            write_sampling(table, slot, params, 64, LENGTH)
        table.num_prompt[:] = 64
        self._firsts = generator.integers(64, LENGTH // 2, num_rows).astype(np.int32)
        self._at = 0

    def next(self) -> BatchPlan:
        """Returns the next step. The host does not know the tokens that the last one sampled."""
        num = self.num_rows + (self.chunk > 0)
        computed, num_new = np.zeros(num, np.int32), np.ones(num, np.int32)
        computed[: self.num_rows] = self._firsts + self._at % (LENGTH // 2)
        self.table.num_tokens[: self.num_rows] = computed[: self.num_rows] + self._knows
        samples = np.ones(num, np.bool_)
        if self.chunk:
            computed[-1], num_new[-1], samples[-1] = self.chunk * (self._at % (LENGTH // self.chunk)), self.chunk, False
            self.table.num_tokens[-1] = LENGTH
        self._at += 1
        return BatchPlan(0, "bench", np.arange(num, dtype=np.int32), computed, num_new, samples)


def masks_of(model: CudaModel, num_rows: int) -> RowMasks:
    """Returns masks that allow every other token, one after the other in memory as a grammar's process leaves them. End ids are
    banned besides where min_tokens asks for it."""
    bits = np.full((num_rows, -(-model.vocab_size // 32)), 0x55555555, np.uint32)
    every, places = np.ones(num_rows, np.bool_), np.arange(num_rows, dtype=np.int32)
    return RowMasks([1] * num_rows, np.arange(num_rows), list(bits), LockedMasks(bits), places, every)


def measured(
    model: CudaModel, sequences: Sequences, steps: int, driver: no_driver.NoDriver, masks: RowMasks | None = None
) -> dict[str, float]:
    """Returns the median microseconds of a step, their middle half, and how many of our kernels the host launches for it."""
    took: list[float] = []
    for at in range(WARM_UP_STEPS + steps):
        if at == WARM_UP_STEPS:
            launches = driver.num_launches
        plan = sequences.next()
        began_s = time.thread_time()
        if model.shape.split is not None and not model.shape.split.is_last_stage:
            assert isinstance(model, CudaShare)
            model.follow(plan, sequences.table)
        else:
            no_driver.result_of(model.launch(plan, sequences.table, masks))
        took.append(time.thread_time() - began_s)
    quarter, median, three_quarters = (seconds * 1e6 for seconds in statistics.quantiles(took[WARM_UP_STEPS:], n=4))
    per_step = (driver.num_launches - launches) / steps
    return {"us": round(median, 1), "us_from": round(quarter, 1), "us_to": round(three_quarters, 1), "launches": round(per_step, 1)}


def settings_us(sequences: Sequences) -> float:
    """Returns the microseconds in which the settings of a step's rows are read, which every step does."""
    plan, took = sequences.next(), []
    for _ in range(200):
        began_s = time.thread_time()
        sampling_rows(plan, sequences.table, [], 1000)
        took.append(time.thread_time() - began_s)
    return round(statistics.median(took) * 1e6, 1)


def run(name: str, num_rows: int, chunk: int, steps: int, driver: no_driver.NoDriver, tell: Callable[..., None]) -> None:
    spec = LoadModel(1, name, "", "bfloat16", "", 0, 0, 0, LENGTH, num_rows + 1, [])
    for graph in (False, True):
        model = no_driver.no_driver_model(spec, shape_of(name), BLOCK_TOKENS, *(GRAPHS if graph else (0, 0)))
        model.launch_all()
        while model.num_uncaptured:
            model.capture_next()
        for kind, own_chunk in (("decode", 0), ("mixed", chunk)):
            sequences = Sequences(num_rows, own_chunk)
            figures = measured(model, sequences, steps, driver)
            replayed = figures["launches"] < 2 * model.shape.num_layers
            tell(
                model=name, step=kind, graph=replayed, rows=num_rows, chunk=own_chunk, **figures, settings_us=settings_us(sequences)
            )
    for settings in SETTINGS:  # of the model whose steps are replayed
        for kind, own_chunk in (("decode", 0), ("mixed", chunk)):
            sequences = Sequences(num_rows, own_chunk, settings)
            masks = masks_of(model, num_rows) if settings in MASKED else None
            figures = measured(model, sequences, steps, driver, masks)
            step = f"{kind}, {settings}"
            read_us = settings_us(sequences)
            tell(model=name, step=step, graph=True, rows=num_rows, chunk=own_chunk, **figures, settings_us=read_us)


def run_stages(
    name: str, num_stages: int, num_rows: int, chunk: int, steps: int, driver: no_driver.NoDriver, tell: Callable[..., None]
) -> None:
    """Measures the first and the last stage of a pipeline."""
    spec = LoadModel(1, name, "", "bfloat16", "", 0, 0, 0, LENGTH, num_rows + 1, [])
    for which, rank in (("first", num_stages - 1), ("last", 0)):
        shape = split(shape_of(name), rank, Division(num_stages, num_stages=num_stages))
        for graph in (False, True):
            model = no_driver.no_driver_model(spec, shape, BLOCK_TOKENS, *(GRAPHS if graph else (0, 0)))
            assert isinstance(model, CudaShare)
            model.launch_all()
            while model.num_uncaptured:
                model.capture_next()
            for kind, own_chunk in (("decode", 0), ("mixed", chunk)):
                figures = measured(model, Sequences(num_rows, own_chunk), steps, driver)
                replayed = figures["launches"] < 2 * len(shape.own_layers)
                of_stage = {"stage": which, "stages": num_stages}
                tell(model=name, step=kind, graph=replayed, rows=num_rows, chunk=own_chunk, **figures, **of_stage)
            model._links.close()
            model._links.wait_closed()


def table_of(lines: Iterable[dict[str, Any]]) -> str:
    rows = ["| model | step | | µs of host | middle half | kernels launched |", "| --- | --- | --- | --- | --- | --- |"]
    for line in lines:
        how = "replayed" if line["graph"] else "eager"
        model = f"{line['model']}, {line['stage']} of {line['stages']} stages" if "stage" in line else line["model"]
        rows.append(f"| {model} | {line['step']} | {how} | {line['us']} | {line['us_from']}-{line['us_to']} | {line['launches']} |")
    return "\n".join(dict.fromkeys(rows))


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.launch_path", description=__doc__)
    parser.add_argument("--models", default="1b,8b")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--chunk", type=int, default=128)
    parser.add_argument("--stages", type=int, default=1)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=UserWarning, module="triton")
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    lines: list[dict[str, Any]] = []

    def tell(**figures: Any) -> None:
        busy = {"machine_load": round(os.getloadavg()[0], 1)}
        lines.append({"benchmark": "launch_path"} | figures | busy | {"triton": triton.__version__, "torch": torch.__version__})
        print(json.dumps(lines[-1]), flush=True)

    driver = no_driver.install()
    for name in options.models.split(","):
        if options.stages > 1:
            run_stages(name, options.stages, options.rows, options.chunk, options.steps, driver, tell)
        else:
            run(name, options.rows, options.chunk, options.steps, driver, tell)
    print(table_of(lines))


if __name__ == "__main__":
    main()
