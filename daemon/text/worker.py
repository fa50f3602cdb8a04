"""A text worker: one process for one model, which receives jobs and sends answers over a socket. The process ends when the daemon
closes the socket."""

from __future__ import annotations

import contextlib
import importlib
import socket
import threading
from array import array
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import msgspec

from daemon.errors import BadRequest, HearthError, ServerFault
from daemon.text.checkpoint_text import CheckpointText
from daemon.text.grammar_check import check_grammar
from daemon.text.job_parts import LONG_TEXT, check_length, detokenized, paired, rendered, tokenized
from daemon.text.jobs import (
    LIMIT_BYTES,
    BuildTable,
    CheckGrammar,
    Deferred,
    Describe,
    Detokenize,
    Done,
    Encode,
    EncodeChat,
    EncodePairs,
    Failed,
    Job,
    Open,
    ParseBody,
    Proceed,
    Tokenize,
    ToWorker,
)
from engine.host.child_process import limit_memory
from engine.protocol import FrameReader, Message, encode
from loader.errors import shortened
from loader.threads import Thread

OOM_SCORE_ADJ = 900  # if memory runs out, the kernel kills a worker before the scanning process, the daemon and its engines

_LongJob = tuple[Job, Callable[[], list[bytes]]]  # a job, and the function that does it
_LongJobs = SimpleQueue[_LongJob]


class TextWorker:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._long: _LongJobs | None = None  # None: no thread takes long jobs yet
        self._deferred: dict[int, _LongJob] = {}  # by job id, until the daemon lets them proceed
        self._opening = Open("", "", None)
        self._text: CheckpointText | None = None

    def run(self) -> None:
        limit_memory(LIMIT_BYTES, OOM_SCORE_ADJ)
        reader = FrameReader(ToWorker)
        while data := self._connection.recv(1 << 20):
            for message in reader.feed(data):
                if isinstance(message, Open):
                    self._open(message)
                elif isinstance(message, Proceed):
                    self._proceed(message)
                else:
                    self._answer(message, lambda job=message: self._do(job))

    def _open(self, opening: Open) -> None:
        self._opening = opening
        self._text = CheckpointText(opening.name, opening.path, opening.chat_template) if opening.path else None

    def _answer(self, job: Job, work: object) -> None:
        """Does a job and sends the daemon its answer, or the error that `work` has raised. work: a function that does the job and
        returns the answer's parts, or None if a thread will send the answer."""
        try:
            parts = work()  # type: ignore[operator]
        except HearthError as error:
            family = "BadRequest" if isinstance(error, BadRequest) else "ServerFault"
            self._send(Failed(job.job_id, family, error.code, error.message, error.param, error.status))
        except MemoryError:
            self._refuse(job, f"needs more than the {LIMIT_BYTES >> 20} MiB that a text worker may take")
        except Exception as error:
            self._send(Failed(job.job_id, "ServerFault", "internal_error", f"{self._about()}: {error!r}", None, 500))
        except BaseException as error:  # a library written in Rust raises this when it panics
            self._refuse(job, f"made the tokenizer fail: {error}")
            self._open(self._opening)  # makes a new tokenizer, because the panic may have left the old one unusable
        else:
            if parts is not None:
                self._send(Done(job.job_id, parts))

    def _about(self) -> str:
        return f"model {self._opening.name}" if self._opening.name else "text worker"

    def _refuse(self, job: Job, why: str) -> None:
        message = shortened(f"{self._about()}: the text of this request {why}")
        self._send(Failed(job.job_id, "BadRequest", "text_work_failed", message, None, 400))

    def _do(self, job: Job) -> list[bytes] | None:
        if isinstance(job, ParseBody):
            head, prompt = body_reader(job.reader)(job.body)
            return [msgspec.msgpack.encode(head), prompt]
        if isinstance(job, CheckGrammar):
            check_grammar(job.field, job.grammar)
            return []
        text = self._text
        if text is None:
            raise ServerFault("internal_error", "this text worker has no model")
        if isinstance(job, BuildTable):
            return [msgspec.msgpack.encode(text.table())]
        if isinstance(job, Describe):
            return [msgspec.msgpack.encode(text.facts())]
        if isinstance(job, Detokenize):
            return [detokenized(text.tokenizer(), job)]
        if isinstance(job, EncodePairs):
            firsts, seconds = msgspec.msgpack.decode(job.texts, type=tuple[list[str], list[str]])
            return self._in_turn(job, sum(map(len, firsts + seconds)), lambda: paired(text, firsts, seconds, job))
        suffix, keep_last, keep_first = "", 0, 0
        if isinstance(job, Encode):
            texts, special = msgspec.msgpack.decode(job.texts, type=list[str]), job.add_special_tokens
            suffix, keep_last, keep_first = job.suffix, job.keep_last, job.keep_first
        elif isinstance(job, EncodeChat):
            # without special tokens, because the template has written them
            texts, special = [rendered(text, job.messages, msgspec.msgpack.decode(job.options))], False
            keep_last = job.keep_last
        else:
            options = msgspec.msgpack.decode(job.options)
            chat = job.kind == "messages"
            texts = [rendered(text, job.prompt, options)] if chat else msgspec.msgpack.decode(job.prompt, type=list[str])
            special, suffix = bool(options["add_special_tokens"]), str(options.get("suffix", ""))
        tokenizer = text.tokenizer()

        def encoded() -> list[bytes]:
            if not isinstance(job, Tokenize) and job.max_tokens:
                check_length(text, texts, job.field if isinstance(job, Encode) else "messages", job.max_tokens)
            batch = text.encode(texts, special, keep_last, suffix, keep_first)
            if isinstance(job, Tokenize):
                return tokenized(tokenizer, batch[0], bool(options["token_strings"]))
            return [array("i", ids).tobytes() for ids in batch]

        return self._in_turn(job, sum(map(len, texts)), encoded)

    def _in_turn(self, job: Job, num_chars: int, work: Callable[[], list[bytes]]) -> list[bytes] | None:
        """Does a job of at most LONG_TEXT characters and returns the answer's parts. A longer job is reported to the daemon as
        deferred and kept for a thread; then the result is None. num_chars: the length of the job's texts. work: does the job.
        Raises MemoryError if there is no memory for the thread."""
        if num_chars <= LONG_TEXT:
            return work()
        if self._long is None:
            jobs: _LongJobs = SimpleQueue()
            Thread(target=self._do_long, args=(jobs,), name="long texts").start()
            self._long = jobs
        self._deferred[job.job_id] = job, work
        self._send(Deferred(job.job_id))
        return None

    def _proceed(self, message: Proceed) -> None:
        job = self._deferred.pop(message.job_id)
        if message.is_wanted:
            assert self._long is not None
            self._long.put(job)

    def _do_long(self, jobs: _LongJobs) -> None:
        with contextlib.suppress(OSError):  # the daemon has closed the socket, so the process ends
            while True:
                self._answer(*jobs.get())

    def _send(self, message: Message) -> None:
        with self._lock:
            self._connection.sendall(encode(message))


def body_reader(address: str) -> Callable[[bytes], tuple[Any, bytes]]:
    """Returns the function at MODULE:NAME. It is imported only here, because workers that parse no bodies need not load the API's
    modules."""
    module, _, name = address.partition(":")
    reader: Callable[[bytes], tuple[Any, bytes]] = getattr(importlib.import_module(module), name)
    return reader
