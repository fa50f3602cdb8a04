"""Measures what int8 weights, or weights that stay packed in memory, give and cost: the same model as it is and with quantize =
"int8" or resident = "packed", in turn.

Given: bytes of weights, milliseconds of decode steps and of prompts, by rows and tokens. Cost: docstrings of the standard library
(the like of what the demo's models were trained on) through both; perplexity of each, divergence of the next token's distribution
(KL, nats, mean and 99th percentile), how often the likeliest token is the same, and the largest difference of a logit beside the
logits' standard deviation. Of a checkpoint with random weights, as `mid` is, perplexity says nothing and divergence still does.

usage: python -m benchmarks.quantize [MODEL_DIR ...] [--held int8|packed] [--tokens N] [--dtype D] [--threads N]: two JSON lines a
model, and tables.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import sysconfig
import time
from pathlib import Path
from typing import Any

from engine.host.process import num_cores, prepare_process

prepare_process()  # before torch is imported

import numpy as np  # noqa: E402
import torch  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from benchmarks.forward import MAX_BATCHED_TOKENS, load_model, make_table, step  # noqa: E402
from benchmarks.run import machine, table  # noqa: E402
from benchmarks.server import ROOT  # noqa: E402
from engine.cpu.model import CpuModel  # noqa: E402
from scheduler.batch.plan import BatchPlan, SequenceTable  # noqa: E402

DEMO_MODELS = ROOT / "demo" / "models"
CONTEXT = 256
ROWS = (1, 4, 8, 16, 32)
PROMPTS = (64, 128, CONTEXT)
ROUNDS, STEPS = 5, 8  # of each, in turn; the fastest round counts


def docstrings(num_chars: int) -> str:
    found: list[str] = []
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        try:
            tree = ast.parse(file.read_text())
        except (SyntaxError, UnicodeDecodeError):
            continue
        kinds = ast.Module | ast.ClassDef | ast.FunctionDef
        found += [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds)]
        if sum(map(len, found)) > num_chars:
            break
    return "\n\n".join(text for text in found if len(text) > 200)


def text_pieces(path: Path, num_tokens: int) -> np.ndarray:
    """[P, CONTEXT] token ids."""
    ids = Tokenizer.from_file(str(path / "tokenizer.json")).encode(docstrings(num_tokens * 8)).ids
    return np.array(ids[: min(num_tokens, len(ids)) // CONTEXT * CONTEXT], np.int32).reshape(-1, CONTEXT)


def quality(models: list[CpuModel], sequences: SequenceTable, pieces: np.ndarray, rounded_name: str) -> dict[str, Any]:
    """models: as it is, rounded or packed. A few pieces at a time, so that the logits take no memory to speak of."""
    followed = [0.0, 0.0]  # log-likelihood of the text
    divergence, same, worst, spread = [], 0, 0.0, []
    at_once = MAX_BATCHED_TOKENS // CONTEXT
    for first in range(0, len(pieces), at_once):
        some = pieces[first : first + at_once]
        rows = len(some)
        sequences.tokens[:rows, :CONTEXT] = some
        plan = BatchPlan(
            0,
            "",
            np.arange(rows, dtype=np.int32),
            np.zeros(rows, np.int32),
            np.full(rows, CONTEXT, np.int32),
            np.ones(rows, np.bool_),
        )
        plain, rounded = (torch.from_numpy(model.logits(plan, sequences, every_token=True)) for model in models)
        left, right = torch.log_softmax(plain, -1), torch.log_softmax(rounded, -1)
        followers = torch.from_numpy(some[:, 1:].astype(np.int64)).unsqueeze(-1)
        for at, one in enumerate((left, right)):
            followed[at] += float(one.view(rows, CONTEXT, -1)[:, :-1].gather(2, followers).double().sum())
        divergence.append((left.exp() * (left - right)).sum(-1))
        same += int((plain.argmax(-1) == rounded.argmax(-1)).sum())
        worst = max(worst, float((plain - rounded).abs().max()))
        spread.append(float(plain.std()))
    told = torch.cat(divergence)
    perplexity = [math.exp(-total / (len(pieces) * (CONTEXT - 1))) for total in followed]
    return {
        "tokens": len(told),
        "perplexity": round(perplexity[0], 3),
        f"{rounded_name}_perplexity": round(perplexity[1], 3),
        "ratio": round(perplexity[1] / perplexity[0], 4),
        "kl_mean": round(float(told.mean()), 6),
        "kl_p99": round(float(told.quantile(0.99)), 6),
        "same_likeliest": round(same / len(told), 4),
        "logit_error_max": round(worst, 4),
        "logit_spread": round(sum(spread) / len(spread), 4),
    }


def speed(models: list[CpuModel], sequences: SequenceTable, held: str) -> list[dict[str, Any]]:
    """Milliseconds of a step of each kind."""
    kinds = [(f"decode {rows}", rows, CONTEXT, 1) for rows in ROWS] + [(f"prefill {length}", 1, 0, length) for length in PROMPTS]
    found = []
    for kind, rows, start, num_new in kinds:
        slots = np.arange(rows, dtype=np.int32)
        fastest = [math.inf, math.inf]
        for _ in range(ROUNDS + 1):  # the first is not worse than others only by chance
            for at, model in enumerate(models):
                begin = time.perf_counter()
                for _ in range(STEPS if num_new == 1 else 1):
                    step(model, sequences, slots, start, num_new)
                fastest[at] = min(fastest[at], (time.perf_counter() - begin) / (STEPS if num_new == 1 else 1))
        plain_ms, held_ms = (round(1000 * one, 3) for one in fastest)
        found.append({"step": kind, "plain_ms": plain_ms, f"{held}_ms": held_ms, "faster": round(plain_ms / held_ms, 2)})
    return found


def compare(path: Path, dtype: str, num_tokens: int, held: str, threads: int) -> tuple[dict[str, Any], dict[str, Any]]:
    loaded = [load_model(path, dtype, max(ROWS), CONTEXT + 8, threads, one) for one in ("", held)]
    models, shape = [one[0] for one in loaded], loaded[0][1]
    sequences = make_table(max(ROWS), CONTEXT + 8, shape.vocab_size)
    about = {"benchmark": "quantize", "model": path.name, "dtype": dtype, "held": held, "threads": threads or num_cores()}
    sizes = {
        "weights_mb": round(models[0].weights_bytes / 1e6, 1),
        f"{held}_mb": round(models[1].weights_bytes / 1e6, 1),
        "load_s": round(loaded[0][2], 2),
        f"{held}_load_s": round(loaded[1][2], 2),
    }
    fast = {**about, "kind": "speed", **sizes, "steps": speed(models, sequences, held)}
    return {**about, "kind": "quality", **quality(models, sequences, text_pieces(path, num_tokens), held)}, fast


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.quantize", description=__doc__)
    parser.add_argument("models", type=Path, nargs="*", help="checkpoint folders; default: the demo's")
    parser.add_argument("--held", default="int8", choices=("int8", "packed"))
    parser.add_argument("--threads", type=int, default=0, help="0: the machine's cores")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    options = parser.parse_args()
    print(json.dumps({"benchmark": "quantize", **machine()}))
    costs, gains = [], []
    for path in options.models or sorted(one for one in DEMO_MODELS.iterdir() if (one / "config.json").exists()):
        cost, gain = compare(path, options.dtype, options.tokens, options.held, options.threads)
        print(json.dumps(cost))
        print(json.dumps(gain), flush=True)
        costs.append(cost)
        shared = {key: value for key, value in gain.items() if key not in ("benchmark", "kind", "steps")}
        gains += [{**shared, **one} for one in gain["steps"]]
    for rows in (costs, gains):
        print(f"\n{table(rows, {key: key.replace('_', ' ') for key in rows[0] if key not in ('benchmark', 'kind')})}")


if __name__ == "__main__":
    main()
