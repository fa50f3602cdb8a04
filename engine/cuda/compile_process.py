"""`python -P -m engine.cuda.compile_process SHARE NUM_SHARES < JOB` compiles one share of the kernels that a model's steps launch,
or that its tiles are measured with, into Triton's cache folder. It needs no GPU and no weights. Prints `units N`, then `done` for
each of its N kernels.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import msgspec
import torch
import triton
from triton.backends.nvidia import driver as nvidia_driver

from engine.cuda import tile_trials
from engine.cuda.kernels import tiles, triton_peers
from engine.cuda.kernels.tiles import MeasuredTile
from engine.cuda.launch_only import AddressRange, launch_only_model
from engine.cuda.launches import recorded
from engine.protocol import LoadModel
from loader.shapes.model_shape import ModelShape
from loader.sizes.gpu_sizing import PEER_REGION_BYTES

NICENESS = 5  # lower priority than the steps of models in service


class CompileJob(msgspec.Struct, frozen=True):
    """The kernels to compile, those of one model's steps. spec: only its settings are used. capability: the GPU's compute
    capability, 90 for 9.0. folder: Triton's cache folder. adapters: compile the kernels of steps with LoRA adapters instead of
    those without. tiles: those that the engine uses in place of the table's (tiles.use). trials: compile attention with all tiles
    that the engine compares for this model instead."""

    spec: LoadModel
    shape: ModelShape
    block_tokens: int
    capability: int
    folder: str
    adapters: bool = False
    tiles: list[MeasuredTile] = []
    trials: bool = False


def main() -> int:
    share, num_shares = map(int, sys.argv[1:])
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=CompileJob)
    os.nice(NICENESS)
    triton.knobs.cache.dir = job.folder
    tiles.use(job.tiles)
    with recorded(job.capability) as launches:
        if job.trials:
            launch_trials(job)
        elif job.adapters:
            launch_only_model(job.spec, job.shape, job.block_tokens).launch_adapters()
        else:
            launch_only_model(job.spec, job.shape, job.block_tokens).launch_all()
            if (split := job.shape.split) is not None and split.size > 1:
                launch_sums(split.size)
    own = list(launches.values())[share::num_shares]
    print(f"units {len(own)}", flush=True)
    for launch in own:
        compile_launcher(launch.compile())
        print("done", flush=True)
    return 0


def launch_sums(num_ranks: int) -> None:
    """Launches the kernel of sums over the GPUs' memory in all its forms, as engine/cuda/peers.py tries them."""
    regions = AddressRange(num_ranks * PEER_REGION_BYTES).all.view(num_ranks, -1)
    for dtype, num_values in triton_peers.FORMS:
        stop = torch.zeros(1, dtype=torch.int64)
        triton_peers.sum_over_ranks(torch.empty(num_values, dtype=dtype), regions, stop, 0, False)


def launch_trials(job: CompileJob) -> None:
    """Launches attention as the engine does to compare tiles for the model (tile_choice.py). Nothing is computed."""
    for trial in tile_trials.trials_of(job.spec, job.shape, job.block_tokens):
        for launch in tile_trials.launching(trial, "cpu", 1, trial.tiles).values():
            launch()
        for tile in trial.tiles[1:]:
            tile_trials.Comparison(trial, "cpu", 1, tile).launch()


def compile_launcher(compiled: Any) -> None:
    """Compiles the C function that launches a kernel, where this version of Triton makes one for each (3.6 does, 3.9 does not). If
    that fails, it is only printed, and the kernel's first launch tries again. compiled: Triton's CompiledKernel."""
    if not hasattr(nvidia_driver, "make_launcher"):
        return
    try:
        nvidia_driver.CudaLauncher(compiled.src, compiled.metadata)
    except Exception as error:
        print(f"no launcher of {compiled.name}: {type(error).__name__}: {error}", file=sys.stderr)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a normal exit of torch's and Triton's libraries takes time, and an abort in it would count as a failure
