"""The alternatives of a completion's tokens, which OpenAI's shape keys by text: no two may share a key."""

from __future__ import annotations

import json
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.api.generation.logprobs import CompletionLogprobs
from daemon.streams.annotated_text import LogprobTrail, TokenEntry
from daemon.text.token_table import BYTE_LEVEL, NORMAL, PackedTable, TokenTable

TEXTS = [b"", b"", b"a", b"a", b"b", b"\xc3", b"\xc3", rb"bytes:\xc3", b"token_id:0", b"token_id:1", b"token_id:12", b""]
SILENT = len(TEXTS)  # an id that the model can sample and the tokenizer does not know


def alternatives(chosen: int, top_ids: list[int]) -> dict[str, float]:
    offsets = array("I", [0])
    for text in TEXTS:
        offsets.append(offsets[-1] + len(text))
    table = TokenTable(PackedTable(BYTE_LEVEL, b"".join(TEXTS), offsets.tobytes(), bytes([NORMAL] * len(TEXTS))), SILENT + 1)
    rendering = CompletionLogprobs(LogprobTrail(table, frozenset(), len(top_ids) or 1, False))
    top = [-float(token_id) for token_id in top_ids]
    rendering.add([TokenEntry(chosen, "", b"", -float(chosen), top_ids, top)])
    (named,) = json.loads(rendering.json())["top_logprobs"]
    assert isinstance(named, dict)
    return named


def test_tokens_without_text_are_named_by_their_ids() -> None:
    assert alternatives(2, [0, 1, 2, SILENT]) == {"token_id:0": 0, "token_id:1": -1, "a": -2, f"token_id:{SILENT}": -SILENT}


@pytest.mark.parametrize("top_ids", [[2, 4], [2, 3, 4]])
def test_of_equal_texts_the_chosen_tokens_is_the_plain_one(top_ids: list[int]) -> None:
    assert alternatives(3, top_ids) == {"token_id:2": -2, "a": -3, "b": -4}


@given(st.permutations(range(SILENT + 1)), st.integers(0, SILENT + 1), st.integers(0, SILENT))
def test_none_is_lost(order: list[int], num_top: int, chosen: int) -> None:
    top_ids = order[:num_top]
    named = alternatives(chosen, top_ids)
    assert sorted(named.values()) == sorted(-float(token_id) for token_id in {chosen, *top_ids})
    assert list(named.values())[:num_top] == [-float(token_id) for token_id in top_ids], "in the engine's order"
    for key, value in named.items():
        if key.startswith("token_id:"):
            assert value == -float(key.removeprefix("token_id:"))
