"""Makes the Text object of each sequence of a request: plain, or with the echoed prompt and log-probabilities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from daemon.api.bodies.common import Head
from daemon.contracts import Generation
from daemon.models.entry import ModelEntry
from daemon.streams.annotated_text import AnnotatedText, LogprobTrail
from daemon.streams.stream import Text
from daemon.text.header_tokens import HeaderTokens
from daemon.text.token_table import TokenTable

_strings = msgspec.msgpack.Decoder(list[str])


def written_prompts(head: Head, prompt: bytes) -> list[str] | None:
    """Returns the prompts as the client wrote them, if they are texts that the answer echoes in full; otherwise None. `prompt`: the
    prompts as packed by the body's parse()."""
    return _strings.decode(prompt) if head.outputs.echo and head.prompt_kind == "text" and not head.keep_last else None


def texts_of(
    head: Head,
    model: ModelEntry,
    table: TokenTable,
    generations: Sequence[Generation],
    written: Sequence[str] | None,
    shows_end_token: bool,
    harmony_marks: Mapping[int, str],
) -> list[Text]:
    """Returns one Text for each sequence, in order; a Text turns the sequence's tokens into the answer's text. If log-probabilities
    are asked for, each sequence also gets a trail that collects them. table: the token table by which ids become text. written: the
    prompts as the client wrote them, if they are echoed; else None. shows_end_token: whether the token that ended the text has
    log-probabilities, too. harmony_marks: token id -> the character that stands for this special token of Harmony (the format of
    gpt-oss)."""
    end_ids = frozenset(head.stop_token_ids) if head.ignore_eos else frozenset((*model.eos_token_ids, *head.stop_token_ids))
    outputs = head.outputs
    if outputs.logprobs < 0 and not outputs.echo and head.max_tokens != 0:
        return [Text(table, end_ids, head.stop, head.min_tokens, _headers(harmony_marks)) for _ in generations]
    texts: list[Text] = []
    for at, generation in enumerate(generations):
        trail = LogprobTrail(table, end_ids, outputs.logprobs, keep_end=shows_end_token) if outputs.logprobs >= 0 else None
        generation.logprobs = trail
        echo = (generation.prompt, written[at // outputs.n] if written is not None else None) if outputs.echo else None
        drops, headers = head.max_tokens == 0, _headers(harmony_marks)
        texts.append(AnnotatedText(table, end_ids, head.stop, head.min_tokens, trail, echo, drops, headers))
    return texts


def _headers(harmony_marks: Mapping[int, str]) -> HeaderTokens | None:
    return HeaderTokens(harmony_marks) if harmony_marks else None
