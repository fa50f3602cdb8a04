"""The text helper process: `python -P -m daemon.text FD [MODULE…]`.

It loads the libraries for tokenizers and templates, and the modules named on its command line. Then it forks a worker for each
socket that is sent to it over FD, a packet socket. With one process per model, a 280 ms parse or a runaway template of one model
does not delay the others, and all the memory it took is returned when the process ends. The helper starts no thread, so it is safe
to fork. It ends when FD is closed, and kills its workers then.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
from dataclasses import dataclass, field
from typing import NoReturn

import msgspec

from daemon.text.helper_messages import PACKET_BYTES, Ended, Fork, Forked, FromHelper, ToHelper
from daemon.text.worker import TextWorker

LAST_WORDS_BYTES = 2000
_decoder: msgspec.msgpack.Decoder[ToHelper] = msgspec.msgpack.Decoder(ToHelper)


@dataclass(slots=True)
class _Child:
    """A worker process. number: the number that the daemon gave the worker in `Fork`. errors: the read end of the pipe for the
    worker's standard error. last_words: the last LAST_WORDS_BYTES bytes that were read from that pipe."""

    number: int
    errors: int
    last_words: bytearray = field(default_factory=bytearray)

    def read_errors(self) -> None:
        """Reads what the worker has written to its standard error and keeps the last LAST_WORDS_BYTES of it."""
        try:
            while data := os.read(self.errors, 1 << 16):
                self.last_words += data
                del self.last_words[:-LAST_WORDS_BYTES]
        except BlockingIOError:
            return


class _Helper:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._children: dict[int, _Child] = {}  # by process id
        self._poll = select.poll()  # epoll would be one more descriptor that workers inherit
        self._woken, self._wake = os.pipe()
        for descriptor in (self._woken, self._wake):
            os.set_blocking(descriptor, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)  # a signal without a handler writes nothing to the wakeup pipe
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        for descriptor in (control.fileno(), self._woken):
            self._poll.register(descriptor, select.POLLIN)

    def run(self) -> None:
        while True:
            for descriptor, event in self._poll.poll():
                if descriptor == self._control.fileno():
                    if not self._take():
                        self._end()
                        return
                elif descriptor == self._woken:
                    os.read(descriptor, 4096)
                else:
                    self._read_errors(descriptor, event)
            self._reap()

    def _take(self) -> bool:
        """Reads one packet from the daemon and does what it asks: forks a worker or kills one. Returns whether more packets may
        come; False means that the daemon has closed the socket."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self._control, PACKET_BYTES, 1)
        except ConnectionResetError:
            return False
        if not data:
            return False
        asked = _decoder.decode(data)
        if not isinstance(asked, Fork):
            for pid, child in self._children.items():
                if child.number == asked.number:  # it was not reaped yet, so no other process has its id
                    os.kill(pid, signal.SIGKILL)
        elif descriptors:
            self._fork(asked.number, socket.socket(fileno=descriptors[0]))
        else:
            self._tell(Forked(asked.number, 0, "the text helper has no open file left for it"))
        return True

    def _fork(self, number: int, connection: socket.socket) -> None:
        pipe: tuple[int, ...] = ()
        try:
            pipe = errors, to_errors = os.pipe()
            pid = os.fork()
        except OSError as error:
            for descriptor in pipe:
                os.close(descriptor)
            connection.close()
            self._tell(Forked(number, 0, error.strerror or str(error)))
            return
        if pid == 0:
            self._become_worker(connection, errors, to_errors)
        os.close(to_errors)
        connection.close()
        os.set_blocking(errors, False)
        self._children[pid] = _Child(number, errors)
        self._poll.register(errors, select.POLLIN)
        self._tell(Forked(number, pid))

    def _become_worker(self, connection: socket.socket, errors: int, to_errors: int) -> NoReturn:
        """Runs a TextWorker in the forked process, then exits; never returns into the helper's loop. connection: the worker's
        socket to the daemon. errors: the pipe's read end, which is the helper's. to_errors: its write end, which becomes the
        standard error."""
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._control.close()
            for descriptor in (self._woken, self._wake, errors, *(child.errors for child in self._children.values())):
                os.close(descriptor)
            os.set_blocking(to_errors, False)  # a worker must not block when nobody reads its standard error
            os.dup2(to_errors, 2)
            os.close(to_errors)
            TextWorker(connection).run()
        except (BrokenPipeError, ConnectionResetError):
            pass
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)

    def _read_errors(self, descriptor: int, event: int) -> None:
        for child in self._children.values():
            if child.errors == descriptor:
                child.read_errors()
        if event & ~select.POLLIN:
            self._poll.unregister(descriptor)  # poll reports the pipe's end again and again while it is registered

    def _reap(self) -> None:
        while self._children:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
            if pid == 0:
                return
            child = self._children.pop(pid)
            child.read_errors()
            with contextlib.suppress(KeyError):
                self._poll.unregister(child.errors)
            os.close(child.errors)
            words = child.last_words.decode("utf-8", "replace")
            self._tell(Ended(child.number, os.waitstatus_to_exitcode(status), usage.ru_maxrss << 10, words))

    def _tell(self, message: FromHelper) -> None:
        with contextlib.suppress(OSError):  # fails if the daemon has ended, which the next read of the socket shows
            self._control.send(msgspec.msgpack.encode(message))

    def _end(self) -> None:
        """Kills and reaps all workers, including those in the middle of a job."""
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)
        for pid in self._children:
            os.waitpid(pid, 0)


def main() -> None:
    # the daemon drains on SIGTERM and Ctrl-C; its helpers end when their sockets do
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the library's own switch, so that no worker starts a thread pool
    gc.disable()
    for module in sys.argv[2:]:
        importlib.import_module(module)
    gc.freeze()  # what was imported stays, and a collection in a worker would write to its pages, and so copy them
    gc.enable()
    _Helper(socket.socket(fileno=int(sys.argv[1]))).run()


if __name__ == "__main__":
    main()
