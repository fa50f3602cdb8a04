"""Records for which keys Triton would compile the kernels of a model's `warm`, and those of every kind of step after it. Prints one
JSON line for each model: the number of keys of its warm-up, and the keys that steps add, each with the first step that has it.

One of the models, or with --every each, is recorded again with the tiles that join the pieces of decode attention, and with kernels
that overlap.

usage: python -m tests.engine.kernels.record_keys [--every] (not under TRITON_INTERPRET; --every: all models, all row counts)
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from engine.cuda import frames
from engine.cuda.backend import MAX_GRAPH_TOKENS, CudaBackend
from engine.cuda.columns import padding_columns
from engine.cuda.edited_graphs import EditedGraphs
from engine.cuda.frames import DeviceFrames
from engine.cuda.graphs import graph_rows
from engine.cuda.kernels import tiles, triton_overlap
from engine.cuda.kernels.tiles import MeasuredTile
from engine.cuda.launch_only import launch_only_model
from engine.cuda.launches import recorded
from engine.cuda.mixed_steps import mixed_padding, mixed_sizes
from engine.cuda.model import CudaModel
from engine.cuda.share import CudaShare
from engine.cuda.tile_trials import trials_of
from engine.protocol import Configure
from loader.packing import codec
from tests.engine import cuda_stand_in
from tests.engine.kernels.key_cases import BLOCK_TOKENS, CASES, COVERING, KeyCase, make_table, steps
from tests.loader.test_families import MISTRAL_7B

HOPPER = 90
CHUNK_BYTES = 1 << 20
JOINING = replace(next(case for case in CASES if case.name == "gemma4 at odd places"), name="joining")


def record(case: KeyCase, every: bool) -> dict[str, Any]:
    """Returns what is printed for one model."""
    added: dict[str, str] = {}
    with recorded(HOPPER) as launches:
        model = launch_only_model(case.spec, case.shape, BLOCK_TOKENS)
        model.warm()
        if case.adapters:
            model.launch_adapters()
        warmed, num_steps = len(launches), 0
        table = make_table(case, model)
        for step in steps(case, every):
            num_steps += 1
            step.run(model, table, case.max_len)
            for key in list(launches)[warmed + len(added) :]:
                added[key] = str(step)
        is_stage = isinstance(model, CudaShare) and _keeps_states(model)
        sizes = mixed_sizes(MAX_GRAPH_TOKENS, case.max_rows, model.tile_tokens) if case.share is None or is_stage else []
        with torch.inference_mode():
            for size in sizes:  # what graphs of them hold
                num_steps += 1
                columns = model._staging.send(mixed_padding(size, case.max_rows))
                if is_stage:
                    model.mixed_graphs._step(columns)
                else:
                    model.compute_mixed(columns, case.adapters)
                for key in list(launches)[warmed + len(added) :]:
                    added[key] = str(size)
            for rows in sorted(set(map(graph_rows, range(1, case.max_rows + 1)))) if is_stage else ():
                num_steps += 1
                model.graphs._step(model._staging.send(padding_columns(rows, case.max_rows)))
                for key in list(launches)[warmed + len(added) :]:
                    added[key] = f"{rows} rows of a stage's graph"
            graphs = EditedGraphs(model._logits_of, model.vocab_size, model.shape.hidden_size, *_rest_of(case, model))
            samples = model._samples if isinstance(model, CudaShare) else not case.pooling
            sizes_of_edited = [1 << power for power in range(7)] if samples else []
            for rows in sizes_of_edited:
                num_steps += 1
                graphs.sample(graphs._fixed_inputs(graphs._padding(rows) | {"words": np.zeros(1, np.int32)})[1])
                for key in list(launches)[warmed + len(added) :]:
                    added[key] = f"{rows} edited rows"
    return {"model": case.name, "warmed": warmed, "steps": num_steps, "added": added}


def _keeps_states(share: CudaShare) -> bool:
    """Has a stage keep memory for the states of graphs, and returns True; returns False for a share of another kind."""
    if share._links.stages is None:
        return False
    share._links.stages.keep(MAX_GRAPH_TOKENS, 1 + share._loaded().passes_second)
    return True


def _rest_of(case: KeyCase, model: CudaModel) -> tuple[Any, ...]:
    """Returns the other arguments of a model's EditedGraphs."""
    return getattr(torch, case.dtype), model._sequences.last_ids, model._staging, 64


