"""Checks and renders the field prompt_logprobs of chats and completions, in vLLM's form."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from daemon.api.bodies.decode import invalid
from daemon.api.bodies.outputs import Outputs
from daemon.api.generation.logprobs import NULL, RENDERED_AT_ONCE
from daemon.contracts import Generation
from daemon.models.entry import ModelEntry
from daemon.streams.prompt_trail import PromptTrail
from daemon.text.port import TextPort
from daemon.text.token_table import TokenTable, escape

# The most tokens and alternatives in one answer. Each takes about 60 bytes of JSON: 120 MB, twice while they are joined.
MAX_NUMBERS = 1 << 21
_json = msgspec.json.encode


def check_size(outputs: Outputs, num_tokens: int, one_report: bool) -> None:
    """Raises BadRequest if a request asks for the log-probabilities of its prompts and they would take too much memory. num_tokens:
    the tokens of all prompts. one_report: True: the answer contains a prompt's log-probabilities once; False: with each choice."""
    num_copies = 1 if one_report else outputs.n
    num = num_tokens * (1 + outputs.prompt_logprobs) * num_copies
    if num > MAX_NUMBERS:
        copies = f", for each of {num_copies} choices," if num_copies > 1 else ""
        raise invalid(
            "prompt_logprobs",
            f"prompt_logprobs: {num_tokens} prompt tokens with {outputs.prompt_logprobs} alternatives each{copies} make {num} "
            f"numbers, more than the {MAX_NUMBERS} that one answer may have",
        )


async def prompt_logprobs_json(text: TextPort, model: ModelEntry, generations: Sequence[Generation]) -> list[bytes]:
    """Returns the JSON of the prompt's log-probabilities for each sequence; [] if the request does not ask for them. The event loop
    runs other work in between."""
    rendered: list[bytes] = []
    for generation in generations:
        if generation.prompt_logprobs is not None:
            rendered.append(await _rendered(generation.prompt_logprobs, generation.prompt, await text.table(model)))
        elif generation.is_copy and rendered:
            rendered.append(rendered[-1])
    return rendered


async def _rendered(trail: PromptTrail, prompt: Sequence[int], table: TokenTable) -> bytes:
    """Returns the log-probabilities of a prompt as a JSON list: null for the first token, and for each other token an object with
    an entry for the token itself and then for its alternatives, by token id."""
    if len(trail) != len(prompt) - 1:
        raise RuntimeError(f"log-probabilities of {len(trail)} prompt tokens are there, of {len(prompt)} tokens in all")
    tokens_at_once = 1 + RENDERED_AT_ONCE // (1 + trail.num_top)
    names: dict[int, bytes] = {}

    def entry(token_id: int, logprob: float, rank: int) -> bytes:
        name = names.get(token_id)
        if name is None:
            name = names[token_id] = escape(table.shown(token_id).decode(errors="replace"))
        return b'"%d":{"logprob":%b,"rank":%d,"decoded_token":"%b"}' % (token_id, _json(logprob), rank, name)

    tokens = [NULL]
    for at, (chosen, rank, top_ids, top) in enumerate(trail.tokens(), start=1):
        if at % tokens_at_once == 0:
            await asyncio.sleep(0)
        token_id = prompt[at]
        # among the likeliest tokens its rank is its place there: of equals, the one with the lower id comes first
        own = entry(token_id, chosen, top_ids.index(token_id) + 1 if token_id in top_ids else rank)
        others = [
            entry(other, logprob, place)
            for place, (other, logprob) in enumerate(zip(top_ids, top, strict=True), start=1)
            if other != token_id
        ]
        tokens.append(b"{%b}" % b",".join([own, *others]))
    return b"[%b]" % b",".join(tokens)
