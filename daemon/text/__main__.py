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

from daemon.text.worker import Worker


def main() -> None:
    # the daemon drains on SIGTERM and Ctrl-C; its helpers follow when their sockets end
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the library's own switch: no thread pool in each worker
    control = socket.socket(fileno=int(sys.argv[1]))
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            return
        connection = socket.socket(fileno=descriptors[0])
        if os.fork() == 0:
            control.close()
            try:
                Worker(connection).run()
            except (BrokenPipeError, ConnectionResetError):
                pass
            except BaseException:
                sys.excepthook(*sys.exc_info())
                os._exit(1)
            os._exit(0)
        connection.close()


if __name__ == "__main__":
    main()