def joining(case: KeyCase) -> list[MeasuredTile]:
    """Returns what an engine has chosen that uses each form that joins pieces for a model's attention."""
    trials = [trial for trial in trials_of(case.spec, case.shape, BLOCK_TOKENS) if trial.kernel == tiles.DECODE_KERNEL]
    return [MeasuredTile(*trial.place, trial.entry.tile._replace(joins=True)) for trial in trials]


def record_values() -> dict[str, Any]:
    """Compares the keys of models that differ in numbers alone: length of their sequences, number of slots, size of the vocabulary
    (a multiple of 16 each). added: keys that only some of them have."""
    keys: list[set[str]] = []
    plain = KeyCase("values", MISTRAL_7B, more={"sliding_window": None, "vocab_size": 4096})
    short, shortest = replace(plain, max_len=17 * BLOCK_TOKENS, max_rows=16), replace(plain, max_len=BLOCK_TOKENS, max_rows=1)
    for case in (plain, short, shortest, replace(plain, more=plain.more | {"vocab_size": 8192})):
        with recorded(HOPPER) as launches:
            launch_only_model(case.spec, case.shape, BLOCK_TOKENS).launch_all()
            keys.append(set(launches))
    differing = set.union(*keys) - set.intersection(*keys)
    return {"model": "values", "warmed": len(keys[0]), "steps": 0, "added": dict.fromkeys(sorted(differing), "a number")}


def record_loads(cache_dir: str) -> dict[str, Any]:
    """The same for what loads and transfers launch after a device's `prepare`: checksums, and the decoding of packed weights."""
    with recorded(HOPPER) as launches, pytest.MonkeyPatch.context() as patch:
        memory = cuda_stand_in.install(patch, cuda_stand_in.Driver()).CudaMemory(4, CHUNK_BYTES)
        patch.setattr(memory, "write", lambda address, source: None)  # what torch allocates is not the driver's here
        options = Configure("cuda:0", 4, CHUNK_BYTES, 0, 512, BLOCK_TOKENS, 10.0, 1, cache_dir=cache_dir)
        patch.setattr(frames.log, "warning", lambda *_: None)  # nothing is decoded here, so the proof fails
        CudaBackend(memory, options).prepare(lambda news: None)
        warmed = len(launches)
        for num_bytes in (8, 9, 16, 24, 128, 4096, CHUNK_BYTES - 24):
            for place in (0, 8, 16, 24):
                memory.checksum(memory.arena.data_ptr() + place, num_bytes)
        decoding = DeviceFrames(memory)
        verdict, out = decoding.verdict(), torch.zeros(5000, dtype=torch.int16)
        for num_values in (1, 16, 17, 64, 1024, 1025, 4096):
            packed = np.frombuffer(bytearray(codec.encode(np.ones(num_values, np.uint16))), np.uint8)
            for place in (0, 4, 8, 12):
                for number in (1, 2, 16):
                    decoding.decode(packed, out[place : place + num_values], verdict, number)
        return {"model": "loads", "warmed": warmed, "steps": 0, "added": dict.fromkeys(list(launches)[warmed:], "a load")}


def main() -> None:
    every = "--every" in sys.argv
    warnings.filterwarnings("ignore", category=RuntimeWarning)  # what kernels should have written is undefined
    with tempfile.TemporaryDirectory() as cache_dir:
        print(json.dumps(record_values()), flush=True)
        print(json.dumps(record_loads(cache_dir)), flush=True)
        for case in CASES:
            if every or case.name in COVERING:
                print(json.dumps(record(case, every)), flush=True)
        triton_overlap.use(True)
        for case in [JOINING, *(replace(case, name=f"{case.name}, joining") for case in CASES if every)]:
            tiles.use(joining(case))
            print(json.dumps(record(case, every)), flush=True)


if __name__ == "__main__":
    main()
