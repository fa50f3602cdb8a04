"""Prompts for filling in the middle: the tokens that mark a gap in a text for code models, and the order the models expect.

Sources: the model cards of Qwen2.5-Coder, CodeGemma, StarCoder, SantaCoder, DeepSeek-Coder, CodeLlama and Codestral.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tokenizers import Tokenizer

from daemon.errors import BadRequest


class _Family(NamedTuple):
    """The special tokens with which one family of models marks a gap in a text: before the text that precedes the gap (prefix),
    before the text that follows it (suffix), and at the prompt's end, where the model fills the gap (middle). middle "": the suffix
    comes first, and the preceding text ends the prompt."""

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
    """Returns, for each text, the token ids of a prompt that asks for what stands between the text and the suffix. name: the
    model's name, for the error. Raises BadRequest if its tokenizer has no tokens for this."""
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
