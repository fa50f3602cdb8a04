"""Requests of more sequences than may wait, to models that are cold: taken whole, beside others that wait."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest

from tests.e2e.chat import Stream
from tests.e2e.checkpoints import make_model
from tests.e2e.node import Node
from tests.e2e.test_embeddings import make_encoder

CONFIG = """
[models.oak]
max_queued = 4
max_sequences = 8

[models.enc]
max_queued = 4
"""


def test_a_request_larger_than_the_queue_is_served_by_a_cold_model(tmp_path: Path) -> None:
    make_model(tmp_path / "models" / "oak", seed=1)
    make_encoder(tmp_path / "models" / "enc")
    with Node(tmp_path, runner="torch", config=CONFIG) as node, node.openai() as client:
        answer = client.completions.create(model="oak", prompt=["hello"] * 300, max_tokens=2, extra_body={"ignore_eos": True})
        assert [choice.index for choice in answer.choices] == list(range(300))
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 600
        assert len(client.embeddings.create(model="enc", input=["the sky"] * 100).data) == 100


def test_others_are_refused_while_it_fills_the_queue_and_served_after(tmp_path: Path) -> None:
    make_model(tmp_path / "models" / "oak", seed=1)
    with Node(tmp_path, null_step_ms=20, config=CONFIG) as node, node.openai() as client:
        many = client.completions.create(model="oak", prompt=["hello"] * 100, max_tokens=20, stream=True)
        first = next(iter(many))  # its first sequences run, and the others wait
        assert len(node.json("queue")) > 4
        with pytest.raises(openai.RateLimitError, match="requests wait for oak; max_queued is 4") as raised:
            client.completions.create(model="oak", prompt="hello", max_tokens=1)
        assert int(raised.value.response.headers["Retry-After"]) >= 1
        ends = {first.choices[0].index: first.choices[0].finish_reason}
        ends |= {choice.index: choice.finish_reason for chunk in many for choice in chunk.choices}
        assert set(ends) == set(range(100))
        assert set(ends.values()) == {"length"}
        assert Stream(node, "oak", "hello", 2).join().error == ""
