"""Drafted tokens behind the daemon: the same texts, in fewer steps, and the operator sees how many were guessed right."""

from __future__ import annotations

import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.e2e.checkpoints import make_model
from tests.e2e.node import Node

CONFIG = '[models."plain"]\nspeculator = "none"\n'
REQUESTS: list[dict[str, Any]] = [
    {"prompt": "one two three one two three one", "temperature": 0, "max_tokens": 120},
    {"prompt": "one two three", "temperature": 0, "max_tokens": 120, "logprobs": 1},
    {"prompt": "a b a b a b a", "temperature": 0.3, "seed": 5, "max_tokens": 90},
    {"prompt": "a b a b a b a", "temperature": 0, "max_tokens": 90, "frequency_penalty": 0.4},
    {"prompt": "x y z x y z", "temperature": 0, "max_tokens": 90, "stop": ["e"]},
    {"prompt": "a b", "temperature": 1.5, "seed": 2, "max_tokens": 150, "logit_bias": {"70": 13, "71": 11}},  # repeats itself
    {"prompt": "x y z x y z", "temperature": 0.2, "seed": 1, "max_tokens": 60, "n": 3},
]


def answers(node: Node, model: str) -> list[Any]:
    def ask(body: dict[str, Any]) -> Any:
        told = node.openai().completions.create(model=model, **body)
        return [(choice.text, choice.finish_reason) for choice in told.choices], told.usage.completion_tokens

    with ThreadPoolExecutor(len(REQUESTS)) as pool:
        return list(pool.map(ask, REQUESTS))


def drafted(node: Node, model: str) -> dict[str, int]:
    page = node.get("/metrics")[1]
    rows = re.findall(rf'^hearth_(drafted|accepted|generated)_tokens_total{{model="{model}"}} (\d+)\.0$', page, re.MULTILINE)
    return {kind: int(value) for kind, value in rows}


def test_texts_are_those_of_a_model_without_drafts(tmp_path: Path) -> None:
    make_model(tmp_path / "models" / "plain", max_position_embeddings=512)
    shutil.copytree(tmp_path / "models" / "plain", tmp_path / "models" / "m")
    with Node(tmp_path, devices=["cpu=64MiB"], runner="torch", config=CONFIG, flags=["--dtype", "float32"]) as node:
        assert answers(node, "m") == answers(node, "plain")
        told = drafted(node, "m")
        assert 0 < told["accepted"] <= told["drafted"]
        assert told["generated"] == drafted(node, "plain")["generated"]
        assert drafted(node, "plain").keys() == {"generated"}
