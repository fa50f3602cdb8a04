"""The scanning process: `python -P -m daemon.scanning FD`. It ends when FD is closed, and after a scan that has left it with much
memory in use (LARGE_BYTES)."""

from __future__ import annotations

import logging
import os
import resource
import signal
import socket
import sys
from dataclasses import replace
from itertools import chain

from daemon.process.file_signature import signature_text
from daemon.scanning.messages import Finished, Found, Looking, Same, Scan
from engine.host.child_process import limit_memory
from engine.protocol import FrameReader, Message, encode
from loader.models.catalog import Checkpoint, is_model_itself, named_adapters, walk

log = logging.getLogger("hearthd.models")
MEMORY_BYTES = 1 << 30  # of address space, enough for headers of 100 MB, which the format allows
LARGE_BYTES = 48 << 20  # resident; a process of this size ends after the scan, which returns its memory
OOM_SCORE_ADJ = 800  # if memory runs out, the kernel ends this process before the daemon and its engines


def main() -> None:
    # the daemon drains on SIGTERM and Ctrl-C; this process ends when its socket does
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    limit_memory(MEMORY_BYTES, OOM_SCORE_ADJ)
    connection = socket.socket(fileno=int(sys.argv[1]))
    reader = FrameReader(Scan)
    try:
        while data := connection.recv(1 << 20):
            for request in reader.feed(data):
                if _scan(connection, request):
                    return
    except (BrokenPipeError, ConnectionResetError):
        return


def _scan(connection: socket.socket, request: Scan) -> bool:
    """Does one scan of the models folder and sends the results over the connection. Returns whether this process is to end, because
    it uses more than LARGE_BYTES of memory."""
    previous = {
        name: Checkpoint(name, path, complete=True, signature=signature) for name, (path, signature) in request.known.items()
    }
    warnings = _Warnings()
    log.addHandler(warnings)

    def send(message: Message) -> None:
        connection.sendall(encode(message))

    error, is_model = None, False
    folders: list[str] = []
    signatures: dict[str, str] = {}
    try:
        how = previous, lambda path: send(Looking(_text(path))), request.silent, folders.append
        below = walk(request.models_dir, *how) if request.models_dir else ()
        for seen in chain(below, named_adapters(request.named, *how)):
            checkpoint, where = seen.checkpoint, (seen.in_cache, seen.is_named)
            if checkpoint is previous.get(checkpoint.name):
                send(Same(checkpoint.name, *where))
            else:
                try:
                    send(Found(_plain(checkpoint), *where))
                except (OverflowError, UnicodeEncodeError) as failure:  # a number or text that a message cannot hold
                    problem = _text(f"what its files say cannot be used: {failure}")
                    unusable = Checkpoint(checkpoint.name, checkpoint.path, error=problem, is_adapter=seen.is_named)
                    send(Found(unusable, *where))
        if request.models_dir:
            send(Looking(_text(request.models_dir)))
            is_model = is_model_itself(request.models_dir)
            if is_model:
                what = "is a model's folder itself; models are looked for below it, so name the folder that holds it"
                log.warning("%s %s", request.models_dir, what)
        for path in request.files:
            if path not in request.silent:
                send(Looking(_text(path)))
                signatures[path] = signature_text(path)
                folders.append(os.path.dirname(path))
    except OSError as failure:
        error = (failure.errno or 0, failure.strerror or str(failure))
    finally:
        log.removeHandler(warnings)
    is_last = _resident_bytes() > LARGE_BYTES
    send(Finished(error, warnings.lines, is_last, folders, signatures, is_model))
    return is_last


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


class _Warnings(logging.Handler):
    """A log handler that collects the warnings of a scan as lines for the daemon's log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(_text(record.getMessage()))


def _plain(checkpoint: Checkpoint) -> Checkpoint:
    """Returns a copy of the checkpoint that can be sent to the daemon: without its exception (`failure`), with texts that are valid
    UTF-8, and, if the checkpoint is incomplete, without its shape, which may be of any size."""
    return replace(
        checkpoint,
        failure=None,
        shape=checkpoint.shape if checkpoint.complete else None,
        reason=_text(checkpoint.reason),
        error=_text(checkpoint.error),
        packed_reason=_text(checkpoint.packed_reason),
    )


def _text(text: str) -> str:
    """Returns the text with escapes in place of file-name bytes that are not UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


if __name__ == "__main__":
    main()
