"""Greedy answers that are compared: of a model by itself, and of the same beside others. A model that computes one row at a time
gives the same bits each time, so a text that differs tells of weights or KV that another model wrote over."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.load import WORDS, completion, stream_one


class Question(NamedTuple):
    """number: tells the prompts of a model apart. num_tokens: of the answer."""

    model: str
    number: int
    num_tokens: int


def prompt_of(question: Question) -> str:
    return " ".join(WORDS[(question.number + 1) * place % len(WORDS)] for place in range(1, 12))


async def answer(host: str, port: int, question: Question) -> str:
    """Returns the text of a greedy answer, or "" if there was none."""
    return (await answers(host, port, [question]))[0]


async def answers(host: str, port: int, questions: Sequence[Question]) -> list[str]:
    """Returns the texts of greedy answers to questions of one model and length, which one request asks; "" each if it failed."""
    ((model, num_tokens),) = {(asked.model, asked.num_tokens) for asked in questions}
    body = completion(model, "", num_tokens) | {"prompt": [prompt_of(asked) for asked in questions]}
    result = await stream_one(host, port, body, keep_text=True)
    return texts_of(result.text, len(questions)) if result.ok else [""] * len(questions)


def text_of(stream: str) -> str:
    """Returns the text in the events of a stream that has one."""
    return texts_of(stream, 1)[0]


def texts_of(stream: str, num: int) -> list[str]:
    """Returns the texts in a stream's events, in the order of its prompts."""
    texts = [""] * num
    for data in re.findall(r"^data: (\{.*)$", stream, re.M):
        for choice in json.loads(data).get("choices", ()):
            texts[choice.get("index", 0)] += choice["text"]
    return texts


def compared(first: Mapping[Question, str], again: Mapping[Question, str], beside: Mapping[Question, str]) -> dict[str, Any]:
    """Compares answers of models beside others with two answers of each by itself. What differs between those two is told, and
    not compared: then it is not the others that changed it."""
    steady = {asked for asked, text in first.items() if text and again.get(asked) == text}
    lacking = [asked for answers in (first, again, beside) for asked, text in answers.items() if not text]
    differing = sorted(asked for asked in steady & set(beside) if beside[asked] and beside[asked] != first[asked])
    return {
        "compared": len(steady & set(beside)),
        "unsteady": len(first) - len(steady),
        "no_answer": len(lacking),
        "differing": len(differing),
        "which": [f"{asked.model} {asked.number}" for asked in differing[:8]],
    }
