"""Finds the token ids of bad_words: texts that must not occur in a request's answer."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from daemon.api.bodies.decode import invalid
from daemon.models.entry import ModelEntry
from daemon.text.port import TextPort


async def bad_word_ids(text: TextPort, model: ModelEntry, words: Sequence[str]) -> list[list[int]]:
    """Returns the token ids of each word, once as at the beginning of a text and once as after a space, without duplicates; leading
    blanks of a word are ignored. Raises BadRequest for a word without tokens, and the errors of TextPort.encode."""
    bare = [word.lstrip(" ") or word for word in words]
    both = [each for word in bare for each in (word, f" {word}")]
    encoded = await text.encode(model, msgspec.msgpack.encode(both), add_special_tokens=False, field="bad_words")
    for at in range(len(words)):
        if not len(encoded[2 * at]):
            raise invalid(f"bad_words[{at}]", f"bad_words[{at}] has no tokens in the vocabulary of {model.name}")
    return [list(ids) for ids in dict.fromkeys(tuple(each) for each in encoded)]
