"""A node without scheduler, engine or tokenizer: ids below 256 are bytes, so that texts can be written as bytes in tests."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from array import array
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import msgspec
from aiohttp import web

from daemon.access.admission import Access
from daemon.access.quotas import Quotas
from daemon.api.app import make_app, make_runner
from daemon.api.background import BackgroundRuns
from daemon.api.response_store import ResponseStore
from daemon.contracts import AdapterPort, Expectation, Generation, Resident
from daemon.errors import BadRequest, HearthError, no_model
from daemon.http.connection import ConnectionServer
from daemon.models.asker import OPERATOR, Asker
from daemon.models.entry import ModelEntry
from daemon.process.kept_records import KeptRecords
from daemon.record.audit_log import AuditLog
from daemon.text.jobs import TextFacts
from daemon.text.places import NOBODY, Share
from daemon.text.token_table import BYTE_LEVEL, NORMAL, SKIPPED, PackedTable, TokenTable
from daemon.text.worker import body_reader
from daemon.traces.tracer import Tracer
from daemon.upstreams.upstreams import Upstreams
from engine.protocol import FINISH_LENGTH, FINISH_NONE, FINISH_STOP, PromptLogprobs

EOS = 256
WORDS = [b"Hello", b" world", b"\xc3\xa9", b'"quoted"\n', "\U0001f600".encode()]  # ids 257...
VOCAB = 257 + len(WORDS)


def byte_table() -> TokenTable:
    pieces = [bytes([value]) for value in range(256)] + [b"<eos>", *WORDS]
    offsets = array("I", [0])
    for piece in pieces:
        offsets.append(offsets[-1] + len(piece))
    flags = bytes(SKIPPED if at == EOS else NORMAL for at in range(len(pieces)))
    return TokenTable(PackedTable(kind=BYTE_LEVEL, blob=b"".join(pieces), offsets=offsets.tobytes(), flags=flags), VOCAB)


def entry(name: str = "org/tiny", **changes: object) -> ModelEntry:
    values: dict[str, object] = {
        "name": name,
        "path": "/nowhere",
        "aliases": ("tiny",),
        "max_model_len": 4096,
        "vocab_size": VOCAB,
        "eos_token_ids": (EOS,),
        "bos_token_id": None,
        "created": 1700000000,
        "fingerprint": "f",
    }
    return ModelEntry(**(values | changes))  # type: ignore[arg-type]


class FakeModels:
    def __init__(self, *entries: ModelEntry) -> None:
        self._entries = entries

    def resolve(self, name: str, asker: Asker = OPERATOR) -> ModelEntry:
        for each in self._entries:
            if (name == each.own_name or name in each.own_aliases) and asker.may_use(each.own_name):
                return each
        raise no_model(name)

    def canonical(self, name: str, asker: Asker = OPERATOR) -> str:
        return self.resolve(name, asker).name

    def knows(self, name: str, asker: Asker = OPERATOR) -> bool:
        return any(name == each.own_name or name in each.own_aliases for each in self._entries if asker.may_use(each.own_name))

    def further_names(self, asker: Asker = OPERATOR) -> dict[str, list[str]]:
        return {}

    def entries(self) -> list[ModelEntry]:
        return sorted(self._entries, key=lambda each: each.name)


class FakeText:
    """Encodes UTF-8 bytes as ids; a chat is its messages' contents, one after the other."""

    def __init__(self) -> None:
        self._table = byte_table()
        self.known_facts = TextFacts()
        self.num_parsed = 0
        self.share = NOBODY
        self.encoded_for: list[Share] = []

    def of(self, share: Share) -> FakeText:
        text = copy.copy(self)
        text.share = share
        return text

    async def encode(
        self,
        model: ModelEntry,
        text: bytes,
        add_special_tokens: bool = True,
        field: str = "prompt",
        keep_last: int = 0,
        suffix: str = "",
        keep_first: int = 0,
    ) -> list[array[int]]:
        self.encoded_for.append(self.share)
        texts = [array("i", list(each.encode())) for each in msgspec.msgpack.decode(text, type=list[str])]
        return [ids[-keep_last:][: keep_first or None] for ids in texts]

    async def encode_pairs(
        self, model: ModelEntry, texts: bytes, fields: tuple[str, str], keep: int = 0, keep_second: int = 0
    ) -> tuple[array[int], list[array[int]]]:
        """Writes a pair as its texts with a 0 between; the second text begins behind it."""
        firsts, seconds = msgspec.msgpack.decode(texts, type=tuple[list[str], list[str]])
        firsts = firsts if len(firsts) > 1 else firsts * len(seconds)
        pairs = [
            [*first.encode(), 0, *second.encode()[: keep_second or None]][: keep or None]
            for first, second in zip(firsts, seconds, strict=True)
        ]
        return array("i", [len(first.encode()) + 1 for first in firsts]), [array("i", ids) for ids in pairs]

    async def encode_chat(self, model: ModelEntry, messages: bytes, options: dict[str, object], keep_last: int = 0) -> array[int]:
        self.encoded_for.append(self.share)
        text = "".join(each["content"] or "" for each in msgspec.msgpack.decode(messages))
        return array("i", list(text.encode()))[-keep_last:]

    async def tokenize(self, model: ModelEntry, kind: str, prompt: bytes, options: dict[str, object]) -> list[bytes]:
        ids = await self.encode_chat(model, prompt, options) if kind == "messages" else (await self.encode(model, prompt))[0]
        strings = [chr(token_id) for token_id in ids] if options["token_strings"] else None
        return [b"%d" % len(ids), msgspec.json.encode(ids.tolist()), msgspec.json.encode(strings)]

    async def detokenize(self, model: ModelEntry, ids: bytes) -> bytes:
        unpacked = array("i")
        unpacked.frombytes(ids)
        return msgspec.json.encode(bytes(unpacked.tolist()).decode())

    async def table(self, model: ModelEntry) -> TokenTable:
        return self._table

    async def facts(self, model: ModelEntry) -> TextFacts:
        return self.known_facts

    async def check_grammar(self, field: str, grammar: str) -> None:
        if grammar == "regex:(":
            raise BadRequest("unsupported_grammar", f"{field}: unclosed group", param=field)

    async def parse_body(self, reader: str, body: bytes) -> tuple[bytes, bytes]:
        self.num_parsed += 1
        head, prompt = body_reader(reader)(body)
        return msgspec.msgpack.encode(head), prompt


