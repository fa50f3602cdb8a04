"""Measures how fast a checkpoint comes from the drive into memory: raw reads, our loader, and public loaders where they are
installed.

Every load is a process of its own with its imports done; variants take turns in an order that is shuffled each round. `cold`: the
files are dropped from the page cache before each load; `warm`: they are read into it. `--peer-python` names an interpreter with
torch and the peers (safetensors, runai-model-streamer, fastsafetensors); one that is missing there is said in the table. With
`--ranks` shares of the checkpoint are read instead, each by a process of its own (benchmarks/loading_shares.py).

usage: python -m benchmarks.loading [--rounds N] [--peer-python PATH] [--checkpoint DIR] [--threads] [--plot FILE] [--ranks N]
"""

from __future__ import annotations

import argparse
import gc
import json
import mmap
import os
import random
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import numpy as np

from benchmarks.loading_peers import LOADERS, timed
from engine.contracts.loads import LoadTask
from engine.cpu.memory import CpuMemory
from engine.host import checksum
from engine.loading.weight_copies import WeightCopies
from engine.memory.host_tier import HostTier
from engine.memory.weight_arrivals import parameter_places
from engine.memory.weight_range import WeightRange
from engine.protocol import LoadModel
from loader.files.direct_io import is_cached, open_direct
from loader.reading.landings import Places
from loader.reading.shared_reads import SharedReads, leave
from loader.reading.sinks import HostSink
from loader.reading.staging import HUGE_PAGE_BYTES, SLOT_BYTES, StagingRing
from loader.reading.unpack import Decoder
from loader.reading.weight_stream import NUM_READERS, NUMPY_DECODER, open_checkpoint, stream_weights
from loader.shapes.model_shape import DeviceShare
from loader.sizes.layout import weight_layout, weights_bytes

STORE = Path(".cache/checkpoints")
HIDDEN, INNER, KV, VOCAB, LAYERS = 2048, 8192, 512, 32000, 16
RAW = "raw 2 × 8 MiB, huge pages"
BUFFERED = "buffered pread 2 × 8 MiB"
MIB = 1 << 20
AS_LOADS = f"{NUM_READERS} × {SLOT_BYTES // MIB} MiB, each byte to its own place"  # what a load does at least
SPREAD, DIRECT_SPREAD = f"buffered pread {AS_LOADS}", f"raw {AS_LOADS}"
OURS = "ours, memory prepared"
KEPT = "ours, kept in the host tier on the way"
REFERENCE = {"cold": DIRECT_SPREAD, "warm": SPREAD}
BLOCK_BYTES = 4096  # of direct reads
CHUNK_BYTES = 2 * MIB


def memory(num_bytes: int, huge: bool, prepared: bool) -> memoryview:
    """Private memory, huge pages aligned; prepared: every page exists."""
    mapped = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapped.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    whole = np.frombuffer(mapped, np.uint8)
    if prepared:
        whole[::4096] = 1
    start = -whole.ctypes.data % HUGE_PAGE_BYTES
    return whole[start : start + num_bytes].data


def raw(paths: list[Path], num_threads: int, block_bytes: int, huge: bool, direct: bool) -> Callable[[], Any]:
    """Every block of every file once, each thread into one buffer of its own that is used again and again (and so stays in the
    processor's cache)."""
    fds = [os.open(path, os.O_RDONLY) for path in paths]
    if direct:
        fds = [open_direct(fd) for fd in fds]
    blocks = iter([(fd, at) for fd in fds for at in range(0, os.fstat(fd).st_size, block_bytes)])
    buffers = [memory(block_bytes, huge, prepared=True) for _ in range(num_threads)]

    free = iter(buffers)

    def read() -> None:
        buffer = next(free)
        for fd, at in blocks:
            os.preadv(fd, [buffer], at)

    return lambda: _all_at_once(read, num_threads)


