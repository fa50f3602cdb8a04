"""What streams out equals the tokenizer's own decode, for every supported kind and every way of cutting the ids."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from daemon.errors import BadRequest
from daemon.text.detokenizer import decode, detokenizer
from daemon.text.table_builder import build_table, byte_of_character, read_tokenizer_file
from daemon.text.token_table import TokenTable, escape
from tests.daemon.text.tokenizers_made import byte_fallback, byte_level, metaspace

KINDS = {
    "byte_level": byte_level(),
    "llama2": byte_fallback(strip=True),
    "gemma": byte_fallback(strip=False),
    "metaspace": metaspace("always"),
    "metaspace_never": metaspace("never"),
    "metaspace_first": metaspace("first"),
}


def table_of(tokenizer: Tokenizer) -> TokenTable:
    packed = build_table(read_tokenizer_file(tokenizer.to_str().encode(), "tokenizer.json"), "tokenizer.json", tokenizer.decode)
    return TokenTable(packed, tokenizer.get_vocab_size() + 8)


TABLES = {name: table_of(tokenizer) for name, tokenizer in KINDS.items()}


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_any_ids_decode_as_the_tokenizer_does(kind, data):
    tokenizer, table = KINDS[kind], TABLES[kind]
    # the last ids have no token at all
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() + 7), max_size=24))
    expected = tokenizer.decode(ids, skip_special_tokens=True)
    assert decode(table, ids) == expected

    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    state = detokenizer(table)
    pieces = [state.add(ids[start:end]) for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    assert "".join(pieces) + state.end() == expected


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_the_fast_path_says_the_same_wherever_it_may_be_taken(kind, data):
    """A sink sends `escaped[id]` as it is where `as_in_table` says so."""
    tokenizer, table = KINDS[kind], TABLES[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=24))
    state, out, num_fast = detokenizer(table), b"", 0
    for token_id in ids:
        table.render(token_id)
        fast = table.escaped[token_id]
        if state.as_in_table and fast:
            out += fast
            num_fast += 1
        else:
            out += escape(state.add([token_id]))
    out += escape(state.end())
    assert json.loads(b'"' + out + b'"') == tokenizer.decode(ids, skip_special_tokens=True)


@given(st.text(max_size=60))
@settings(max_examples=200, deadline=None)
def test_text_survives_the_round_trip(text):
    tokenizer = KINDS["byte_level"]
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    if "<|" not in text:
        assert decode(TABLES["byte_level"], ids) == text


def test_nothing_of_a_cut_character_leaks():
    tokenizer, table = KINDS["byte_level"], TABLES["byte_level"]
    characters = {value: char for char, value in byte_of_character().items()}
    ids = [tokenizer.token_to_id(characters[value]) for value in "é😀".encode()]
    state = detokenizer(table)
    assert [state.add([token_id]) for token_id in ids] == ["", "é", "", "", "", "😀"]
    assert state.end() == ""
    state.add(ids[2:4])
    assert state.end() == "\ufffd"


def test_escape_keeps_events_on_one_line():
    text = 'a"b\\c\nd\r\te\u2028f\u2029g\x85h\x00\x1f\x7f é😀'
    escaped = escape(text)
    assert json.loads(b'"' + escaped + b'"') == text
    assert len(escaped.decode().splitlines()) == 1


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.WordPiece(),
        decoders.BPEDecoder(),
        decoders.CTC(),
        decoders.Sequence([decoders.Fuse(), decoders.ByteFallback()]),
        None,
    ],
)
def test_other_decoders_are_refused_by_name(decoder):
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    if decoder is not None:
        tokenizer.decoder = decoder
    with pytest.raises(BadRequest) as error:
        table_of(tokenizer)
    assert error.value.code == "unsupported_tokenizer"
    assert "tokenizer.json: decoder" in error.value.message


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{", b'{"model": {"vocab": {"a": -1}}}', b'{"model": {"vocab": {"a": 99999999}}}', b"\xff"]
)
def test_a_broken_file_is_named(data):
    with pytest.raises(BadRequest, match=r"x/tokenizer\.json"):
        build_table(read_tokenizer_file(data, "x/tokenizer.json"), "x/tokenizer.json", lambda ids: "")


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_have_names_and_no_text(kind):
    """Alternatives of a position are told by what `shown` gives."""
    tokenizer, table = KINDS[kind], TABLES[kind]
    special = {token_id: token.content for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    assert special
    for token_id, name in special.items():
        assert table.shown(token_id) == name.encode()
        assert table.raw(token_id) == table.raw_first(token_id) == b""
        assert decode(table, [token_id]) == ""
