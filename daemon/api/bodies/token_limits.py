"""The largest sizes of the request fields allowed_token_ids and bad_words, and the check of bad_words."""

from __future__ import annotations

from daemon.api.bodies.decode import check_text, invalid

# They are sent for each of up to 128 choices: 128 times as many ids take a few milliseconds of the event loop's time.
MAX_ALLOWED_TOKENS = 4096
MAX_BAD_WORDS, MAX_WORD_CHARS = 256, 128


def checked_words(words: list[str]) -> list[str]:
    """Returns the texts of `bad_words` unchanged. Raises BadRequest naming a text that is empty, longer than 128 characters, or
    contains NUL."""
    for at, word in enumerate(words):
        field = f"bad_words[{at}]"
        if not word:
            raise invalid(field, f"{field} is empty")
        if len(word) > MAX_WORD_CHARS:
            raise invalid(field, f"{field} is longer than {MAX_WORD_CHARS} characters")
        check_text(word, field)
    return words
