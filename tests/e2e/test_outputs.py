"""n, log-probabilities, echo and penalties through the whole node, against transformers on the same checkpoint."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from tests.e2e.checkpoints import END_ID, make_model
from tests.e2e.node import Node

TOLERANCE = 1e-4
MESSAGES: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("outputs")
    make_model(folder / "models" / "oak", seed=1)
    flags = ["--dtype", "float32", "--threads", "1"]
    config = "max_num_batched_tokens = 64\n"  # prompts come in chunks
    with Node(folder, devices=["cpu:0=64MiB"], runner="torch", config=config, flags=flags) as running:
        yield running


class Reference:
    """The checkpoint in transformers."""

    def __init__(self, folder: Path) -> None:
        import torch
        import transformers

        self._torch = torch
        self._model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def logprobs(self, tokens: list[int]) -> np.ndarray:
        """[T, V]: of the token after each."""
        with self._torch.inference_mode():
            logits = self._model(self._torch.tensor([tokens])).logits[0]
        told: np.ndarray = self._torch.log_softmax(logits.double(), -1).numpy()
        return told

    def logits(self, tokens: list[int]) -> np.ndarray:
        """[V]: of the token after the last."""
        with self._torch.inference_mode():
            told: np.ndarray = self._model(self._torch.tensor([tokens])).logits[0, -1].double().numpy().copy()
        return told


@pytest.fixture(scope="module")
def reference(node: Node) -> Reference:
    return Reference(node.models / "oak")


def test_echo_as_evaluation_tools_ask(client: openai.OpenAI, reference: Reference) -> None:
    """Token ids, echo, one alternative, one token: the numbers are the reference implementation's. Short and long, twice."""
    generator = np.random.default_rng(1)
    prompts = [generator.integers(97, 123, num).tolist() for num in (1, 2, 17, 64, 65, 300)]
    for max_tokens in (1, 0, 1):
        answer = client.completions.create(
            model="oak", prompt=prompts, echo=True, logprobs=1, max_tokens=max_tokens, temperature=0, seed=1234
        )
        assert answer.usage is not None
        assert answer.usage.completion_tokens == len(prompts) * max_tokens
        for choice, prompt in zip(answer.choices, prompts, strict=True):
            told = choice.logprobs
            assert told is not None
            assert told.tokens is not None
            assert told.token_logprobs is not None
            assert told.top_logprobs is not None
            assert len(told.tokens) == len(prompt) + max_tokens
            assert "".join(told.tokens) == choice.text
            assert choice.text.startswith("".join(map(chr, prompt)))
            wanted = reference.logprobs(prompt)
            values = told.token_logprobs[1 : len(prompt)]
            exact = wanted[np.arange(len(prompt) - 1), prompt[1:]]
            assert np.abs(np.array(values) - exact).max(initial=0.0) < TOLERANCE
            greedy = [value == max(top.values()) for value, top in zip(values, told.top_logprobs[1 : len(prompt)], strict=True)]
            assert greedy == (wanted[:-1].argmax(1) == np.array(prompt[1:])).tolist()
            if max_tokens:
                assert told.token_logprobs[-1] == pytest.approx(wanted[-1].max(), abs=TOLERANCE)


def check_prompt(told: list[Any], prompt: list[int], num_top: int, reference: Reference) -> None:
    """vLLM's shape, and the reference implementation's numbers."""
    assert told[0] is None
    assert len(told) == len(prompt)
    wanted = reference.logprobs(prompt)
    for at, tokens in enumerate(told[1:]):
        row, own = wanted[at], prompt[at + 1]
        order = np.argsort(-row)
        assert list(tokens) == list(map(str, dict.fromkeys([own, *order[:num_top].tolist()])))
        for name, each in tokens.items():
            assert each["logprob"] == pytest.approx(row[int(name)], abs=TOLERANCE)
            assert each["rank"] == 1 + int(np.flatnonzero(order == int(name))[0])
        if own < 128:
            assert tokens[str(own)]["decoded_token"] == chr(own)


