"""The token ids of bad_words: texts that a request may not be answered with."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from daemon.api.bodies.decode import invalid
from daemon.models.entry import ModelEntry
from daemon.text.port import TextPort


async def bad_word_ids(text: TextPort, model: ModelEntry, words: Sequence[str]) -> list[list[int]]:
    """Returns each word's tokens at the beginning of a text and those after a space; its leading blanks do not count. Raises
    BadRequest for a word without tokens, and what TextPort.encode raises."""
    if not words:
        return []
    bare = [word.lstrip(" ") or word for word in words]
    both = [each for word in bare for each in (word, f" {word}")]
    encoded = await text.encode(model, msgspec.msgpack.encode(both), add_special_tokens=False, field="bad_words")
    for at in range(len(words)):
        if not len(encoded[2 * at]):
            raise invalid(f"bad_words[{at}]", f"bad_words[{at}] has no tokens in the vocabulary of {model.name}")
    return [list(ids) for ids in dict.fromkeys(tuple(each) for each in encoded)]
