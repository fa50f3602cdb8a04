"""The grammar process of one model, `python -P -m engine.grammar --channel-fd N --masks-fd M`. It computes which tokens the
grammars of running requests allow next, and ends when its socketpair is closed.

This work has a process of its own for two reasons. Building a tokenizer's trie holds the interpreter lock for up to a second,
during which an engine could run no steps. And the memory is freed when the process ends, which it does when the model is evicted.
Within the process a second thread builds grammars. Building releases the interpreter lock, so the masks of running sequences do not
wait for it. Tenants take turns at it, because one grammar may take seconds.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import mmap
import os
import signal
import socket
import sys
import threading
import time
from itertools import islice

from engine.grammar.matchers import GrammarError, Matchers
from engine.grammar.messages import (
    Advance,
    Broken,
    Building,
    Draft,
    Ended,
    Forget,
    Open,
    Opened,
    Ready,
    Start,
    ToGrammar,
    row_bytes,
)
from engine.protocol import FrameReader, Message, encode
from loader.ready_threads import ReadyThreads
from scheduler.fair_queue import FairQueue

log = logging.getLogger("grammar")


class GrammarProcess:
    """Follows the grammars of one model's requests for the engine at the other end of `connection`. masks_fd: the memfd to which
    masks (the tokens that a request may sample next) are written."""

    def __init__(self, connection: socket.socket, masks_fd: int) -> None:
        self._connection, self._masks_fd = connection, masks_fd
        self._sending = threading.Lock()
        self._starting: dict[int, Start] = {}  # by key, requests whose matcher waits to be built or is being built
        self._turns = FairQueue()  # of those that wait; work is counted in seconds
        self._choosing = threading.Lock()  # for changes of _turns, and of _starting where they go together
        self._builder = ReadyThreads("build", 1)
        self._matchers: Matchers | None = None

    def run(self) -> None:
        reader = FrameReader(ToGrammar)
        while data := self._connection.recv(1 << 18):
            for message in reader.feed(data):
                match message:
                    case Open():
                        self._open(message)
                    case Start():
                        with self._choosing:
                            self._starting[message.key] = message
                            self._turns.add(message.key, 0.0, str(message.tenant), message.weight, message.priority)
                        self._builder.submit(self._start_next)
                    case Advance():
                        self._advance(message)
                    case Forget():
                        for key in message.keys:
                            with self._choosing:
                                self._starting.pop(key, None)
                                self._turns.withdraw(key)
                            self._loaded().forget(key)

    def _open(self, message: Open) -> None:
        rows_each = message.rows_each
        memory = mmap.mmap(self._masks_fd, message.num_rows * rows_each * row_bytes(message.vocab_size))
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        try:
            self._matchers = Matchers(
                message.folder, message.vocab_size, message.eos_token_ids, memoryview(memory), address, rows_each, message.text_id
            )
        except GrammarError as error:
            self._send(Opened(str(error)))
        else:
            self._send(Opened(""))

    def _start_next(self) -> None:
        """Builds the matcher of the request whose turn it is; does nothing if the requests that waited were forgotten."""
        with self._choosing:
            key = self._turns.first()
            if key is None:
                return
            self._turns.take(key)
            message, is_oldest = self._starting[key], key == next(iter(self._starting))
        if not is_oldest:
            self._send(Building(key))
        began_s = time.thread_time()
        self._start(message)
        with self._choosing:
            self._turns.charge(str(message.tenant), time.thread_time() - began_s, message.weight)

    def _start(self, message: Start) -> None:
        key = message.key
        try:
            matcher, ended = self._loaded().start(message.row, message.grammar, message.output, message.text_id)
        except GrammarError as error:
            self._starting.pop(key, None)
            self._send(Broken(key, str(error)))
        except BaseException as error:  # would be lost otherwise, because the future's result is never read
            log.exception("grammar fault")
            self._send(Broken(key, repr(error)))
        else:
            self._loaded().add(key, matcher)
            if self._starting.pop(key, None) is not None:
                self._send(Ended([key]) if ended else Ready([key], {}))
            else:
                self._loaded().forget(key)

    def _advance(self, message: Advance) -> None:
        ready: list[int] = []
        ended: list[int] = []
        drafts: dict[int, Draft] = {}
        matchers, tokens = self._loaded(), iter(message.tokens)
        for key, count in zip(message.keys, message.counts or [1] * len(message.keys), strict=True):
            new = list(islice(tokens, count))
            try:
                complete = matchers.advance(key, new)
            except GrammarError as error:
                self._send(Broken(key, str(error)))
                continue
            if complete:
                ended.append(key)
            elif complete is not None:
                ready.append(key)
                draft = matchers.draft(key, message.guesses.get(key, []))
                if draft is not None:
                    drafts[key] = draft
        if ready:
            self._send(Ready(ready, drafts))
        if ended:
            self._send(Ended(ended))

    def _loaded(self) -> Matchers:
        if self._matchers is None:
            raise RuntimeError("the first message must be Open")
        return self._matchers

    def _send(self, message: Message) -> None:
        with self._sending:
            self._connection.sendall(encode(message))


def main() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parser = argparse.ArgumentParser(prog="engine.grammar")
    parser.add_argument("--channel-fd", type=int, required=True, help="socketpair to the engine")
    parser.add_argument("--masks-fd", type=int, required=True, help="memfd for the masks")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="grammar[%(process)d] %(levelname)s %(message)s", stream=sys.stderr)
    try:
        GrammarProcess(socket.socket(fileno=options.channel_fd), options.masks_fd).run()
    except (BrokenPipeError, ConnectionResetError):
        pass
    except BaseException:
        log.exception("grammar fault")
        os._exit(70)
    os._exit(0)  # a normal exit would wait for a grammar that is still being built


if __name__ == "__main__":
    main()
