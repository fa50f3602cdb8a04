"""allowed_token_ids and bad_words through the whole node, against greedy text of transformers on the same checkpoint."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import openai
import pytest
import torch
import transformers

from tests.e2e.checkpoints import END_ID, VOCAB_SIZE, make_model
from tests.e2e.node import Node

PROMPT = "abcab"
LETTERS = list(b"abcdefgh")


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("limits")
    make_model(folder / "models" / "oak", seed=1)
    with Node(folder, devices=["cpu:0=64MiB"], runner="torch", flags=["--dtype", "float32", "--threads", "1"]) as running:
        yield running


@pytest.fixture(scope="module")
def greedy(node: Node) -> Callable[[Callable[[list[int]], set[int]], int], list[int]]:
    model = transformers.LlamaForCausalLM.from_pretrained(node.models / "oak", dtype=torch.float32).eval()

    def tokens(may_come: Callable[[list[int]], set[int]], num: int) -> list[int]:
        """The likeliest token of those that may_come(the output so far) has, `num` times."""
        output: list[int] = []
        for _ in range(num):
            with torch.inference_mode():
                logits = model(torch.tensor([[*PROMPT.encode(), *output]])).logits[0, -1].double().numpy()
            allowed = np.array(sorted(may_come(output)))
            output.append(int(allowed[logits[allowed].argmax()]))
        return output

    return tokens


def ask(client: openai.OpenAI, **settings: Any) -> Any:
    own = ("allowed_token_ids", "bad_words", "ignore_eos", "min_tokens", "regex")
    extra = {name: settings.pop(name) for name in own if name in settings}
    options = {"model": "oak", "prompt": PROMPT, "max_tokens": 24, "temperature": 0, **settings}
    return client.completions.create(**options, extra_body=extra)


def text_of(tokens: list[int]) -> str:
    return bytes(token for token in tokens if token < 256).decode(errors="replace")


def test_greedy_text_of_allowed_tokens(client: openai.OpenAI, greedy: Any) -> None:
    plain = ask(client).choices[0].text
    answer = ask(client, allowed_token_ids=LETTERS, n=2, logprobs=0)
    wanted = text_of(greedy(lambda _: set(LETTERS), 24))
    assert [choice.text for choice in answer.choices] == [wanted] * 2 != [plain] * 2
    assert answer.choices[0].finish_reason == "length"
    assert all(value < 0 for value in answer.choices[0].logprobs.token_logprobs), "numbers, and the model's own"
    streamed = "".join(chunk.choices[0].text for chunk in ask(client, allowed_token_ids=LETTERS, stream=True))
    assert streamed == wanted


def test_forbidden_words_give_way_to_others(client: openai.OpenAI, greedy: Any) -> None:
    """Each word that the model writes is forbidden in turn: one of one token, then of two, then of three."""
    everything = set(LETTERS)
    words: list[str] = []

    def may_come(output: list[int]) -> set[int]:
        text = text_of(output)
        return {token for token in everything if not any((text + chr(token)).endswith(word) for word in words)}

    before = ask(client, allowed_token_ids=LETTERS).choices[0].text
    for length in (1, 2, 3):
        words.append(before[:length] if length == 1 else before[-length:])
        text = ask(client, allowed_token_ids=LETTERS, bad_words=words, max_tokens=40).choices[0].text
        assert text == text_of(greedy(may_come, 40))
        assert text[: len(before)] != before
        assert not any(word in text for word in words)
        before = text


def test_a_chat_in_a_stream(client: openai.OpenAI) -> None:
    def said(**more: Any) -> str:
        chunks = client.chat.completions.create(
            model="oak", messages=[{"role": "user", "content": "hi"}], max_tokens=40, temperature=0, stream=True, extra_body=more
        )
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)

    plain = said(allowed_token_ids=LETTERS)
    assert len(plain) == 40
    assert set(plain) <= set(map(chr, LETTERS))
    bad = plain[3:5]
    other = said(allowed_token_ids=LETTERS, bad_words=[bad])
    assert bad not in other
    assert len(other) == 40


def test_with_a_grammar(client: openai.OpenAI) -> None:
    choice = ask(client, regex="[a-z]{12}", allowed_token_ids=LETTERS, bad_words=["aa", "bb"]).choices[0]
    assert re.fullmatch("[a-h]{12}", choice.text)
    assert "aa" not in choice.text
    assert "bb" not in choice.text
    assert choice.finish_reason == "stop"


def test_end_tokens(client: openai.OpenAI) -> None:
    """An end token alone does not end the text before min_tokens, and is no text."""
    answer = ask(client, allowed_token_ids=[END_ID], min_tokens=3)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("", "stop")
    assert answer.usage.completion_tokens == 4
    answer = ask(client, allowed_token_ids=[END_ID, 97], logit_bias={str(END_ID): 100}, min_tokens=5)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("aaaaa", "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_left_is_an_error_that_names_the_field(client: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        ask(client, allowed_token_ids=[97], bad_words=["a"], stream=stream)
    assert (error.value.code, error.value.param) == ("no_token_left", "allowed_token_ids")
    assert "allowed_token_ids and bad_words leave no token" in error.value.message
    with pytest.raises(openai.APIError, match="3 tokens of output") as later:
        list(ask(client, allowed_token_ids=[97], bad_words=["aaaa"], stream=stream))
    assert later.value.param == "allowed_token_ids"
    with pytest.raises(openai.BadRequestError, match=f"allowed_token_ids: {VOCAB_SIZE} is outside the vocabulary"):
        ask(client, allowed_token_ids=[VOCAB_SIZE], stream=stream)


def test_an_engine_killed_under_them_changes_nothing(node: Node) -> None:
    words = ["ab", "cdc", "ee", "ha"]
    settings: dict[str, Any] = {"n": 3, "seed": 9, "temperature": 1.0, "allowed_token_ids": LETTERS, "bad_words": words}
    settings["max_tokens"] = 400
    with node.openai() as client:
        whole = [choice.text for choice in ask(client, **settings).choices]
        texts = [""] * 3
        for at, chunk in enumerate(ask(client, **settings, stream=True)):
            if at == 40:
                os.kill(node.engine_pids()[0], signal.SIGKILL)
            for choice in chunk.choices:
                texts[choice.index] += choice.text
    assert texts == whole
    assert [len(text) for text in texts] == [400] * 3
    assert not any(word in text for text in texts for word in words)