Script = list[tuple[list[int], int] | HearthError | float]


def text_script(text: bytes, finish: int = FINISH_STOP, delay_s: float = 0.0) -> Script:
    """One byte a step, then the end."""
    script: Script = [delay_s] if delay_s else []
    script += [([value], FINISH_NONE) for value in text]
    return [*script, ([EOS], finish) if finish == FINISH_STOP else ([], finish)]


class FakeRequests:
    """Plays `script(generation)`: steps of (ids, finish), pauses in seconds, or an error at last."""

    def __init__(self, script: Callable[[Generation], Script] | None = None) -> None:
        self.script = script or self._echo
        self.refusal: HearthError | None = None
        self.submitted: list[Generation] = []
        self.cancelled: list[Generation] = []
        self.expected: list[tuple[str, str, int]] = []  # model, tenant, requests submitted when the expectation was over
        self.kept: list[tuple[str, float]] = []  # model, keep_alive
        self.cancel_event = asyncio.Event()
        self._tasks: dict[int, asyncio.Task[None]] = {}

    @staticmethod
    def _echo(generation: Generation) -> Script:
        """The prompt's bytes backwards, as many as asked for."""
        ids = generation.prompt[::-1][: generation.params.max_tokens]
        steps: Script = [([each], FINISH_NONE) for each in ids]
        return [*steps, ([], FINISH_LENGTH)] if len(ids) == generation.params.max_tokens else [*steps, ([EOS], FINISH_STOP)]

    def submit(self, generation: Generation) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.submitted.append(generation)
        generation.request_id = len(self.submitted)
        self._tasks[generation.request_id] = asyncio.get_running_loop().create_task(self._play(generation))

    def expect(self, model: ModelEntry, tenant: str = "") -> Expectation:
        return Expectation(0, lambda: self.expected.append((model.name, tenant, len(self.submitted))))

    def cancel(self, generation: Generation) -> None:
        self.cancelled.append(generation)
        self.cancel_event.set()
        task = self._tasks.pop(generation.request_id, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    def forward(self, generation: Generation) -> None:
        self.submitted.append(generation)

    def forwarded(self, generation: Generation, outcome: str) -> None:
        generation.outcome = outcome

    def keep_alive(self, model: ModelEntry, seconds: float) -> None:
        self.kept.append((model.name, seconds))

    async def _play(self, generation: Generation) -> None:
        if generation.params.prompt_logprobs >= 0 and generation.logprobs is not None:
            generation.logprobs.feed_prompt(prompt_logprobs(generation))
        if generation.params.prompt_logprobs >= 0 and generation.prompt_logprobs is not None:
            generation.prompt_logprobs.feed(prompt_logprobs(generation))
        for step in self.script(generation):
            if isinstance(step, float):
                await asyncio.sleep(step)
            elif isinstance(step, HearthError):
                generation.sink.failed(step)
            else:
                ids, finish = step
                generation.output += ids
                if generation.logprobs is not None:
                    for token_id in ids:
                        generation.logprobs.feed(*logprobs_of(token_id, generation.params.logprobs))
                generation.sink.tokens(ids, finish)
                await asyncio.sleep(0)
        self._tasks.pop(generation.request_id, None)

    async def stop(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def logprobs_of(token_id: int, num_top: int) -> tuple[float, list[int], list[float]]:
    """The fake's own: the token itself is always likeliest."""
    chosen = -0.25 - token_id / 1024
    return chosen, [(token_id + at) % VOCAB for at in range(num_top)], [chosen - at for at in range(num_top)]


def prompt_logprobs(generation: Generation) -> PromptLogprobs:
    num_top = generation.params.prompt_logprobs
    told = [logprobs_of(token_id, num_top) for token_id in generation.prompt[1:]]
    chosen, top_ids, top = [each[0] for each in told], [i for each in told for i in each[1]], [i for each in told for i in each[2]]
    ranks = [1 + at % 3 for at in range(len(told))]
    return PromptLogprobs(generation.request_id, 1, num_top, chosen, top_ids, top, ranks)


class FakeHealth:
    good = True
    open = 0

    def __init__(self) -> None:
        self.loaded: dict[str, Resident] = {}
        self.probe_limits_s: list[float] = []

    def health(self) -> tuple[bool, dict[str, object]]:
        return self.good, {"status": "ok" if self.good else "overdue"}

    def ready(self) -> tuple[bool, dict[str, object]]:
        return self.good, {"status": "ready" if self.good else "draining"}

    async def probe(self, limit_s: float) -> tuple[bool, dict[str, object]]:
        self.probe_limits_s.append(limit_s)
        return self.ready()

    def num_open(self) -> int:
        return self.open

    def residents(self) -> dict[str, Resident]:
        return self.loaded

    def metrics(self, model: str | None = None) -> bytes:
        return b"hearth_up 1\n" if model is None else f'hearth_up{{model="{model}"}} 1\n'.encode()


@dataclass
class Settings:
    max_body_bytes: int | str = 16 << 20
    body_read_timeout_s: float = 10.0
    request_timeout_s: float = 600.0
    sse_comment_every_s: float = 5.0


@dataclass
class Node:
    requests: FakeRequests
    text: FakeText
    health: FakeHealth
    settings: Settings
    app: web.Application
    runner: web.AppRunner
    port: int = 0
    host: str = "127.0.0.1"
    models: list[ModelEntry] = field(default_factory=list)
    background: BackgroundRuns | None = None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


@contextlib.asynccontextmanager
async def serve(
    script: Callable[[Generation], Script] | None = None,
    settings: Settings | None = None,
    models: list[ModelEntry] | None = None,
    access: Access | None = None,
    answered: Callable[[str, int], None] = lambda endpoint, status: None,
    store_bytes: int = 1 << 20,
    tracer: Callable[[], Tracer | None] = lambda: None,
    upstreams: Upstreams | None = None,
    quotas: Quotas | None = None,
    adapters: AdapterPort | None = None,
    audit: AuditLog | None = None,
    records: tuple[KeptRecords, KeptRecords] | None = None,
) -> AsyncIterator[Node]:
    """A real server on a free port. records: of stored responses and of those in the making, with which it goes on."""
    requests, text, health, settings = FakeRequests(script), FakeText(), FakeHealth(), settings or Settings()
    models = models or [entry()]
    stored = ResponseStore(store_bytes, records[0] if records else None)
    background = BackgroundRuns(stored, records[1] if records else None)
    app = make_app(
        *(requests, FakeModels(*models), text, settings, health, access),
        answered=answered,
        stored=stored,
        tracer=tracer,
        upstreams=upstreams,
        quotas=quotas,
        adapters=adapters,
        audit=audit,
        background=background,
    )
    runner = make_runner(app, shutdown_timeout_s=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert isinstance(runner.server, ConnectionServer)
    background.go_on(runner.server)
    port = runner.addresses[0][1]
    try:
        yield Node(requests, text, health, settings, app, runner, port=port, models=models, background=background)
    finally:
        await requests.stop()
        await runner.cleanup()