def test_prompt_logprobs_are_the_references(client: openai.OpenAI, reference: Reference) -> None:
    """Short and long, in chunks, for the first time and where the prefix cache has them; the answer's tokens have another number of
    alternatives."""
    generator = np.random.default_rng(2)
    prompts = [generator.integers(97, 123, num).tolist() for num in (1, 2, 17, 64, 65, 300)]
    for num_top in (3, 0):
        answer = client.completions.create(
            model="oak", prompt=prompts, n=2, logprobs=1, max_tokens=2, seed=1, extra_body={"prompt_logprobs": num_top}
        )
        assert len(answer.choices) == 2 * len(prompts)
        for choice in answer.choices:
            check_prompt(choice.prompt_logprobs, prompts[choice.index // 2], num_top, reference)  # type: ignore[attr-defined]
            assert choice.logprobs is not None
            assert choice.logprobs.token_logprobs is not None
            assert len(choice.logprobs.token_logprobs) == len(choice.logprobs.tokens or []) > 0


def test_prompt_logprobs_of_a_chat(client: openai.OpenAI, reference: Reference) -> None:
    answer: Any = client.chat.completions.create(
        model="oak", messages=MESSAGES, n=2, max_tokens=2, extra_body={"prompt_logprobs": 5}
    )
    prompt = [256, 258, *b"hello", END_ID, 259]  # the template's
    check_prompt(answer.prompt_logprobs, prompt, 5, reference)
    assert answer.prompt_logprobs[1]["258"]["decoded_token"] == "<|user|>"
    assert [choice.logprobs for choice in answer.choices] == [None, None]


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs_are_the_references(client: openai.OpenAI, reference: Reference, stream: bool) -> None:
    options: dict[str, Any] = {
        "model": "oak",
        "messages": MESSAGES,
        "max_tokens": 30,
        "seed": 4,
        "logprobs": True,
        "top_logprobs": 20,
    }
    answer: Any = client.chat.completions.create(**options, stream=stream)
    if stream:
        chunks = list(answer)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        content = [each for chunk in chunks if chunk.choices[0].logprobs for each in chunk.choices[0].logprobs.content]
    else:
        text, content = answer.choices[0].message.content, answer.choices[0].logprobs.content
    assert "".join(each.token for each in content) == text
    tokens = [256, 258, *b"hello", END_ID, 259]  # the template's
    for each in content:
        wanted = reference.logprobs(tokens)[-1]
        assert [top.logprob for top in each.top_logprobs] == pytest.approx(sorted(wanted)[::-1][:20], abs=TOLERANCE)
        if not each.bytes:
            break  # a special token: its id is not told
        tokens.append(each.bytes[0])
        assert each.logprob == pytest.approx(wanted[tokens[-1]], abs=TOLERANCE)
    assert len(content) >= 5


@pytest.mark.parametrize("stream", [False, True])
def test_n_choices_differ_repeat_and_share_the_prompt(client: openai.OpenAI, stream: bool) -> None:
    def ask(**more: Any) -> tuple[list[str], Any]:
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        answer: Any = client.completions.create(
            model="oak", prompt="x" * 200, max_tokens=20, extra_body={"ignore_eos": True}, **options, **more
        )
        if not stream:
            assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
            return [choice.text for choice in answer.choices], answer.usage
        texts: dict[int, str] = {}
        for chunk in answer:
            for choice in chunk.choices:
                texts[choice.index] = texts.get(choice.index, "") + choice.text
            usage = chunk.usage
        return [texts[at] for at in sorted(texts)], usage

    texts, usage = ask(n=5, seed=3)
    assert len(set(texts)) == 5
    assert (usage.prompt_tokens, usage.completion_tokens) == (200, 100)
    assert ask(n=5, seed=3)[0] == texts
    assert ask(seed=3)[0] == texts[:1], "the first of n is the one that comes alone"
    assert ask(n=2, seed=3)[0] == texts[:2]
    assert len(set(ask(n=3)[0])) == 3


def test_penalties_and_bias_bend_greedy_text(client: openai.OpenAI, reference: Reference) -> None:
    """Greedy text, token by token, as the definitions have it; the same in a batch with plain requests."""
    settings: dict[str, Any] = {"presence_penalty": 0.7, "frequency_penalty": 1.1, "logit_bias": {"97": 3.0, "98": -100.0}}
    extra = {"repetition_penalty": 1.3, "ignore_eos": True}
    prompt = "abcab"
    answer = client.completions.create(
        model="oak", prompt=prompt, max_tokens=24, temperature=0, logprobs=1, n=3, **settings, extra_body=extra
    )
    assert len({choice.text for choice in answer.choices}) == 1
    told = answer.choices[0].logprobs
    assert told is not None
    tokens, output = list(prompt.encode()), []
    for value in told.token_logprobs or []:
        raw = reference.logprobs(tokens)[-1]
        logits = reference.logits(tokens)
        logits[97] += 3.0
        logits[98] -= 100.0
        for token in set(tokens):
            logits[token] = logits[token] / 1.3 if logits[token] > 0 else logits[token] * 1.3
        for token in set(output):
            logits[token] -= 0.7 + 1.1 * output.count(token)
        chosen = int(logits.argmax())
        assert value == pytest.approx(raw[chosen], abs=TOLERANCE)
        tokens.append(chosen)
        output.append(chosen)
    plain = client.completions.create(model="oak", prompt=prompt, max_tokens=24, temperature=0, extra_body={"ignore_eos": True})
    assert plain.choices[0].text != answer.choices[0].text


def test_an_engine_killed_under_them_changes_nothing(node: Node) -> None:
    """Penalties are counted from the output the client has; log-probabilities come once a token."""
    options: dict[str, Any] = {
        "model": "oak", "prompt": "once upon a time", "max_tokens": 400, "n": 4, "seed": 9, "logprobs": 2, "echo": True,
        "frequency_penalty": 0.4, "presence_penalty": -0.2, "logit_bias": {"101": 1.0},
        "extra_body": {"ignore_eos": True, "repetition_penalty": 1.1, "min_p": 0.01},
    }  # fmt: skip
    with node.openai() as client:
        whole = client.completions.create(**options)
        stream = client.completions.create(**options, stream=True)
        texts, values = [""] * 4, [[] for _ in range(4)]
        for at, chunk in enumerate(stream):
            if at == 40:
                os.kill(node.engine_pids()[0], signal.SIGKILL)
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                if choice.logprobs is not None:
                    values[choice.index] += choice.logprobs.token_logprobs
    assert texts == [choice.text for choice in whole.choices]
    for ours, choice in zip(values, whole.choices, strict=True):
        assert choice.logprobs is not None
        assert ours[0] is None
        assert ours[1:] == pytest.approx(choice.logprobs.token_logprobs[1:], abs=TOLERANCE)
