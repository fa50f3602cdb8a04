"""A daemon with a real model answers a chat, in each type of weights. Collected only where it is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.checkpoints import make_model
from tests.e2e.node import Node


@pytest.mark.parametrize(("dtype", "quantize"), [("float32", ""), ("bfloat16", ""), ("bfloat16", "int8")])
def test_a_chat_is_answered_twice_the_same(tmp_path: Path, dtype: str, quantize: str) -> None:
    make_model(tmp_path / "models" / "oak", dtype=dtype, hidden_size=64)
    config = f'[models.oak]\nquantize = "{quantize}"\n' if quantize else ""
    with Node(tmp_path, devices=["cpu=64MiB"], runner="torch", config=config) as node, node.openai() as client:
        answers = [
            client.chat.completions.create(
                model="oak",
                messages=[{"role": "user", "content": "Why is the sky blue?"}],
                max_tokens=24,
                temperature=0,
                extra_body={"ignore_eos": True},
            )
            for _ in range(2)
        ]
        assert answers[0].usage is not None
        assert answers[0].usage.completion_tokens == 24
        assert answers[0].choices[0].message.content == answers[1].choices[0].message.content


def test_the_null_runner_answers(tmp_path: Path) -> None:
    make_model(tmp_path / "models" / "oak")
    with Node(tmp_path, devices=["cpu=64MiB"]) as node, node.openai() as client:
        answer = client.completions.create(model="oak", prompt="once", max_tokens=8)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 8
