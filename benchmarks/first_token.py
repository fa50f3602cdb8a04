"""A cold model's first token: from a request, with the checkpoint only on the drive, to its first token, through the daemon.

In turn, each round: a raw read of the drive (benchmarks.loading's reference); a request to the unloaded model, whose prompt is
computed behind the weights; `hearth load` of the unloaded model and then the same request, which is what a server does that loads
first and computes afterwards. The files are dropped from the page cache before each read of them; the device's memory is prepared.
`saved_of_shorter`: by how much the first is sooner, of the shorter of load and prefill.

With --ranks the model is split over so many `cpu` devices of one thread: its steps wait for all weights, and `saved_of_shorter` is
what they lose by it.

usage: python -m benchmarks.first_token [--model one-b] [--rounds 3] [--prompts 16,256] [--ranks 2]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import make
from benchmarks.loading import RAW, one, set_cache, weight_files
from benchmarks.server import ROOT, Server

VOCAB = 32000
MIN_SAVED, RAW_TIMES, RAW_PLUS_S = 0.60, 1.15, 0.3  # the bars


def first_token_s(server: Server, model: str, num_tokens: int, rng: random.Random) -> float:
    """Measures the time from the request's first byte to the first token's, with a prompt that no cache holds."""
    body = {"model": model, "prompt": [rng.randrange(300, VOCAB) for _ in range(num_tokens)], "max_tokens": 2, "stream": True}
    data = json.dumps(body | {"temperature": 0, "ignore_eos": True}).encode()
    asked = urllib.request.Request(server.url + "/v1/completions", data, {"Content-Type": "application/json"})
    begin_s = time.perf_counter()
    with urllib.request.urlopen(asked, timeout=120) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                if b'"error"' in line:
                    raise RuntimeError(line.decode())
                return time.perf_counter() - begin_s
    raise RuntimeError(f"{model}: no token came")


def load_s(server: Server, model: str) -> float:
    """The load's own seconds, as the engine measured them."""
    server.cli("load", model)
    return float(server.cli("history", model, "--json")[-1]["load_s"])


def unload(server: Server, model: str, paths: list[Path]) -> None:
    server.cli("unload", model)
    set_cache(paths, warm=False)


def measure(folder: Path, rounds: int, prompts: list[int], num_ranks: int) -> list[dict[str, Any]]:
    model, paths, rng = folder.name, weight_files(folder), random.Random(11)
    seen: dict[int, list[dict[str, float]]] = {num_tokens: [] for num_tokens in prompts}
    with tempfile.TemporaryDirectory() as home:
        (Path(home) / model).symlink_to(folder)
        devices, flags = ["cpu=4GiB"], list[str]()
        if num_ranks > 1:
            config = Path(home) / "node.toml"
            config.write_text(f'[models."{model}"]\nspeculator = "none"\nparallel = {{ tensor = {num_ranks} }}\n')
            devices, flags = [f"cpu:{rank}=3GiB" for rank in range(num_ranks)], ["--config", str(config), "--threads", "1"]
        with Server(Path(home), devices, flags) as server:
            server.cli("load", model)  # its memory is prepared from now on, and its kernels are compiled
            first_token_s(server, model, 32, rng)
            for number in range(rounds):
                for num_tokens in prompts:
                    raw_s = one(RAW, folder, False, sys.executable)["seconds"]
                    unload(server, model, paths)
                    cold_s = first_token_s(server, model, num_tokens, rng)
                    unload(server, model, paths)
                    loaded_s = load_s(server, model)
                    prefill_s = first_token_s(server, model, num_tokens, rng)
                    found = {"raw_s": raw_s, "load_s": loaded_s, "prefill_s": prefill_s, "cold_s": cold_s}
                    print(number, num_tokens, {name: round(value, 3) for name, value in found.items()}, file=sys.stderr, flush=True)
                    seen[num_tokens].append(found)
    return [summary(model, num_ranks, num_tokens, runs) for num_tokens, runs in seen.items()]


def summary(model: str, num_ranks: int, num_tokens: int, runs: list[dict[str, float]]) -> dict[str, Any]:
    def middle(name: str) -> float:
        return statistics.median(run[name] for run in runs)

    saved = [(run["load_s"] + run["prefill_s"] - run["cold_s"]) / min(run["load_s"], run["prefill_s"]) for run in runs]
    kind = "cold" if num_ranks == 1 else f"cold, over {num_ranks} devices"
    line: dict[str, Any] = {"benchmark": "first_token", "kind": kind, "model": model, "prompt_tokens": num_tokens}
    line |= {name: round(middle(name), 3) for name in ("raw_s", "load_s", "prefill_s", "cold_s")}
    line["of_raw_bar"] = round(statistics.median(run["cold_s"] / (RAW_TIMES * run["raw_s"] + RAW_PLUS_S) for run in runs), 3)
    return line | {"saved_of_shorter": round(statistics.median(saved), 3), "saved_bar": MIN_SAVED, "rounds": len(runs)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.first_token", description=__doc__)
    parser.add_argument("--model", default="one-b")
    parser.add_argument("--checkpoints", type=Path, default=ROOT / ".cache" / "checkpoints")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", default="16,256", help="tokens, separated by commas")
    parser.add_argument("--ranks", type=int, default=1)
    options = parser.parse_args()
    folder = make(options.checkpoints, options.model)
    for line in measure(folder.resolve(), options.rounds, [int(each) for each in options.prompts.split(",")], options.ranks):
        print(json.dumps(line))


if __name__ == "__main__":
    main()
