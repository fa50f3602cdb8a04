"""Measures how fast weights come from files to a GPU: plain ones, packed ones decoded there, and packed ones decoded on the host,
in turn, from the drive and, with --warm, from the page cache; beside them the raw read of the drive. One JSON line each, GB/s of
weights.

usage: python -m benchmarks.gpu_loading [--layers 12] [--rounds 2] [--warm] [--tiny]: without a GPU a small model,
interpreted on the CPU, to show that the script runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_drives import SHARED, checkpoints_folder, make_room
from benchmarks.loading import MIB, make_checkpoint, raw, set_cache
from benchmarks.packing import pack
from engine.cuda.frames import DeviceFrames, device_frames
from engine.cuda.ops import CudaOps
from engine.cuda.sink import DeviceSink
from engine.host.weight_decoder import weight_decoder
from engine.memory.chunk_memory import ChunkMemory
from engine.memory.host_registration import RegistersHost, register
from engine.memory.weight_range import WeightRange
from loader.models.catalog import scan_one
from loader.reading.staging import StagingRing
from loader.reading.weight_stream import open_checkpoint, stream_weights
from loader.sizes.layout import weights_bytes

CHUNK_BYTES = 16 << 20
TINY_CHUNK_BYTES = 2 << 20
LAYERS = 12
LAYER_BYTES = 1 << 28  # of a layer's plain and packed files, at most
RAW, PLAIN, ON_DEVICE, ON_HOST = "raw read of the plain files", "plain", "packed, decoded on the GPU", "packed, decoded on the host"


def tell(**figures: Any) -> None:
    print(json.dumps({"benchmark": "gpu_loading"} | figures), flush=True)


def device_memory(num_bytes: int, tiny: bool) -> ChunkMemory:
    if tiny:
        from engine.cpu.memory import CpuMemory

        return CpuMemory(-(-num_bytes // TINY_CHUNK_BYTES), TINY_CHUNK_BYTES)
    from engine.cuda.memory import CudaMemory

    return CudaMemory(-(-num_bytes // CHUNK_BYTES), CHUNK_BYTES)


def measure(folder: Path, rounds: int, warm: bool, tiny: bool) -> None:
    checkpoint = scan_one(folder)
    assert checkpoint.shape is not None
    with ExitStack() as stack:
        shape = open_checkpoint(folder, "", stack, in_place=False).shape
    num_bytes = weights_bytes(shape, "bfloat16")
    memory, ring = device_memory(num_bytes, tiny), StagingRing()
    ring.prepare()
    if isinstance(memory, RegistersHost):
        register(memory, "staging", [ring.span], ring.slot_bytes)
    CudaOps(os.environ.get("HEARTHD_CACHE", ".cache"))  # has Triton keep compiled kernels there
    began_s = time.perf_counter()
    frames = device_frames(memory)
    tell(what="decoder", on_device=frames is not None, compiled_and_proven_s=round(time.perf_counter() - began_s, 2))
    host = weight_decoder(".cache")
    weights = WeightRange(memory, num_bytes)
    weights.map(range(weights.num_chunks))

    def load(wants_packed: bool, on_device: DeviceFrames | None) -> Any:
        with ExitStack() as stack:
            source = open_checkpoint(folder, "", stack, False, lambda checkpoint: wants_packed)
            sink = DeviceSink(memory, weights, on_device)
            stream_weights(source, "bfloat16", sink, ring, lambda *_: None, lambda: False, decoder=host)

    def summed() -> int:
        return int(weights.tensor(0, (num_bytes // 2,), torch.int16).sum(dtype=torch.int64).item())

    plain, packed = ([folder / info.name for info in infos] for infos in (checkpoint.files, checkpoint.packed_files))
    kinds: dict[str, tuple[list[Path], Callable[[], Any]]] = {
        PLAIN: (plain, lambda: load(False, None)),
        ON_DEVICE: (packed, lambda: load(True, frames)),
        ON_HOST: (packed, lambda: load(True, None)),
    }
    if frames is None:
        del kinds[ON_DEVICE]
    sums = set[int]()
    for state in ("cold", "warm") if warm else ("cold",):
        told: dict[str, list[float]] = {}
        for _ in range(rounds):
            if state == "cold":
                set_cache(plain, warm=False)
                told.setdefault(RAW, []).append(seconds_of(raw(plain, 2, 8 * MIB, huge=True, direct=True)))
            for name, (files, work) in kinds.items():
                set_cache(files, warm=state == "warm")
                told.setdefault(name, []).append(seconds_of(work))
                sums.add(summed())
        for name, times in told.items():
            rates = [num_bytes / one / 1e9 for one in times]
            tell(what=f"load, {state}", read=name, gb_s=round(statistics.median(rates), 2), best_gb_s=round(max(rates), 2))
        if ON_DEVICE in told:
            faster = statistics.median(told[PLAIN]) / statistics.median(told[ON_DEVICE])
            tell(what=state, packed_over_plain=round(faster, 2))
    tell(what="the same weights each time", right=len(sums) == 1, gb=round(num_bytes / 1e9, 2))
    weights.close()
    memory.close()
    if len(sums) != 1:
        sys.exit("loads brought different weights")


def seconds_of(work: Callable[[], Any]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu_loading", description=__doc__)
    parser.add_argument("--layers", type=int, default=LAYERS, help="of the checkpoint, 0.13 GB each")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--warm", action="store_true", help="from the page cache, too")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    num_bytes = 0 if options.tiny else options.layers * LAYER_BYTES
    with checkpoints_folder(num_bytes) as made_in:
        if shared := os.environ.get(SHARED):
            make_room(Path(shared), num_bytes, {made_in})
        if options.tiny:
            from benchmarks.gpu_checkpoints import make

            folder = made_in / "tiny"
            make(folder, "tiny", "cpu")
        else:
            folder = make_checkpoint(made_in / "model", options.layers)
        tell(what="packing", gb_s=round(sum(info.size_bytes for info in scan_one(folder).files) / 1e9 / pack(folder), 2))
        measure(folder, 1 if options.tiny else options.rounds, options.warm, options.tiny)


if __name__ == "__main__":
    main()
