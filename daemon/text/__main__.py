"""The text helper: `python -P -m daemon.text FD`.

Holds the tokenizer and template libraries ready and forks a worker for each socket it is sent over FD. A process per model keeps a
280 ms parse or a runaway template of one model from everybody else, and gives all its memory back when it ends. This process
starts no thread, so forking it is safe. It ends with FD.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from typing import NoReturn

from daemon.text.worker import Worker


def main() -> None:
    # the daemon drains on SIGTERM and Ctrl-C; its helpers follow when their sockets end
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    workers: set[int] = set()
    signal.signal(signal.SIGCHLD, lambda number, frame: _reap(workers))
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the library's own switch: no thread pool in each worker
    control = socket.socket(fileno=int(sys.argv[1]))
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            break
        connection = socket.socket(fileno=descriptors[0])
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            control.close()
            _work(connection)
        workers.add(pid)
        connection.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for pid in workers:
        _kill(pid)


def _work(connection: socket.socket) -> NoReturn:
    """The forked worker's life. Never returns into the helper's loop."""
    try:
        Worker(connection).run()
    except (BrokenPipeError, ConnectionResetError):
        pass
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    os._exit(0)


def _reap(workers: set[int]) -> None:
    try:
        while pid := os.waitpid(-1, os.WNOHANG)[0]:
            workers.discard(pid)
    except ChildProcessError:
        return


def _kill(pid: int) -> None:
    """Ends a worker, also one in the middle of a job: the daemon is gone."""
    try:
        if os.waitpid(pid, os.WNOHANG)[0] == 0:  # not waited for, so the id is still its own
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    except ChildProcessError:
        return


if __name__ == "__main__":
    main()
