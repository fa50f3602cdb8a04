"""Coming back to a conversation whose model was evicted: its weights and its KV return from host memory, and only what is new of
the prompt is computed. One conversation of 1,000 tokens on `one-b`, a real daemon, everything measured in turns.

The bar for the first token: swap-in of the weights alone + 1.5 x bytes of KV / speed of the copy + first token of the same request
while the model is there (which is the prefill of what is new, and all that serving a request costs besides).
usage: python -m benchmarks.returning [--rounds 5] [--tokens 1000] [--new 32]
"""

from __future__ import annotations

import argparse
import json
import pathlib
import random
import statistics
import tempfile
from typing import Any
from urllib.parse import urlsplit

import uvloop

from benchmarks.checkpoints import link_models, make
from benchmarks.load import stream_one
from benchmarks.serve import STORE
from benchmarks.server import Server

NAME = "conversation"
VOCABULARY = range(300, 30_000)


class Conversation:
    """Asks with what was said so far and something new."""

    def __init__(self, server: Server, num_tokens: int, num_new: int) -> None:
        where = urlsplit(server.url)
        self._host, self._port = str(where.hostname), int(where.port or 80)
        self._draw = random.Random(3)
        self._said = self._draw.choices(VOCABULARY, k=num_tokens)
        self._num_new = num_new

    def ask(self, known: bool = True) -> float:
        """Seconds to the first token of a prompt of num_tokens, all of it but the last num_new known, and num_new more. known:
        False for one that nobody has asked."""
        new = self._draw.choices(VOCABULARY, k=self._num_new)
        said = self._said if known else self._draw.choices(VOCABULARY, k=len(self._said))
        body = {
            "model": NAME,
            "prompt": said + new,
            "max_tokens": 2,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        result = uvloop.run(stream_one(self._host, self._port, body))
        if not result.ok:
            raise RuntimeError(f"the request failed: {result.error or result.status}")
        return result.stamps[0] - result.started


def last_load(server: Server) -> dict[str, Any]:
    events = [json.loads(line) for line in server.text("events", "--json").splitlines()]
    return [event for event in events if event["event"] == "loaded"][-1]


def swap_in(server: Server) -> float:
    """Seconds of a load from host memory."""
    server.cli("unload", NAME, "--to", "warm")
    server.cli("load", NAME)
    return float(last_load(server)["seconds"])


def run(checkpoint: str = "one-b", rounds: int = 5, num_tokens: int = 1000, num_new: int = 32) -> list[dict[str, Any]]:
    folder = make(STORE, checkpoint)
    config = json.loads((folder / "config.json").read_text())
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    kv_bytes = 2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim * (num_tokens // 16 * 16)
    times: dict[str, list[float]] = {name: [] for name in ("weights", "there", "returned", "load", "computed")}
    restored: list[int] = []
    with tempfile.TemporaryDirectory(prefix="hearth-returning-", dir=STORE.parent) as place:
        models = pathlib.Path(place)
        link_models(models, folder, NAME)
        weights_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        flags = ["--host-tier-bytes", f"{(weights_bytes >> 20) + 256}MiB"]
        with Server(models, [f"cpu={(weights_bytes >> 20) + 1024}MiB"], flags) as server:
            server.cli("load", NAME)
            for _ in range(rounds + 1):  # nobody has asked yet: there is no KV to bring
                times["weights"].append(swap_in(server))
            conversation = Conversation(server, num_tokens, num_new)
            conversation.ask()
            for _ in range(rounds + 1):
                times["there"].append(conversation.ask())
                server.cli("unload", NAME, "--to", "warm")
                times["returned"].append(conversation.ask())
                load = last_load(server)
                if load["bytes_read"]:
                    raise RuntimeError("the weights were read from disk")
                times["load"].append(load["seconds"])
                restored.append(load["restored_kv_tokens"])
            for _ in range(2):
                times["computed"].append(conversation.ask(known=False))
    s = {name: statistics.median(values[1:]) for name, values in times.items()}
    copy_bytes_per_s = weights_bytes / s["weights"]
    bar_s = s["weights"] + 1.5 * kv_bytes / copy_bytes_per_s + s["there"]
    return [
        {
            "benchmark": "returning",
            "checkpoint": checkpoint,
            "tokens": num_tokens,
            "new_tokens": num_new,
            "kv_mib": round(kv_bytes / 2**20, 1),
            "weights_mib": weights_bytes >> 20,
            "restored_tokens": min(restored),
            "first_token_s": round(s["returned"], 4),
            "bar_s": round(bar_s, 4),
            "ratio_to_bar": round(s["returned"] / bar_s, 3),
            "weights_in_s": round(s["weights"], 4),
            "weights_and_kv_in_s": round(s["load"], 4),
            "first_token_while_there_s": round(s["there"], 4),
            "first_token_computed_anew_s": round(s["computed"], 4),
            "swap_in_gb_s": round(copy_bytes_per_s / 1e9, 1),
        }
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.returning", description=__doc__)
    parser.add_argument("--checkpoint", default="one-b")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--new", type=int, default=32)
    options = parser.parse_args()
    for row in run(options.checkpoint, options.rounds, options.tokens, options.new):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
