"""Measures how much space packed weights take, and what decoding them costs.

Decoding: frames of a million Gaussian values in memory, beside memcpy of what comes out, by one thread and by as many as there are
cores. Ratio: bytes of packed tensors to bytes before, of made-up tensors and of models (whole files there); every bit is compared.
Loads: a checkpoint of Gaussian weights, plain, packed, and packed with checksums left out, in turn, into prepared memory, cold
(past the page cache) and warm; GB/s are of weights, whatever was read for them.

usage: python -m benchmarks.packing [MODEL_DIR ...] [--rounds N] [--layers N]: one JSON line, and tables.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from engine.host.process import num_cores, prepare_process

prepare_process()

import numpy as np  # noqa: E402

from benchmarks.loading import CHUNK_BYTES, make_checkpoint, set_cache, spread  # noqa: E402
from benchmarks.loading_peers import cpu_s  # noqa: E402
from benchmarks.run import machine  # noqa: E402
from engine.cpu.memory import CpuMemory  # noqa: E402
from engine.host.weight_decoder import weight_decoder  # noqa: E402
from engine.memory.weight_range import WeightRange  # noqa: E402
from loader.files.frame import FRAME_VALUES  # noqa: E402
from loader.files.safetensors import INDEX_NAME, read_header  # noqa: E402
from loader.files.weight_files import PACKED_DIR, read_headers, source_of  # noqa: E402
from loader.models.catalog import scan_one  # noqa: E402
from loader.packing import codec  # noqa: E402
from loader.packing.packer import pack_file  # noqa: E402
from loader.packing.verifier import verify_tensor  # noqa: E402
from loader.reading.sinks import HostSink  # noqa: E402
from loader.reading.staging import SLOT_BYTES, StagingRing  # noqa: E402
from loader.reading.unpack import Decoder  # noqa: E402
from loader.reading.weight_stream import NUM_READERS, open_checkpoint, stream_weights  # noqa: E402
from loader.sizes.layout import weights_bytes  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
DEMO_MODELS = ROOT / "demo" / "models"
STORE = ROOT / ".cache" / "checkpoints" / "packing"
NUM_FRAMES = 32
RAW, PLAIN, PACKED, UNCHECKED = "raw read of the plain files", "plain", "packed", "packed, checksums left out"


def gaussian(num_values: int, sigma: float, seed: int) -> Any:
    values = np.random.default_rng(seed).normal(0, sigma, num_values).astype(np.float32)
    return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


# ---- decoding


def decoding(decoder: Decoder, rounds: int) -> dict[str, dict[str, float]]:
    """Returns, by what is done, GB/s of weights, by one thread and by all; medians over frames and rounds."""
    plain = [gaussian(FRAME_VALUES, 0.02, seed) for seed in range(NUM_FRAMES)]
    frames = [np.frombuffer(bytearray(codec.encode(values)), np.uint8) for values in plain]
    outs = [np.ones(FRAME_VALUES, np.uint16) for _ in plain]
    reference = Decoder()

    def checked(place: int) -> None:
        decoder.sum_of(frames[place])
        decoder.decode(frames[place], outs[place])

    kinds: dict[str, Callable[[int], Any]] = {
        "memcpy": lambda place: np.copyto(outs[place], plain[place]),
        "decode": lambda place: decoder.decode(frames[place], outs[place]),
        "checksum": lambda place: decoder.sum_of(frames[place]),
        "checksum and decode": checked,
        "numpy's decode": lambda place: reference.decode(frames[place], outs[place]),
        "encode": lambda place: codec.encode(plain[place]),
    }
    result: dict[str, dict[str, float]] = {}
    for num_threads in sorted({1, num_cores()}):
        told: dict[str, list[float]] = {name: [] for name in kinds}
        for _ in range(rounds):
            for name, work in kinds.items():
                seconds = _shared(work, NUM_FRAMES, num_threads)
                told[name].append(NUM_FRAMES * FRAME_VALUES * 2 / seconds / 1e9)
                if "decode" in name and not all(map(np.array_equal, outs, plain)):
                    raise SystemExit(f"{name}: other bits")
                if "decode" in name:
                    for out in outs:
                        out.fill(1)
        for name, speeds in told.items():
            result.setdefault(name, {})[f"{num_threads} thread{'s' * (num_threads > 1)}"] = round(statistics.median(speeds), 2)
    return result


def _shared(work: Callable[[int], Any], count: int, num_threads: int) -> float:
    """Seconds for work(0) to work(count - 1) by that many threads."""
    left = iter(range(count))

    def run() -> None:
        for place in left:
            work(place)

    threads = [threading.Thread(target=run) for _ in range(num_threads)]
    started_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - started_s


# ---- ratio


def ratios(models: list[Path]) -> dict[str, float]:
    rng = np.random.default_rng(1)
    scales = [gaussian(FRAME_VALUES // 16, float(sigma), seed) for seed, sigma in enumerate(rng.uniform(0.005, 0.05, 16))]
    heavy = (rng.standard_t(4, FRAME_VALUES) * 0.02).astype(np.float32)
    made = {f"Gaussian, sigma {sigma}": gaussian(FRAME_VALUES, sigma, 2) for sigma in (0.005, 0.02, 0.1, 1.0)}
    made["16 scales between 0.005 and 0.05 in one frame"] = np.concatenate(scales)
    made["Student's t, 4 degrees"] = (heavy.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    result = {}
    for name, values in made.items():
        encoded = codec.encode(values)
        out = np.empty_like(values)
        codec.decode(np.frombuffer(bytearray(encoded), np.uint8), out)
        if not np.array_equal(out, values):
            raise SystemExit(f"{name}: other bits")
        result[name] = round(len(encoded) / values.nbytes, 4)
    for folder in models:
        with tempfile.TemporaryDirectory() as made_in:
            copy = Path(made_in) / folder.name
            shutil.copytree(folder, copy)
            pack(copy)
            result[folder.name] = round(verified(copy), 4)
    return result


def pack(folder: Path) -> float:
    """Packs as `hearth pack` does, and returns its seconds."""
    started_s = time.perf_counter()
    (folder / PACKED_DIR).mkdir(exist_ok=True)
    for info in scan_one(folder).files:
        fd = os.open(folder / info.name, os.O_RDONLY)
        header = read_header(fd, info.name)
        pack_file(fd, header, source_of(info, header), folder / PACKED_DIR / info.name, lambda num_bytes: None)
        os.close(fd)
    if (folder / INDEX_NAME).exists():
        shutil.copy(folder / INDEX_NAME, folder / PACKED_DIR)
    return time.perf_counter() - started_s


def verified(folder: Path) -> float:
    """Raises CheckpointError for any other bit. Returns packed files' bytes to tensors'."""
    before = after = 0
    plain = read_headers(folder)
    for name, header in read_headers(folder, PACKED_DIR).items():
        fd, plain_fd = (os.open(folder / one, os.O_RDONLY) for one in (name, Path(name).name))
        originals = {tensor.name: tensor for tensor in plain[Path(name).name].tensors}
        for tensor in header.tensors:
            verify_tensor(fd, tensor, plain_fd, originals[tensor.name], lambda num_bytes: None)
        before, after = before + sum(one.num_bytes for one in originals.values()), after + header.file_bytes
        os.close(fd)
        os.close(plain_fd)
    return after / before


# ---- loads


def loads(folder: Path, decoder: Decoder, rounds: int) -> dict[str, Any]:
    """state -> what is read -> GB/s and CPU seconds per GB, of weights."""
    packed_s = None
    if not scan_one(folder).packed_files:
        packed_s = pack(folder)
    checkpoint = scan_one(folder)
    num_bytes = weights_bytes(_shape(folder), "bfloat16")
    num_gb = sum(info.size_bytes for info in checkpoint.files) / 1e9
    num_chunks = -(-num_bytes // CHUNK_BYTES)
    chunks, ring = CpuMemory(num_chunks, CHUNK_BYTES), StagingRing()
    weights = WeightRange(chunks, num_bytes)
    weights.map(range(num_chunks))
    ring.prepare()
    for chunk in range(num_chunks):
        chunks.prepare(chunk)
    paths = [folder / info.name for info in checkpoint.files]
    packed_paths = [folder / info.name for info in checkpoint.packed_files]
    known = {}
    for header in read_headers(folder, PACKED_DIR).values():
        fd = os.open(folder / header.tensors[0].file, os.O_RDONLY)
        for tensor in header.tensors:
            for frame in tensor.frames:
                known[os.pread(fd, 80, frame.begin)] = frame.sum
        os.close(fd)
    unchecked = Decoder(decoder.name, decoder.decode, lambda data: known[data[:80].tobytes()])

    def load(wants_packed: bool, with_decoder: Decoder) -> Any:
        with ExitStack() as stack:
            source = open_checkpoint(folder, "", stack, wants_packed=lambda checkpoint: wants_packed)
            sink = HostSink(weights.buffer, weights.prepare)
            stream_weights(source, "bfloat16", sink, ring, lambda *_: None, lambda: False, decoder=with_decoder)

    kinds: dict[str, tuple[list[Path], Callable[[], Callable[[], Any]]]] = {
        RAW: (paths, lambda: spread(paths, NUM_READERS, SLOT_BYTES, direct=True)),
        PLAIN: (paths, lambda: lambda: load(False, decoder)),
        PACKED: (packed_paths, lambda: lambda: load(True, decoder)),
        UNCHECKED: (packed_paths, lambda: lambda: load(True, unchecked)),
    }
    result: dict[str, Any] = {"gb": round(num_gb, 3), "ratio": round(sum(p.stat().st_size for p in packed_paths) / num_gb / 1e9, 4)}
    if packed_s is not None:
        result["packed_at_gb_per_s"] = round(num_gb / packed_s, 2)
    for state in ("cold", "warm"):
        told: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds if state == "cold" or name != RAW}
        for number in range(rounds):
            order = list(told)
            random.Random(number).shuffle(order)
            for name in order:
                files, ready = kinds[name]
                set_cache(files, state == "warm")
                work = ready()
                cpu, started_s = cpu_s(), time.perf_counter()
                work()
                told[name].append((num_gb / (time.perf_counter() - started_s), (cpu_s() - cpu) / num_gb))
        result[state] = {
            name: {
                "gb_per_s": round(statistics.median(speed for speed, _ in speeds), 2),
                "spread": [round(min(speeds)[0], 2), round(max(speeds)[0], 2)],
                "cpu_s_per_gb": round(statistics.median(cpu for _, cpu in speeds), 3),
            }
            for name, speeds in told.items()
        }
    return result


def _shape(folder: Path) -> Any:
    with ExitStack() as stack:
        return open_checkpoint(folder, "", stack).shape


def tables(result: dict[str, Any]) -> str:
    threads = list(result["decoding"]["memcpy"])
    lines = [f"| GB/s of weights | {' | '.join(threads)} | of memcpy, {threads[0]} |", "|---|" + "---|" * (len(threads) + 1)]
    for name, speeds in result["decoding"].items():
        share = speeds[threads[0]] / result["decoding"]["memcpy"][threads[0]]
        lines.append(f"| {name} | {' | '.join(f'{speeds[one]:.2f}' for one in threads)} | {share:.2f} |")
    lines += ["", "| weights | packed to |", "|---|---|"]
    lines += [f"| {name} | {ratio:.4f} |" for name, ratio in result["ratio"].items()]
    found = result["loads"]
    lines += [
        "",
        f"| load of {found['gb']} GB, packed to {found['ratio']} | GB/s of weights | from-to | CPU-s per GB |",
        "|---|---|---|---|",
    ]
    for state in ("cold", "warm"):
        for name, row in found[state].items():
            low, high = row["spread"]
            lines.append(f"| {state}: {name} | {row['gb_per_s']:.2f} | {low:.2f}-{high:.2f} | {row['cpu_s_per_gb']:.3f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.packing", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", type=Path, default=sorted(one for one in DEMO_MODELS.iterdir() if one.is_dir()))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=6, help="of the checkpoint that is loaded, 0.13 GB each")
    options = parser.parse_args()
    decoder = weight_decoder(str(ROOT / ".cache"))
    folder = make_checkpoint(STORE / f"{options.layers}-layers", options.layers)
    result = {
        "benchmark": "packing",
        **machine(),
        "decoding": decoding(decoder, options.rounds),
        "ratio": ratios(options.models),
        "loads": loads(folder, decoder, options.rounds),
    }
    print(json.dumps(result))
    print(tables(result))


if __name__ == "__main__":
    main()
