"""The cpu device beside other servers: the same checkpoint, the same client, in turn, over several rounds.

llama-server takes part where `--llama-server` names the program and `--gguf` the folder of MODEL.gguf files (made by llama.cpp's
convert_hf_to_gguf.py, bf16); vLLM where it is installed; `--transformers` adds plain generate() on whole batches; `--float32` our
own server on the same weights as float32. A peer that is missing is named on a line of its own. Every peer is measured in every
round, so ratios are of neighbours in time; they are printed as the median with the smallest and the largest.
usage: python -m benchmarks.cpu [--model mid] [--streams 1,8,32] [--rounds 3] [--input 128 --output 128]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Protocol

import uvloop
from safetensors import safe_open

from benchmarks.checkpoints import make
from benchmarks.load import drive, summary, tree_cpu_s, tree_rss_bytes
from benchmarks.run import commit_of, table
from benchmarks.server import ROOT, Server

STORE = ROOT / ".cache" / "checkpoints"
ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "I32": 4, "I64": 8}
FIGURES = ("out_tok_s", "itl_p50_ms", "itl_p99_ms", "ttft_p50_ms", "rss_mb", "failed")


class Peer(Protocol):
    """One server under test, measured again and again."""

    name: str

    def measure(self, streams: int, num: int, seed: int) -> dict[str, Any]:
        """`num` requests over `streams` at a time; benchmarks.load.summary's figures."""
        ...


def drive_server(url: str, model: str, pid: int, streams: int, num: int, shape: tuple[int, int], seed: int) -> dict[str, Any]:
    cpu, start = tree_cpu_s(pid), time.perf_counter()
    results = uvloop.run(drive(url, [model], num, streams, *shape, seed=seed))
    wall = time.perf_counter() - start
    return summary(results, wall, tree_cpu_s(pid) - cpu, tree_rss_bytes(pid))


class Running:
    """A server that runs through all rounds."""

    def __init__(self, server: Server | Process, model: str, shape: tuple[int, int], name: str = "hearthd") -> None:
        self._server, self._model, self._shape, self.name = server, model, shape, name

    def measure(self, streams: int, num: int, seed: int) -> dict[str, Any]:
        return drive_server(self._server.url, self._model, self._server.pid, streams, num, self._shape, seed)


class Process:
    """A server as a process of its own; ready when `health` answers 200."""

    def __init__(self, command: list[str], port: int, health: str, limit_s: float, folder: pathlib.Path | None = None) -> None:
        self._command, self.url, self._health, self._limit_s = command, f"http://127.0.0.1:{port}", health, limit_s
        self._folder = folder

    def __enter__(self) -> Process:
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(self._command, cwd=self._folder, stdout=quiet, stderr=quiet)
        self.pid = self._process.pid
        end = time.perf_counter() + self._limit_s
        while not self._ready():
            if self._process.poll() is not None or time.perf_counter() > end:
                self._process.kill()
                raise RuntimeError(f"{self._command[0]} is not ready (exit status {self._process.wait()})")
            time.sleep(0.05)
        return self

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + self._health, timeout=5) as response:
                return bool(response.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class LlamaServer:
    """Started anew for each measurement, with as many slots as streams."""

    name = "llama-server"

    def __init__(self, program: pathlib.Path, gguf: pathlib.Path, shape: tuple[int, int]) -> None:
        self._program, self._gguf, self._shape = program, gguf, shape

    def measure(self, streams: int, num: int, seed: int) -> dict[str, Any]:
        port = free_port()
        context = streams * (2 * self._shape[0] + self._shape[1] + 64)  # a word may be two tokens
        command = [str(self._program), "-m", str(self._gguf), "--port", str(port), "-np", str(streams), "-c", str(context)]
        with Process(command, port, "/health", 120) as server:
            drive_server(server.url, "m", server.pid, 1, 1, (16, 8), seed + 1000)
            return drive_server(server.url, "m", server.pid, streams, num, self._shape, seed)


class Transformers:
    """generate() on batches of as many prompts as there are streams, in a process of its own; no server, nothing streamed."""

    name = "transformers"

    def __init__(self, folder: pathlib.Path, shape: tuple[int, int]) -> None:
        self._folder, self._shape = folder, shape

    def measure(self, streams: int, num: int, seed: int) -> dict[str, Any]:
        command = [sys.executable, "-m", "benchmarks.cpu", "--generate", str(self._folder), "--streams", str(streams)]
        command += ["--input", str(self._shape[0]), "--output", str(self._shape[1])]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=True)
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        return found


