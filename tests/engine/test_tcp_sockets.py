"""The TCP sockets of this process, whichever library has opened them."""

from __future__ import annotations

import os
import socket

import pytest

from engine.host.tcp_sockets import shut_down, tcp_sockets


def test_new_ones_are_shut_down_and_the_others_go_on() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pairs = []
        for _ in range(2):
            before = tcp_sockets()
            ours = socket.create_connection(listener.getsockname())
            pairs.append((ours, listener.accept()[0]))
        shut_down(before)
        (_, old), (_, new) = pairs
        assert new.recv(1) == b""
        old.setblocking(False)
        with pytest.raises(BlockingIOError):
            old.recv(1)
        for pair in pairs:
            for end in pair:
                end.close()


def test_a_number_that_is_another_files_meanwhile_leaves_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread closes the socket and opens a file between two calls."""
    dup, opened = os.dup, len(os.listdir("/proc/self/fd"))
    with socket.socket(), open(os.devnull) as file, monkeypatch.context() as patched:
        patched.setattr(os, "dup", lambda number: dup(file.fileno()))
        assert tcp_sockets() == frozenset()
    assert len(os.listdir("/proc/self/fd")) == opened
