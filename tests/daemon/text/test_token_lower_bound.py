"""The lower bound that hopeless prompts are refused by: never above the number of tokens, and close enough for real texts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers

from daemon.text.token_lower_bound import TokenLowerBound
from tests.daemon.text.tokenizers_made import CORPUS, byte_fallback, byte_level, metaspace


def _changed(tokenizer: Tokenizer, normalizer: object = None, pre_tokenizer: object = None) -> Tokenizer:
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    return tokenizer


def _stripping() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken("<|a|>", lstrip=True, rstrip=True)])
    return tokenizer


MERGED = pre_tokenizers.Split(" ", "merged_with_previous")
SPLIT = pre_tokenizers.Sequence(
    [pre_tokenizers.Split(Regex(r"\s+|\d{1,3}"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
)
KNOWN = {
    "byte level": byte_level(),
    "as Llama 3": _changed(byte_level(), pre_tokenizer=SPLIT),
    "as Qwen": _changed(byte_level(600), normalizers.NFC(), SPLIT),
    "NFKD": _changed(byte_level(), normalizers.Sequence([normalizers.NFKD()])),
    "as Llama 2": byte_fallback(),
    "as Gemma": _changed(
        byte_fallback(strip=False), normalizers.Replace(" ", "▁"), pre_tokenizers.Split(" ", "merged_with_previous")
    ),
    "tokens that strip": _stripping(),
    "blanks dropped": _changed(byte_fallback(), pre_tokenizer=pre_tokenizers.WhitespaceSplit()),
}
UNKNOWN = {
    "unigram": metaspace(),
    "shortens": _changed(byte_level(), normalizers.Replace("ab", "a")),
    "loses letters": _changed(byte_level(), normalizers.Replace("a", "▁")),
    "strips": _changed(byte_level(), normalizers.Strip()),
    "by a pattern": _changed(byte_level(), normalizers.Replace(Regex(" +"), "▁")),
    "drops pieces": _changed(byte_level(), pre_tokenizer=pre_tokenizers.Split("x", "removed")),
}
# fmt: off
PIECES = [
    "<|a|>", "<|end|>", "plain added", "\n\n\n", "日本", "  ", "\t", "e\u0301", "ﬁ", "\u212a", "▁", "The", "fox", " ", "12345", "é",
    "\u3000", "a",
]
# fmt: on
SOME = st.lists(st.sampled_from(PIECES)).map("".join)
REPEATED = st.lists(st.sampled_from(PIECES), max_size=3).map(lambda some: "".join(some) * 40)
FEWEST = {name: TokenLowerBound(tokenizer) for name, tokenizer in KNOWN.items()}


@pytest.mark.parametrize("kind", KNOWN)
@given(
    text=st.one_of(
        st.text(),
        st.lists(st.sampled_from(PIECES)).map("".join),
        st.lists(st.sampled_from(PIECES), max_size=3).map(lambda some: "".join(some) * 40),
    )
)
@settings(max_examples=300, deadline=None)
def test_no_text_has_fewer(kind: str, text: str) -> None:
    fewest, _ = FEWEST[kind].of(text)
    assert fewest <= len(KNOWN[kind].encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("kind", KNOWN)
def test_it_is_of_use(kind: str) -> None:
    text = "\n".join(CORPUS) * 100
    fewest, why = FEWEST[kind].of(text)
    num_tokens = len(KNOWN[kind].encode(text, add_special_tokens=False).ids)
    assert num_tokens / 30 < fewest <= num_tokens
    assert f"of its {len(text.encode())} bytes" in why or KNOWN[kind].normalizer is not None


@pytest.mark.parametrize("kind", UNKNOWN)
def test_nothing_is_said_of_kinds_that_may_lose_text(kind: str) -> None:
    assert TokenLowerBound(UNKNOWN[kind]).of("The fox" * 1000) == (0, "")


def test_long_blanks_in_the_vocabulary_do_not_spoil_it() -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens([" " * 512, "-" * 512])
    fewest, why = TokenLowerBound(tokenizer).of("The fox " * 1000)
    assert fewest >= 6000 / 12
    assert why.startswith("6000 of its 8000 bytes")