def generate(folder: str, streams: int, num_in: int, num_out: int) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    ids = torch.randint(10, model.config.vocab_size, (streams, num_in))
    options = {"do_sample": False, "pad_token_id": 1, "attention_mask": torch.ones_like(ids)}
    model.generate(ids, max_new_tokens=2, min_new_tokens=2, **options)
    start = time.perf_counter()
    model.generate(ids, max_new_tokens=num_out, min_new_tokens=num_out, **options)
    wall = time.perf_counter() - start
    return {"out_tok_s": round(streams * num_out / wall, 1), "itl_p50_ms": round(1e3 * wall / num_out, 2), "failed": 0}


def server_of(folder: pathlib.Path, devices: list[str], stack: ExitStack, flags: Sequence[str] = ()) -> Process:
    """The server of another checkout of this project, its kernels compiled, with the defaults of its configuration. It runs once it
    is entered; `stack` removes its state. flags: further arguments of hearthd."""
    cache, port = str(folder / ".cache"), free_port()
    subprocess.run([sys.executable, "-m", "engine.warm", cache], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    state = stack.enter_context(tempfile.TemporaryDirectory(prefix="hearth-bench-"))
    command = [sys.executable, "-m", "daemon", "--models", str(STORE), "--listen", f"127.0.0.1:{port}", "--cache-dir", cache]
    command += ["--control", f"{state}/control.sock", "--state-dir", state]
    for device in devices:
        command += ["--device", device]
    return Process([*command, *flags], port, "/readyz", 120, folder)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def widen(folder: pathlib.Path, target: pathlib.Path) -> None:
    """Writes the checkpoint once more with its weights as float32."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.safetensors"))
    for file in folder.glob("*.safetensors"):
        save_file({name: tensor.to(torch.float32) for name, tensor in load_file(file).items()}, target / file.name)
    settings = json.loads((target / "config.json").read_text())
    settings.pop("torch_dtype", None)
    (target / "config.json").write_text(json.dumps(settings | {"dtype": "float32"}))


def middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def first_token_s(server: Server | Process, model: str, seed: int) -> float:
    """Returns the seconds from a request with a short prompt to its first token, whatever state the model is in."""
    (result,) = uvloop.run(drive(server.url, [model], 1, 1, 8, 2, seed=seed))
    if not result.ok:
        raise RuntimeError(f"{model}: {result.error or result.status}")
    return result.stamps[0] - result.started


def swap_in(server: Server, model: str) -> dict[str, Any]:
    """First token of a model that is not loaded, its file in the page cache: the device's memory untouched, then used before."""
    fresh = first_token_s(server, model, 1)
    again = []
    for seed in range(2, 5):
        server.cli("unload", model)
        again.append(first_token_s(server, model, seed))
    return {"first_token_fresh_memory_s": round(fresh, 3), "first_token_prepared_memory_s": round(middle(again), 3)}


def machine_limits() -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.roofline", "--only", "machine"]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True).stdout
    found: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    return found


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    model, shape = args.model, (args.input, args.output)
    folder = make(STORE, model)
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    for file in folder.glob("*.safetensors"):  # into the page cache
        with file.open("rb") as reader:
            while reader.read(1 << 24):
                pass
    lines: list[dict[str, Any]] = []
    with ExitStack() as stack:
        threads = ["--threads", str(args.threads)] if args.threads else []
        wide = f"{model}-float32"
        if args.float32:
            widen(folder, STORE / wide)
            weights_in_all = 3 * weights
        else:
            weights_in_all = weights
        devices = [f"cpu={2 * weights_in_all + (2 << 30)}"]
        server = stack.enter_context(Server(STORE, devices, threads))
        lines.append({"benchmark": "cpu", "model": model, "kind": "swap-in", **swap_in(server, model)})
        peers: list[Peer] = [Running(server, model, shape)]
        if args.float32:
            first_token_s(server, wide, 1)
            peers.append(Running(server, wide, shape, "hearthd float32"))
        if args.checkout:
            other = stack.enter_context(server_of(args.checkout.resolve(), devices, stack))
            first_token_s(other, model, 1)
            peers.append(Running(other, model, shape, f"hearthd {commit_of(args.checkout)}"))
        gguf = args.gguf / f"{model}.gguf" if args.gguf else None
        why = f"no {gguf.name} in the folder given" if args.llama_server and gguf else "--llama-server and --gguf are not given"
        if args.llama_server and gguf and gguf.exists():
            peers.append(LlamaServer(args.llama_server, gguf, shape))
        else:
            lines.append({"benchmark": "cpu", "model": model, "kind": "missing", "peer": "llama-server", "why": why})
        if importlib.util.find_spec("vllm") is not None:
            port = free_port()
            command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", str(port)]
            peers.append(Running(stack.enter_context(Process(command, port, "/health", 300)), str(folder), shape, "vllm"))
        else:
            lines.append({"benchmark": "cpu", "model": model, "kind": "missing", "peer": "vllm", "why": "not installed"})
        if args.transformers:
            peers.append(Transformers(folder, shape))
        limits = machine_limits()
        for streams in (int(each) for each in args.streams.split(",")):
            num = max(2, streams)
            figures: dict[str, list[dict[str, Any]]] = {peer.name: [] for peer in peers}
            for seed in range(args.rounds):
                for peer in peers:
                    figures[peer.name].append(peer.measure(streams, num, 100 * seed + streams))
            lines += compare(model, streams, figures, read_bytes(folder), limits)
    return lines


def read_bytes(folder: pathlib.Path) -> int:
    """Returns the bytes of a checkpoint's weights that the step of one token reads: of its experts only those that are chosen."""
    settings = json.loads((folder / "config.json").read_text())
    chosen = settings.get("num_experts_per_tok", 1) / settings.get("num_local_experts", 1)
    total = 0.0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dict
                tensor = tensors.get_slice(name)
                num_bytes = math.prod(tensor.get_shape()) * ITEM_BYTES[tensor.get_dtype()]
                total += num_bytes * chosen if ".experts." in name else num_bytes
    return round(total)


def compare(
    model: str, streams: int, figures: dict[str, list[dict[str, Any]]], weights_bytes: int, limits: dict[str, Any]
) -> list[dict[str, Any]]:
    """One line a peer; ours also has its share of the machine's bandwidth where one row is decoded. weights_bytes: what a step of
    one token reads."""
    lines = []
    ours = figures["hearthd"]
    for name, rounds in figures.items():
        line: dict[str, Any] = {"benchmark": "cpu", "model": model, "kind": "load", "peer": name, "streams": streams}
        line |= {key: middle([each[key] for each in rounds]) for key in FIGURES if key in rounds[0]}
        if name == "hearthd" and streams == 1:
            line["weights_gb_s"] = round(weights_bytes / line["itl_p50_ms"] / 1e6, 1)
            line["share_of_bandwidth"] = round(line["weights_gb_s"] / limits["bandwidth_gb_s"], 2)
        if name != "hearthd":
            ratios = [mine["out_tok_s"] / its["out_tok_s"] for mine, its in zip(ours, rounds, strict=True)]
            line |= {"ours_over_it": round(middle(ratios), 2), "least": round(min(ratios), 2), "most": round(max(ratios), 2)}
        lines.append(line)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mid", help="a checkpoint of benchmarks.checkpoints")
    parser.add_argument("--streams", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--input", type=int, default=128, help="words a prompt")
    parser.add_argument("--output", type=int, default=128, help="tokens a request")
    parser.add_argument("--threads", type=int, default=0, help="of our engine")
    parser.add_argument("--llama-server", type=pathlib.Path, help="llama.cpp's server program")
    parser.add_argument("--gguf", type=pathlib.Path, help="folder of MODEL.gguf in bf16")
    parser.add_argument("--transformers", action="store_true", help="measure transformers' generate too")
    parser.add_argument("--float32", action="store_true", help="measure our own server on the same weights as float32 too")
    parser.add_argument("--checkout", type=pathlib.Path, help="folder of another checkout, whose server is measured too")
    parser.add_argument("--generate", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.generate:
        print(json.dumps(generate(args.generate, int(args.streams), args.input, args.output)))
        return
    lines = run(args)
    for line in lines:
        print(json.dumps(line), flush=True)
    loads = [line for line in lines if line["kind"] == "load"]
    print(table(loads, {key: key.replace("_", " ") for key in sorted({k: 0 for line in loads for k in line}, key=ORDER.index)}))


ORDER = [
    *("benchmark", "model", "kind", "peer", "streams", *FIGURES),
    *("weights_gb_s", "share_of_bandwidth", "ours_over_it", "least", "most"),
]


if __name__ == "__main__":
    main()
