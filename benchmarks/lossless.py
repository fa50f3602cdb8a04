"""Measures whether drafts change anything:
`python -m benchmarks.lossless [--requests 200] [--tokens 20000] [--schemas 500] [--model DIR]`.

The engine's own parts (constraints, grammar process, batch scheduler, model) on a tiny model with random weights, in float32:

- texts: greedy and as many seeded requests, plain, with log-probabilities, token limits and grammars, mixed with rows that nothing
  is drafted for. Texts and ends must equal those without drafts, log-probabilities within 1e-5.
- distribution: sampled tokens at temperature 1 against the model's own distribution. Each token's place in it, drawn within the
  token's probability, is uniform if the samples follow it; a chi-square test of 64 bins says whether they do.
- schemas: answers that follow generated schemas (benchmarks/schemas.py) are the same with drafts, and as many follow them.
- jumps: answers of fixed keys, one after the other, with what their grammar forces drafted and without; in another model if one is
  given (whose end id is 1, as of those of benchmarks/checkpoints.py), and then nothing else.

Prints one JSON line a case; ends with an error if one fails.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.forward import BLOCK_TOKENS, CHUNK_BYTES, load_model
from benchmarks.grammar import is_valid
from benchmarks.schemas import schema
from engine.host.processor import this_processor
from engine.protocol import FINISH_STOP, LoadModel, SamplingParams
from scheduler.batch.drafting import Drafter
from scheduler.batch.prompt_lookup import looked_up
from scheduler.batch.step_limits import StepLimits
from tests.e2e.checkpoints import END_ID, VOCAB_SIZE, make_model
from tests.engine.drafting_bench import Answer, Bench, differences, knowing

Requests = dict[int, tuple[list[int], SamplingParams]]
LENGTH, BINS = 512, 64
WORST = 92.01  # the chi-square of BINS - 1 degrees of freedom that one in a hundred exceeds
LETTERS = list(range(97, 123))
KEYS = {
    "type": "object",
    "properties": {
        "temperature_celsius": {"type": "integer", "minimum": 0, "maximum": 99},
        "relative_humidity": {"enum": ["low", "moderate", "high"]},
        "wind_direction": {"enum": ["north", "east", "south", "west"]},
        "is_raining": {"type": "boolean"},
    },
    "required": ["temperature_celsius", "relative_humidity", "wind_direction", "is_raining"],
    "additionalProperties": False,
}


def bench_of(folder: Path, dtype: str, slots: int, end_id: int) -> Bench:
    """Loads a checkpoint, with memory for as many sequences as slots."""
    model, _, _ = load_model(folder, dtype, slots, LENGTH)
    chunks = -(-slots * LENGTH // BLOCK_TOKENS * model.kv_groups[0].block_bytes // CHUNK_BYTES)
    spec = LoadModel(1, folder.name, str(folder), model.dtype, "", 0, 0, chunks, LENGTH, slots, [end_id])
    return Bench(model, spec, chunks, CHUNK_BYTES)


def mixed(num: int) -> Requests:
    """Returns requests of all kinds: `num` greedy ones and as many seeded ones."""
    made = {}
    for at in range(1, 2 * num + 1):
        rng = np.random.default_rng(at)
        bad_words = [rng.choice(LETTERS, 2).tolist() for _ in range(40)]
        kinds: list[dict[str, Any]] = [
            {"max_tokens": 48},
            {"max_tokens": 48, "repetition_penalty": 1.2, "min_tokens": 9, "logit_bias": {70: 3.0}},
            {"max_tokens": 40, "top_p": 0.9, "top_k": 40, "stop_token_ids": list(range(33, 40))},
            {"max_tokens": 40, "allowed_token_ids": [*LETTERS, END_ID], "bad_words": bad_words, "min_tokens": 5},
            {"max_tokens": 60, "grammar": "json_schema:" + json.dumps(schema(at))},
            {"max_tokens": 60, "grammar": "compact_json:" + json.dumps(schema(at)), "bad_words": bad_words},
            {"max_tokens": 60, "grammar": "regex:([a-f]{2}, ){3}(end|and so on)", "min_tokens": 4},
        ]
        params = SamplingParams(
            **kinds[int(rng.integers(len(kinds)))],
            temperature=0.0 if at % 2 else float(rng.choice([0.7, 1.0, 1.3])),
            seed=at,
            logprobs=int(rng.choice([-1, 0, 4])),
        )
        made[at] = rng.integers(32, 127, 3 + at % 40).tolist(), params
    return made


def known(asked: Requests, answers: dict[int, Answer]) -> dict[int, list[int]]:
    return {request_id: prompt + answers[request_id].tokens for request_id, (prompt, _) in asked.items()}


def texts(bench: Bench, num: int) -> list[dict[str, Any]]:
    asked = mixed(num)
    plain = bench.run(asked, jumps=False, at_once=bench.spec.max_sequences // 3)
    some = [request_id for request_id in asked if request_id % 4]
    drafters: dict[str, Drafter | None] = {
        "forced only": None,
        "prompt lookup": looked_up,
        "right": knowing(known(asked, plain.answers), 1.0, VOCAB_SIZE, some),
        "right of 0.7": knowing(known(asked, plain.answers), 0.7, VOCAB_SIZE, some),
    }
    lines = []
    for name, drafter in drafters.items():
        run = bench.run(asked, drafter, at_once=bench.spec.max_sequences // 3, preempt_at=40)
        found = differences(plain.answers, run.answers)
        for difference in found[:3]:
            print(difference[:400], file=sys.stderr)
        counts = {"drafted": run.num_drafted, "held": run.num_held, "steps": run.num_steps, "steps_without": plain.num_steps}
        kinds = {"case": "texts", "drafter": name, "greedy": num, "seeded": num}
        lines.append(kinds | counts | {"differences": len(found), "passed": not found and run.num_held > 0})
    return lines


def distribution(bench: Bench, num_tokens: int) -> dict[str, Any]:
    """Samples from a vocabulary of which a bias leaves 4 likely tokens, so that prompt lookup finds something everywhere."""
    length = 200
    bias = dict.fromkeys(range(97, 101), 30.0)
    settings: dict[str, Any] = {"ignore_eos": True, "logit_bias": bias, "logprobs": VOCAB_SIZE}
    asked = {at: ([97 + at % 4, 98], SamplingParams(length, 1.0, seed=at, **settings)) for at in range(1, num_tokens // length + 1)}
    run = bench.run(asked, looked_up, at_once=bench.spec.max_sequences // 3)
    rng, places = np.random.default_rng(0), []
    for answer in run.answers.values():
        for token, (_, ids, values) in zip(answer.tokens, answer.logprobs, strict=True):
            logits = np.array(values) + [bias.get(each, 0.0) for each in ids]
            chances = np.exp(logits - logits.max())
            order = np.argsort(ids)
            chances, at = chances[order] / chances.sum(), int(np.searchsorted(np.array(ids)[order], token))
            places.append(chances[:at].sum() + rng.random() * chances[at])
    counts = np.histogram(places, BINS, (0.0, 1.0))[0]
    expected = len(places) / BINS
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    return {
        "case": "distribution",
        "drafter": "prompt lookup",
        "sampled": len(places),
        "drafted": run.num_drafted,
        "held": run.num_held,
        "chi_square": round(chi_square, 1),
        "limit_at_0.01": WORST,
        "passed": chi_square < WORST and run.num_held > 0,
    }


def schemas(bench: Bench, num: int) -> list[dict[str, Any]]:
    asked = {}
    for seed in range(num):
        params = SamplingParams(300, 1.0, seed=seed, grammar="json_schema:" + json.dumps(schema(seed)))
        asked[seed + 1] = list(f"Answer {seed}.".encode()), params
    plain = bench.run(asked, jumps=False, at_once=bench.spec.max_sequences // 3)

    def counted(answers: dict[int, Answer]) -> Counter[str]:
        kinds: Counter[str] = Counter()
        for request_id, answer in answers.items():
            if answer.error:
                kinds["refused"] += 1
            elif answer.finish != FINISH_STOP:
                kinds["length"] += 1
            else:
                text = bytes(token for token in answer.tokens if token < 256).decode()
                kinds["valid" if is_valid(schema(request_id - 1), text) else "invalid"] += 1
        return kinds

    before, lines = counted(plain.answers), []
    for name, drafter in (("forced only", None), ("right of 0.8", knowing(known(asked, plain.answers), 0.8, VOCAB_SIZE))):
        run = bench.run(asked, drafter, at_once=bench.spec.max_sequences // 3)
        after, same = counted(run.answers), not differences(plain.answers, run.answers)
        counts = {"drafted": run.num_drafted, "held": run.num_held, "steps": run.num_steps, "steps_without": plain.num_steps}
        kinds = {kind: after[kind] for kind in ("valid", "invalid", "refused", "length")}
        passed = same and after == before and not after["invalid"]
        lines.append({"case": "schemas", "drafter": name, "schemas": num} | kinds | counts | {"same": same, "passed": passed})
    return lines


def jumps(bench: Bench, passes: int = 3) -> list[dict[str, Any]]:
    """Steps and milliseconds an answer, the grammar process's included: medians of alternating runs."""
    lines = []
    for kind in ("compact_json", "json_schema"):
        ratios, runs, same = [], [], True
        limits = StepLimits(turn_s=0.01, stretch=2.0)
        asked = {at: ([40 + at], SamplingParams(400, 1.0, seed=at, grammar=f"{kind}:{json.dumps(KEYS)}")) for at in range(1, 5)}
        for _ in range(passes + 1):
            plain = bench.run(asked, jumps=False, limits=limits, at_once=1)
            forced = bench.run(asked, limits=limits, at_once=1)
            same &= not differences(plain.answers, forced.answers)
            ratios.append(plain.seconds / forced.seconds)
            runs.append((plain.num_steps, forced.num_steps, 1e3 * plain.seconds, 1e3 * forced.seconds))
        medians = [round(statistics.median(one) / len(asked), 1) for one in zip(*runs[1:], strict=True)]
        tokens = sum(len(answer.tokens) for answer in plain.answers.values()) / len(asked)
        lines.append(
            {
                "case": "jumps",
                "model": bench.spec.model,
                "dtype": bench.spec.dtype,
                "grammar": kind,
                "tokens_each": tokens,
                "steps_each_without": medians[0],
                "steps_each": medians[1],
                "ms_each_without": medians[2],
                "ms_each": medians[3],
                "ratio": round(statistics.median(ratios[1:]), 2),
                "passed": same or bench.spec.dtype != "float32",
            }
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.lossless", description=__doc__)
    parser.add_argument("--requests", type=int, default=200, help="greedy ones, and as many seeded ones")
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--schemas", type=int, default=500)
    parser.add_argument("--model", type=Path, help="a checkpoint for the case of jumps; the others are left out then")
    parser.add_argument("--dtype", default="auto", help="of that model")
    options = parser.parse_args()
    passed = True
    if options.model:
        for line in jumps(bench_of(options.model, options.dtype, 16, 1)):
            print(json.dumps({"benchmark": "lossless", **line, "processor": this_processor().describe()}), flush=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        bench = bench_of(make_model(Path(folder) / "tiny", seed=3, max_position_embeddings=LENGTH), "float32", 64, END_ID)
        for line in (
            *texts(bench, options.requests),
            distribution(bench, options.tokens),
            *schemas(bench, options.schemas),
            *jumps(bench),
        ):
            print(json.dumps({"benchmark": "lossless", **line, "processor": this_processor().describe()}), flush=True)
            passed &= bool(line["passed"])
    if not passed:
        raise SystemExit("drafts changed something")


if __name__ == "__main__":
    main()
