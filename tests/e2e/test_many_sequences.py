"""Requests of more sequences than may wait, to models that are cold: taken whole, beside others that wait. An
encoder's are in test_embeddings.py."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.e2e.chat import Stream
from tests.e2e.checkpoints import make_model
from tests.e2e.node import Node

CONFIG = """
[models.oak]
max_queued = 4
max_sequences = 8
"""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("many_sequences")
    make_model(folder / "models" / "oak", seed=1)
    with Node(folder, null_step_ms=20, config=CONFIG) as running:
        yield running


def test_a_request_larger_than_the_queue_is_served_by_a_cold_model(node: Node, client: openai.OpenAI) -> None:
    assert node.state("oak") == "cold"
    answer = client.completions.create(model="oak", prompt=["hello"] * 300, max_tokens=2, extra_body={"ignore_eos": True})
    assert [choice.index for choice in answer.choices] == list(range(300))
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 600


def test_choices_of_several_prompts_are_taken_as_prompts_are(node: Node, client: openai.OpenAI) -> None:
    assert node.cli("unload", "oak").returncode == 0
    answer = client.completions.create(model="oak", prompt=["hello", "bye"], n=100, max_tokens=2, extra_body={"ignore_eos": True})
    assert [choice.index for choice in answer.choices] == list(range(200))
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 400


def test_others_are_refused_while_it_fills_the_queue_and_served_after(node: Node, client: openai.OpenAI) -> None:
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
