"""Builds prompts for filling in the middle, with which a code model writes the text for a gap: the tokens that mark the gap, in the
order that the model expects.

Sources: the model cards of Qwen2.5-Coder, CodeGemma, StarCoder, SantaCoder, DeepSeek-Coder, CodeLlama and Codestral.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tokenizers import Tokenizer

from daemon.errors import BadRequest


class _Family(NamedTuple):
    """The special tokens of one family of models for prompts with a gap. prefix: stands before the text that precedes the gap.
    suffix: stands before the text that follows the gap. middle: ends the prompt, and the model writes the text of the gap after it.
    If middle is "", the prompt begins with the text that follows the gap, and ends with the text that precedes it."""

    prefix: str
    suffix: str
    middle: str


_FAMILIES = (
    _Family("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    _Family("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    _Family("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    _Family("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    _Family("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    _Family("[PREFIX]", "[SUFFIX]", ""),  # Codestral
)


def fill_in_middle(tokenizer: Tokenizer, name: str, texts: Sequence[str], suffix: str) -> list[list[int]]:
    """Returns, for each text, the token ids of a prompt for the text that belongs between it and the suffix. name: the model's
    name, for the error. Raises BadRequest if the model's tokenizer has no tokens that mark a gap."""
    for family in _FAMILIES:
        tokens = [token for token in family if token]
        ids = [token_id for token in tokens if (token_id := tokenizer.token_to_id(token)) is not None]
        if len(ids) == len(tokens):
            break
    else:
        message = f"suffix: the tokenizer of {name} has no tokens for filling in the middle"
        raise BadRequest("unsupported_parameter", message, param="suffix")
    after = tokenizer.encode(suffix, add_special_tokens=False).ids
    encoded = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
    if not family.middle:
        return [[ids[1], *after, ids[0], *before] for before in encoded]
    return [[ids[0], *before, ids[1], *after, ids[2]] for before in encoded]
