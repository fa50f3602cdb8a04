"""Measures what a model's own predictor gains: `python -m benchmarks.predictor [--streams 1 4 32] [--tokens 96] [--passes 2]
[--cpu-seconds]`.

A model of GLM-4.5's shape with random weights (24 layers, 8 experts, 0.46 GB in bfloat16), made here: its layers add nothing, so
that the next token follows from the last one alone, and its predictor says the same of the token after that; both take the time of
any such model. Of what the predictor drafts, each token is spoilt with a set chance, so its acceptance is known. Texts are sampled
at temperature 1, so prompt lookup finds next to nothing.

The engine's own model and batch scheduler, driven by hand (benchmarks.drafts). Speculators run in turn, each compared with the run
without drafts before it. Prints one JSON line a case.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.drafts import PROMPT, Run, Texts, run
from benchmarks.forward import load_model
from engine.contracts.steps import Proposed
from engine.host.processor import this_processor
from engine.protocol import MTP
from scheduler.batch.prompt_lookup import looked_up
from scheduler.batch.step_limits import StepLimits
from tests.e2e.checkpoints import make_model

ACCURACIES = (0.9, 0.7, 0.5, 0.0)
SIZES = {
    "num_layers": 24,
    "hidden_size": 768,
    "num_heads": 12,
    "num_kv_heads": 4,
    "intermediate_size": 1536,
    "vocab_size": 8192,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 384,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
}


def spoiling(accuracy: float, vocab_size: int) -> Callable[[Proposed], None]:
    """Returns what makes each drafted token hold with that chance, if those before it do."""
    rng = np.random.default_rng(1)

    def spoil(proposed: Proposed) -> None:
        wrong = rng.random(proposed.tokens.shape) >= accuracy
        proposed.tokens[:] = (proposed.tokens + wrong) % vocab_size

    return spoil


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.predictor", description=__doc__)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 32])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--cpu-seconds", action="store_true", help="one thread, and its CPU's seconds: where other work runs")
    options = parser.parse_args()
    if options.cpu_seconds:
        time.perf_counter = time.process_time
    with tempfile.TemporaryDirectory() as folder:
        family = {"architecture": "Glm4MoeForCausalLM", "model_type": "glm4_moe", "dtype": options.dtype}
        path = make_model(Path(folder) / "glm4-moe", agreeing_predictor=True, **family, **SIZES)  # type: ignore[arg-type]
        for num in options.streams:
            measure(path, num, options)


def measure(path: Path, num: int, options: argparse.Namespace) -> None:
    sizes = options.dtype, max(32, 2 * num), PROMPT + options.tokens + 24
    threads = 1 if options.cpu_seconds else 0
    plain_model, shape, _ = load_model(path, *sizes, threads)
    predicting, _, _ = load_model(path, *sizes, threads, speculator=MTP)
    texts, limits = Texts(num, shape.vocab_size), StepLimits(turn_s=0.01, stretch=2.0)
    cases: list[tuple[str, float]] = [*((MTP, accuracy) for accuracy in ACCURACIES), ("prompt-lookup", 0.0)]
    told: dict[tuple[str, float], list[tuple[float, Run, Run]]] = {case: [] for case in cases}
    for number in range(options.passes + 1):  # the first one records steps and learns what they cost
        for case in cases:
            plain = run(plain_model, limits, texts, options.tokens, 1.0, None)
            if case[0] == MTP:
                spoil = spoiling(case[1], shape.vocab_size)
                drafting = run(predicting, limits, texts, options.tokens, 1.0, looked_up, spoil)
            else:
                drafting = run(plain_model, limits, texts, options.tokens, 1.0, looked_up)
            if options.dtype == "float32" and plain.outputs != drafting.outputs:
                raise SystemExit("drafts changed a text")
            if number:
                told[case].append((plain.seconds / drafting.seconds, plain, drafting))
    rate = num * (options.tokens - 1) / statistics.median(plain.seconds for runs in told.values() for _, plain, _ in runs)
    for (speculator, accuracy), runs in told.items():
        drafted = sum(one.num_drafted for _, _, one in runs)
        line = {
            "benchmark": "predictor",
            "dtype": options.dtype,
            "streams": num,
            "clock": "CPU of one thread" if options.cpu_seconds else "wall",
            "speculator": speculator,
            "acceptance": accuracy,
            "ratio": round(statistics.median(ratio for ratio, _, _ in runs), 3),
            "ratios": [round(ratio, 3) for ratio, _, _ in runs],
            "plain_tokens_per_s": round(rate, 1),
            "drafted_of_tokens": round(drafted / (len(runs) * num * options.tokens), 3),
            "tokens_per_step": round(len(runs) * (options.tokens - 1) / sum(one.num_steps for _, _, one in runs), 2),
            "accepted_of_drafted": round(sum(one.num_accepted for _, _, one in runs) / max(1, drafted), 3),
            "processor": this_processor().describe(),
        }
        print(json.dumps(line), flush=True)
    plain_model.release()
    predicting.release()


if __name__ == "__main__":
    main()
