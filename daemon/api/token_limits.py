"""allowed_token_ids and bad_words: what a request may not be answered with, checked and made tokens."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from daemon.api.decode import check_text, invalid
from daemon.contracts import ModelEntry, TextPort

# Each of up to 128 choices is sent them: 128 times as many ids are a few milliseconds of the event loop's time.
MAX_ALLOWED_TOKENS = 4096
MAX_BAD_WORDS, MAX_WORD_CHARS = 256, 128


def checked_words(words: list[str]) -> list[str]:
    """Raises BadRequest naming the word."""
    for at, word in enumerate(words):
        field = f"bad_words[{at}]"
        if not word:
            raise invalid(field, f"{field} is empty")
        if len(word) > MAX_WORD_CHARS:
            raise invalid(field, f"{field} is longer than {MAX_WORD_CHARS} characters")
        check_text(word, field)
    return words


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
