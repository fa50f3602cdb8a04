"""The trail of tokens beside a sequence's text: whatever the tokens and however they come, joined they are the text."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.streams.annotated_text import AnnotatedText, LogprobTrail, TokenEntry
from daemon.streams.stream import Text
from daemon.text.token_table import BYTE, BYTE_LEVEL, NORMAL, PIECES, SKIPPED, PackedTable, TokenTable
from engine.protocol import FINISH_LENGTH, FINISH_NONE, FINISH_STOP, PromptLogprobs


def table_of(kind: str, pieces: list[tuple[bytes, int]], **settings: object) -> TokenTable:
    offsets = array("I", [0])
    for piece, _ in pieces:
        offsets.append(offsets[-1] + len(piece))
    blob, flags = b"".join(piece for piece, _ in pieces), bytes(flag for _, flag in pieces)
    return TokenTable(PackedTable(kind, blob, offsets.tobytes(), flags, **settings), len(pieces) + 2)  # type: ignore[arg-type]


BYTES = [(bytes([value]), NORMAL) for value in (0xC3, 0xA9, 0xF0, 0x9F, 0x98, 0x80, 0xFF, 0x41)]
WORDS = [
    (b"ab", NORMAL),
    (b" b", NORMAL),
    ("é".encode(), NORMAL),
    (b"  ", NORMAL),
    (b"", NORMAL),
    (b"<e>", SKIPPED),
]
EOS = len(BYTES) + len(WORDS) - 1
BYTE_TABLE = table_of(BYTE_LEVEL, [*BYTES, (b"\xa9x", NORMAL), *WORDS[1:]])
TABLES = {
    "byte level": BYTE_TABLE,
    "pieces": table_of(PIECES, [*((raw, BYTE) for raw, _ in BYTES), *WORDS], strip_start=1),
    "metaspace": table_of(PIECES, [*((raw, BYTE) for raw, _ in BYTES), *WORDS], first_drops_spaces=True),
}
IDS = st.lists(st.integers(0, EOS + 1), max_size=24)
STOPS = st.lists(st.sampled_from(["b", " b", "é", "b b", "A", "\ufffd", "ab "]), max_size=2)


class Followed:
    """A sequence fed step by step, as the dispatcher does it."""

    def __init__(self, table: TokenTable, stops: list[str], keep_end: bool = False, echo: list[int] | None = None) -> None:
        self.trail = LogprobTrail(table, frozenset({EOS}), 0, keep_end)
        shown = None if echo is None else (echo, None)
        self.text = AnnotatedText(table, frozenset({EOS}), stops, 0, self.trail, shown, drop_tokens=False)
        self.sent: list[str] = []
        self.entries: list[TokenEntry] = []

    def step(self, ids: list[int], finish: int) -> None:
        for token_id in ids:
            self.trail.feed(-float(token_id), (), ())
        self.sent.append(self.text.add(ids, finish))
        told = self.trail.take()
        self.entries += told
        assert len("".join(entry.text for entry in self.entries)) <= len("".join(self.sent)), "told before its text is sent"


def run(table: TokenTable, ids: list[int], cuts: list[int], finish: int, followed: Followed) -> str:
    """Returns the plain text of the same tokens."""
    plain = Text(table, frozenset({EOS}), [], 0)
    plain._stops = followed.text._stops and type(followed.text._stops)(followed.text._stops._stops)
    parts, start = [], 0
    edges = sorted({cut for cut in cuts if cut < len(ids)} | {len(ids)})
    for edge in edges:
        last = finish if edge == len(ids) else FINISH_NONE
        followed.step(ids[start:edge], last)
        parts.append(plain.add(ids[start:edge], last))
        start = edge
        if followed.text.matched:
            break
    return "".join(parts)


@pytest.mark.parametrize("kind", TABLES)
@given(ids=IDS, cuts=st.lists(st.integers(1, 24)), stops=STOPS, ends=st.booleans(), keep_end=st.booleans())
@settings(max_examples=400, deadline=None)
def test_the_tokens_joined_are_the_text(
    kind: str, ids: list[int], cuts: list[int], stops: list[str], ends: bool, keep_end: bool
) -> None:
    table = TABLES[kind]
    if ends:
        ids = [*ids, EOS]
    followed = Followed(table, stops, keep_end)
    wanted = run(table, ids, cuts, FINISH_STOP if ends else FINISH_LENGTH, followed)
    text = "".join(followed.sent)
    assert text == wanted
    assert "".join(entry.text for entry in followed.entries) == text
    assert [entry.offset for entry in followed.entries] == [
        len("".join(entry.text for entry in followed.entries[:at])) for at in range(len(followed.entries))
    ]
    assert [entry.logprob for entry in followed.entries] == [-float(entry.token_id) for entry in followed.entries]
    if not followed.text.matched:
        told = ids if keep_end or not ends else ids[:-1]
        assert [entry.token_id for entry in followed.entries] == told, "one entry a token"
        if kind == "byte level":
            assert b"".join(entry.raw for entry in followed.entries).decode(errors="replace") == text
    else:
        assert [entry.token_id for entry in followed.entries] == ids[: len(followed.entries)]


@pytest.mark.parametrize("kind", TABLES)
@given(prompt=st.lists(st.integers(0, EOS + 1), min_size=1, max_size=16), ids=IDS)
@settings(max_examples=200, deadline=None)
def test_an_echoed_prompt_and_its_answer_are_one_text(kind: str, prompt: list[int], ids: list[int]) -> None:
    table = TABLES[kind]
    followed = Followed(table, [], echo=prompt)
    chosen = [-float(token_id) for token_id in prompt[1:]]
    for first in range(1, len(prompt), 3):  # in chunks, and the second again, as after a preemption
        part = chosen[first - 1 : first + 2]
        for _ in range(2):
            followed.trail.feed_prompt(PromptLogprobs(1, first, 0, part, [], [], [1] * len(part)))
    for token_id in ids:
        followed.step([token_id], FINISH_NONE)
    followed.step([], FINISH_LENGTH)
    plain = Text(table, frozenset(), [], 0)
    assert "".join(followed.sent) == plain.add([*prompt, *ids], FINISH_LENGTH)
    assert "".join(entry.text for entry in followed.entries) == "".join(followed.sent)
    assert [entry.offset for entry in followed.entries] == [
        len("".join(entry.text for entry in followed.entries[:at])) for at in range(len(followed.entries))
    ]
    assert [entry.token_id for entry in followed.entries] == [*prompt, *ids]
    assert [entry.logprob for entry in followed.entries] == [None, *chosen, *(-float(token_id) for token_id in ids)]


def test_a_gap_in_the_prompts_log_probabilities_is_an_error() -> None:
    trail = LogprobTrail(BYTE_TABLE, frozenset(), 0, False)
    trail.feed_prompt(PromptLogprobs(1, 1, 0, [-1.0], [], [], [1]))
    with pytest.raises(RuntimeError, match="from 2 to 3"):
        trail.feed_prompt(PromptLogprobs(1, 3, 0, [-1.0], [], [], [1]))
