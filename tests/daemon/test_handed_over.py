"""Connections in the FD store, and what a request draws from its nonce."""

from __future__ import annotations

import contextlib
import os
import socket

import pytest

from daemon.access.quotas import Quotas
from daemon.access.tenant import Limits, Tenant
from daemon.api.progress import Progress
from daemon.api.response_store import ResponseStore, StoredResponse
from daemon.http import handed_over
from daemon.http.handed_over import Listed
from daemon.process.account import Account
from daemon.process.fd_store import FdStore
from daemon.process.kept_records import KeptRecords
from daemon.process.moment import Moment
from daemon.process.queued_descriptors import queue_of
from daemon.process.systemd_notify import Notifier
from daemon.streams.so_far import ConnectionSoFar, RequestSoFar, SequenceSoFar
from tests.daemon.service_manager import NotifySocket


def store_of(notify: NotifySocket) -> FdStore:
    """Returns the store of a daemon that starts now."""
    notify.read()
    passed: dict[str, list[int]] = {}
    for name, fd in notify.stored:
        passed.setdefault(name, []).append(os.dup(fd))
    return FdStore(Notifier(dict(notify.environment)), passed)


def test_connections_come_back_once_with_what_is_known_of_them(notify: NotifySocket) -> None:
    request = RequestSoFar(b"n" * 16, 5, True, True, ("ash", "f"), [SequenceSoFar([1, 2], "", 3, [(-0.5, [7], [-0.5])])])
    listed = [Listed("main", ConnectionSoFar(b"GET", True, request)), Listed("admin", ConnectionSoFar(b"", False))]
    pairs = [socket.socketpair() for _ in listed]
    try:
        handed_over.keep(store_of(notify), [ours.fileno() for ours, _ in pairs], listed)
        left = handed_over.take(store_of(notify))
        assert [each for _, each in left] == listed
        for (sock, _), (_, theirs) in zip(left, pairs, strict=True):
            with sock:
                sock.send(b"x")
                assert theirs.recv(1) == b"x"
        assert handed_over.take(store_of(notify)) == []
    finally:
        for pair in pairs:
            for end in pair:
                end.close()


@pytest.mark.parametrize(
    "content", [b"", b"\xc1", handed_over._encoder.encode(handed_over.Content(99, []))], ids=["empty", "broken", "99"]
)
def test_what_cannot_be_read_is_closed(notify: NotifySocket, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, contextlib.closing(Account.make("account")) as account:
        account.write(content)
        with queue_of([account.fd, ours.fileno()]) as queue:
            store_of(notify).put(handed_over.NAME, queue.fileno())
        assert handed_over.take(store_of(notify)) == []
    assert "the connections of before the restart are lost" in caplog.text


def test_a_request_draws_the_same_again() -> None:
    first = Progress("a")
    so_far = first.so_far()
    assert so_far is not None
    again = Progress("a", so_far)
    assert [again.seed(0), again.seed(1), again.drawn("call/0/0")] == [first.seed(0), first.seed(1), first.drawn("call/0/0")]
    assert first.seed(0) != first.seed(1)
    assert first.seed(0) != Progress("a").seed(0)


def test_what_was_made_before_a_restart_is_not_charged_again() -> None:
    quotas, tenant, now = Quotas(), Tenant("ann", limits=Limits(tokens_per_day=100)), Moment(0.0, 86400.0)
    made = [0]
    charge = quotas.readmit(tenant, lambda: made[0], now)
    made[0] = 7
    quotas.end(charge, 0, now)
    assert quotas.used_today(now) == {"ann": 7}


def test_stored_responses_outlive_the_daemon_in_their_order(notify: NotifySocket) -> None:
    store = ResponseStore(1 << 20, KeptRecords.of(store_of(notify), "responses"))
    for public_id, previous in (("a", ""), ("b", "a"), ("x", ""), ("c", "b")):
        store.add(StoredResponse(public_id, "ann", previous, b"m", b"s", False))
    store.delete("ann", "x")
    again = ResponseStore(1 << 20, KeptRecords.of(store_of(notify), "responses"))
    assert again.num_bytes == store.num_bytes
    assert [each.public_id for each in again.conversation("ann", "c")] == ["a", "b", "c"]
    assert not again.knows("ann", "x")
    smaller = ResponseStore(store.num_bytes - 1, KeptRecords.of(store_of(notify), "responses"))
    assert [smaller.knows("ann", name) for name in "abc"] == [True, True, False]  # what follows others goes first