def spread(paths: list[Path], num_threads: int, block_bytes: int, direct: bool) -> Callable[[], Any]:
    """Reads as `raw` does, but into prepared memory of the files' size."""
    fds = [os.open(path, os.O_RDONLY) for path in paths]
    sizes = [-(-os.fstat(fd).st_size // BLOCK_BYTES) * BLOCK_BYTES for fd in fds]
    if direct:
        fds = [open_direct(fd) for fd in fds]
    whole = memory(sum(sizes), huge=True, prepared=True)
    blocks, place = list[tuple[int, int, memoryview]](), 0
    for fd, size in zip(fds, sizes, strict=True):
        for at in range(0, size, block_bytes):
            num_bytes = min(block_bytes, size - at)
            blocks.append((fd, at, whole[place : place + num_bytes]))
            place += num_bytes
    left = iter(blocks)

    def read() -> None:
        for fd, at, buffer in left:
            os.preadv(fd, [buffer], at)

    return lambda: _all_at_once(read, num_threads)


def _all_at_once(work: Callable[[], None], num_threads: int) -> None:
    threads = [threading.Thread(target=work) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def ours(
    folder: Path,
    name: str,
    notes: list[str],
    share: DeviceShare | None = None,
    decoder: Decoder = NUMPY_DECODER,
    shared: Sequence[SharedReads] = (),
) -> tuple[Callable[[], Any], int]:
    """Into memory as an engine has it. And by how much the resident set grows for the weights themselves: chunks that were not
    prepared are counted in both of their mappings. notes: what the system refused. share: what is read; None: all. shared: through
    which ranks share reads."""
    dtype, prepared = "float32" if "float32" in name else "bfloat16", "not prepared" not in name
    with ExitStack() as stack:
        shape = open_checkpoint(folder, "", stack, share=share).shape
    num_bytes = weights_bytes(shape, dtype)
    num_chunks = -(-num_bytes // CHUNK_BYTES)
    chunks, ring = CpuMemory(num_chunks, CHUNK_BYTES), StagingRing()
    weights = WeightRange(chunks, num_bytes)
    weights.map(range(num_chunks))
    ring.prepare()
    if prepared:
        huge = sum(chunks.prepare(chunk) for chunk in range(num_chunks)) / (num_chunks * CHUNK_BYTES)
        if huge < 1:
            notes.append(f"{huge:.0%} of its memory in huge pages")
    if not ring.huge_pages:
        notes.append("staging slots without huge pages")
    tier = host_tier(num_chunks) if name == KEPT else None
    task = load_task(range(num_chunks) if tier is not None else ())
    places = [(begin, end) for begin, end, _ in parameter_places(weight_layout(shape, dtype))]

    def load() -> Any:
        with ExitStack() as opened:
            source = open_checkpoint(folder, "", opened, share=share)
            sink = HostSink(weights.buffer, weights.prepare)
            kept = opened.enter_context(WeightCopies(chunks, tier).keeping(task, weights, places))

            def landed(places: Places) -> None:
                if kept is not None:
                    for begin, end in places:
                        kept.landed(begin, end)

            told: tuple[Any, Any] = (lambda *_: None, lambda: False)
            report = stream_weights(source, dtype, sink, ring, *told, landed=landed, decoder=decoder, shared=shared)
            if shared:
                leave(shared)
            notes.extend(sorted({f"no direct reads: {why}" for why in report.refused.values()}))

    gc.disable()
    gc.freeze()  # as an engine does
    return load, num_bytes if prepared else 2 * num_bytes


def host_tier(num_slots: int) -> HostTier:
    """Prepared, and the kernel that copies to it compiled."""
    fd = os.memfd_create("tier")
    os.ftruncate(fd, num_slots * CHUNK_BYTES)
    tier = HostTier(fd, num_slots, CHUNK_BYTES)
    for slot in range(num_slots):
        tier.prepare(slot)
    checksum.copy(np.zeros(8, np.uint8), np.zeros(8, np.uint8))
    return tier


def load_task(keep_slots: Sequence[int]) -> LoadTask:
    """Returns the task of a load that nobody watches or cancels."""
    spec = LoadModel(1, "m", "", "bfloat16", "", len(keep_slots), 0, 0, 1, 1, [], keep_slots=list(keep_slots))
    return LoadTask(spec, np.arange(len(keep_slots), dtype=np.int32), lambda done, total: None, lambda: False)


def variants(paths: list[Path], every_thread: bool) -> list[str]:
    names = [RAW, DIRECT_SPREAD, "raw 2 × 8 MiB, 4 KiB pages", BUFFERED, SPREAD]
    names += [OURS, KEPT, "ours, memory not prepared", "ours, converted to float32"]
    if every_thread:
        for num_threads, block_mib in [(1, 1), (1, 4), (1, 8), (1, 16), (2, 1), (2, 4), (2, 16), (3, 8), (4, 4), (4, 8)]:
            names.append(f"raw {num_threads} × {block_mib} MiB, huge pages")
    return names + list(LOADERS)


def child(name: str, folder: Path) -> dict[str, Any]:
    """Carries out one of `variants` that is not a peer."""
    paths = weight_files(folder)
    weights_growth_bytes, notes = 0, list[str]()
    if name.startswith("ours"):
        load, weights_growth_bytes = ours(folder, name, notes)
    elif name == SPREAD:
        load = spread(paths, NUM_READERS, SLOT_BYTES, direct=False)
    elif name == DIRECT_SPREAD:
        load = spread(paths, NUM_READERS, SLOT_BYTES, direct=True)
    elif name == BUFFERED:
        load = raw(paths, 2, 8 * MIB, huge=True, direct=False)
    else:
        words = name.split()
        load = raw(paths, int(words[1]), int(words[3]) * MIB, "huge" in name, direct=True)
    result: dict[str, Any] = {**timed(load)}
    result["rss_growth_bytes"] -= weights_growth_bytes
    return result | ({"note": "; ".join(notes)} if notes else {})


def weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def set_cache(paths: list[Path], warm: bool) -> None:
    """Puts the files into the page cache or drops them from it, and checks that it worked."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        size = os.fstat(fd).st_size
        if warm:
            buffer = bytearray(8 * MIB)
            for at in range(0, size, len(buffer)):
                os.preadv(fd, [buffer], at)
        else:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        wrong = [at for at in range(0, size, 64 * MIB) if is_cached(fd, at, min(at + 64 * MIB, size)) != warm]
        os.close(fd)
        if wrong:
            raise SystemExit(
                f"{path}: {'not ' if warm else ''}in the page cache at {wrong[0]}; is memory short, or the file on tmpfs?"
            )


def one(name: str, folder: Path, warm: bool, peer_python: str) -> dict[str, Any]:
    """One load in a fresh process; {"missing": why} for a peer that can't be imported."""
    paths = weight_files(folder)
    # Virtual machines hand free memory back to their host; who touches it next pays for that. Here nobody does.
    memory(sum(path.stat().st_size for path in paths) * 9 // 4, huge=True, prepared=True)
    set_cache(paths, warm)
    if name in LOADERS:
        script = str(Path(__file__).with_name("loading_peers.py"))
        command = [peer_python, script, name, *map(str, paths)]
    else:
        command = [sys.executable, "-m", "benchmarks.loading", "--child", name, "--checkpoint", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"missing": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def measure(folder: Path, rounds: int, names: list[str], states: list[str], peer_python: str) -> dict[str, Any]:
    """state -> variant -> {gb_per_s, spread, ratio, cpu_s_per_gb, rss_gb} or {missing}; ratio: to REFERENCE."""
    num_gb = sum(path.stat().st_size for path in weight_files(folder)) / 1e9
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {(state, name): [] for state in states for name in names}
    for number in range(rounds):
        for state in states:
            order = [name for name in names if not any("missing" in run for run in runs[state, name])]
            random.Random(number).shuffle(order)
            for name in order:
                runs[state, name].append(one(name, folder, state == "warm", peer_python))
                print(f"{number} {state} {name}: {runs[state, name][-1]}", file=sys.stderr, flush=True)
    result: dict[str, Any] = {"benchmark": "loading", "gb": round(num_gb, 3), "rounds": rounds}
    for state in states:
        reference = statistics.median(num_gb / run["seconds"] for run in runs[state, REFERENCE[state]])
        result[state] = {name: summary(runs[state, name], num_gb, reference) for name in names}
    return result


def summary(runs: list[dict[str, Any]], num_gb: float, reference: float) -> dict[str, Any]:
    if any("missing" in run for run in runs):
        return runs[-1]
    speeds = [num_gb / run["seconds"] for run in runs]
    note = "; ".join(sorted({run["note"] for run in runs if "note" in run}))
    return ({"note": note} if note else {}) | {
        "gb_per_s": round(statistics.median(speeds), 2),
        "spread": [round(min(speeds), 2), round(max(speeds), 2)],
        "ratio": round(statistics.median(speeds) / reference, 3),
        "cpu_s_per_gb": round(statistics.median(run["cpu_s"] for run in runs) / num_gb, 4),
        "rss_gb": round(statistics.median(run["rss_growth_bytes"] for run in runs) / 1e9, 2),
    }


def table(result: dict[str, Any]) -> str:
    lines = [f"{result['gb']} GB in bfloat16, {result['rounds']} rounds. RSS: beyond the prepared or given destination."]
    for state in ("cold", "warm"):
        if state not in result:
            continue
        reference = REFERENCE[state]
        lines += ["", f"| {state} | GB/s | from-to | of {reference} | CPU-s per GB | RSS, GB |", "|---|---|---|---|---|---|"]
        for name, row in sorted(result[state].items(), key=lambda item: -item[1].get("gb_per_s", 0)):
            if "missing" in row:
                lines.append(f"| {name} | not measured: {row['missing']} | | | | |")
                continue
            low, high = row["spread"]
            speed = f"{row['gb_per_s']:.2f} | {low:.2f}-{high:.2f} | {row['ratio']:.2f}"
            note = f" ({row['note']})" if "note" in row else ""
            lines.append(f"| {name}{note} | {speed} | {row['cpu_s_per_gb']:.3f} | {row['rss_gb']:.2f} |")
    return "\n".join(lines)


def lines(result: dict[str, Any]) -> list[dict[str, Any]]:
    """One a variant and state, as `make bench` collects them."""
    found = []
    for state in ("cold", "warm"):
        for name, row in result.get(state, {}).items():
            low, high = row.pop("spread", ("", ""))
            found.append({"benchmark": "loading", "kind": state, "read by": name, **row, "from": low, "to": high})
    return found


def plot(result: dict[str, Any], state: str) -> str:
    """An SVG of one state's speeds, fastest first, the reference's marked by a line."""
    rows = sorted(((row["gb_per_s"], name) for name, row in result[state].items() if "missing" not in row), reverse=True)
    reference = result[state][REFERENCE[state]]["gb_per_s"]
    width, left, height = 760, 230, 26
    scale = (width - left - 70) / max(speed for speed, _ in rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height * len(rows) + 40}"',
        ' font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="#fff"/>',
    ]
    for place, (speed, name) in enumerate(rows):
        top, color = 8 + place * height, "#2563eb" if name.startswith("ours") else "#9ca3af"
        parts.append(f'<text x="{left - 8}" y="{top + 14}" text-anchor="end">{escape(name)}</text>')
        parts.append(f'<rect x="{left}" y="{top}" width="{speed * scale:.1f}" height="18" fill="{color}"/>')
        parts.append(f'<text x="{left + speed * scale + 6:.1f}" y="{top + 14}">{speed:.2f}</text>')
    line = left + reference * scale
    bottom = 8 + height * len(rows)
    parts.append(f'<path d="M{line:.1f} 4V{bottom}" stroke="#b91c1c" stroke-dasharray="4 3"/>')
    parts.append(f'<text x="{left}" y="{bottom + 18}">GB/s, {state} page cache, {result["gb"]} GB in bfloat16</text>')
    return "\n".join([*parts, "</svg>", ""])


def make_checkpoint(folder: Path, num_layers: int = LAYERS) -> Path:
    """A Llama of Gaussian weights in two files, tensors in the order of their names as Hugging Face writes them."""
    import torch

    if (folder / "done").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    projections = {"q": (HIDDEN, HIDDEN), "k": (KV, HIDDEN), "v": (KV, HIDDEN), "o": (HIDDEN, HIDDEN)}
    for layer in range(num_layers):
        at = f"model.layers.{layer}."
        shapes |= {f"{at}{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
        shapes |= {f"{at}self_attn.{name}_proj.weight": dims for name, dims in projections.items()}
        shapes |= {f"{at}mlp.{name}_proj.weight": (INNER, HIDDEN) for name in ("gate", "up")}
        shapes[f"{at}mlp.down_proj.weight"] = (HIDDEN, INNER)
    names = sorted(shapes)
    weight_map: dict[str, str] = {}
    torch.manual_seed(7)
    for shard, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :])):
        file = f"model-{shard + 1:05}-of-00002.safetensors"
        header, position = {}, 0
        for name in part:
            num_bytes = 2 * int(np.prod(shapes[name]))
            header[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": [position, position + num_bytes]}
            position += num_bytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (folder / file).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for name in part:
                out.write(torch.randn(shapes[name]).mul_(0.02).to(torch.bfloat16).view(torch.uint8).numpy().data)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER}
    config |= {"num_hidden_layers": num_layers, "num_attention_heads": 32, "num_key_value_heads": KV // 64, "vocab_size": VOCAB}
    config |= {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "hidden_act": "silu"}
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1}))
    (folder / "done").write_text("")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.loading", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, help="a folder in bfloat16; default: one of 2.5 GB is made and kept")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--states", default="cold,warm")
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--only", help="variants, separated by semicolons")
    parser.add_argument("--threads", action="store_true", help="raw reads with other numbers of threads and block sizes too")
    parser.add_argument("--plot", type=Path, help="an SVG of the first state's speeds")
    parser.add_argument("--ranks", type=int, help="devices over which the checkpoint is split")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder = options.checkpoint or make_checkpoint(STORE / "loading")
    if options.ranks:
        from benchmarks import loading_shares  # imports this module

        loading_shares.main(folder, options.rounds, options.ranks, options.child)
        return
    if options.child:
        print(json.dumps(child(options.child, folder)))
        return
    names = options.only.split(";") if options.only else variants(weight_files(folder), options.threads)
    result = measure(folder, options.rounds, names, options.states.split(","), options.peer_python)
    print(table(result), file=sys.stderr)
    if options.plot:
        options.plot.write_text(plot(result, options.states.split(",")[0]))
    for line in lines(result):
        print(json.dumps(line))


if __name__ == "__main__":
    main()
