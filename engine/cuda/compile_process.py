"""Compiles GPU kernels in a process of its own: `python -P -m engine.cuda.compile_process SHARE NUM_SHARES < JOB`.

Of the kernels that a job (CompileJob) asks for, the process compiles those with index SHARE, SHARE + NUM_SHARES and so on into
Triton's cache folder. It needs no GPU and no weights. It prints `units N` for the N kernels that it compiles, then `done` after
each of them.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import msgspec
import torch
import triton
from triton.backends.nvidia import driver as nvidia_driver

from engine.cuda import overlap_trial, tile_trials
from engine.cuda.kernels import tiles, triton_overlap, triton_peers
from engine.cuda.kernels.tiles import MeasuredTile
from engine.cuda.launch_only import AddressRange, launch_only_model
from engine.cuda.launches import recorded
from engine.protocol import LoadModel
from loader.shapes.model_shape import ModelShape
from loader.sizes.gpu_sizing import PEER_REGION_BYTES

NICENESS = 5  # lower priority than the steps of models in service


class CompileJob(msgspec.Struct, frozen=True):
    """The kernels to compile for one model: those of its steps without adapters, unless `adapters` or `trials` is set.

    spec: the model; only settings that affect compilation are used. capability: the GPU's compute capability, 90 for 9.0. folder:
    Triton's cache folder.
    adapters: compile the kernels of steps with LoRA adapters instead.
    tiles: the tiles of attention that the engine uses instead of those of the table in kernels/tiles.py.
    trials: compile attention instead, with all tiles that the engine compares for this model (tile_choice.py).
    has_flash: whether the engine also compares FlashAttention, which is not compiled here.
    overlaps: whether kernels overlap (kernels/triton_overlap.py).
    overlap_trial: compile instead the layers with which the engine finds out whether they may (overlap_trial.py)."""

    spec: LoadModel
    shape: ModelShape
    block_tokens: int
    capability: int
    folder: str
    adapters: bool = False
    tiles: list[MeasuredTile] = []
    trials: bool = False
    has_flash: bool = False
    overlaps: bool = False
    overlap_trial: bool = False


def main() -> int:
    share, num_shares = map(int, sys.argv[1:])
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=CompileJob)
    os.nice(NICENESS)
    triton.knobs.cache.dir = job.folder
    tiles.use(job.tiles)
    triton_overlap.use(job.overlaps)
    with recorded(job.capability) as launches:
        if job.trials:
            launch_trials(job)
        elif job.overlap_trial:
            launch_overlap_trial(job.block_tokens)
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
    """Launches the kernel that adds up tensors over several GPUs (triton_peers), once for each dtype and alignment for which Triton
    compiles it. Called where launches are only recorded, so nothing is computed."""
    regions = AddressRange(num_ranks * PEER_REGION_BYTES).all.view(num_ranks, -1)
    for dtype, num_values in triton_peers.FORMS:
        stop = torch.zeros(1, dtype=torch.int64)
        triton_peers.sum_over_ranks(torch.empty(num_values, dtype=dtype), regions, stop, 0, False)


def launch_trials(job: CompileJob) -> None:
    """Launches attention with every tile that the engine compares for the model (tile_choice.py), with the arguments that the
    engine uses. Called where launches are only recorded, so nothing is computed."""
    for trial in tile_trials.trials_of(job.spec, job.shape, job.block_tokens, job.has_flash):
        own = [tile for tile in trial.tiles if not tile.flash]
        for launch in tile_trials.launching(trial, "cpu", 1, own).values():
            launch()
        for tile in own:
            tile_trials.Comparison(trial, "cpu", 1, tile).launch()


def launch_overlap_trial(block_tokens: int) -> None:
    """Launches the layers with which an engine finds out whether kernels may overlap, in each way in which it launches them. Called
    where launches are only recorded, so nothing is computed."""
    sizes = overlap_trial.Sizes(num_layers=1)
    for num_rows in overlap_trial.ROWS:
        layers = overlap_trial.Layers(num_rows, block_tokens, "cpu", 1, sizes, lambda x, weight: x.new_empty(len(x), len(weight)))
        for way in triton_overlap.Way:
            with triton_overlap.forced(way):
                layers.launch()


def compile_launcher(compiled: Any) -> None:
    """Compiles the C function that launches a kernel, if this version of Triton makes one for each kernel (3.6 does, 3.9 does not).
    An error is only printed, because the kernel's first launch tries again. compiled: Triton's CompiledKernel."""
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
