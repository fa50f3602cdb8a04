"""What one version of hearthd leaves and another one reads: an upgrade, and going back from it."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest

from daemon.api import background
from daemon.api.response_store import ResponseStore
from daemon.engines.host_account import HostAccount
from daemon.engines.kept_device import KeptDevice
from daemon.http import handed_over
from daemon.http.handed_over import Listed
from daemon.process.account import Account
from daemon.process.formats import Format
from daemon.process.kept_records import KeptRecords
from daemon.process.queued_descriptors import queue_of
from daemon.streams.so_far import ConnectionSoFar, RequestSoFar, SequenceSoFar
from engine import protocol
from scheduler.node.host_tier import HostCopy, KeptWeights, SavedKV
from tests.daemon.service_manager import NotifySocket
from tests.daemon.test_handed_over import store_of

# Written by earlier code, and never to be changed: code that can no longer read them needs a version of its own, and a reader for
# these (daemon/process/formats.py).
CONNECTIONS_1 = (
    b"\x83\xa7version\x01\xabconnections\x92\x82\xa8listener\xa4main\xaaconnection\x83\xa8received\xc4\x03GET\xa7is_used\xc3\xa7request"
    b"\x87\xa5nonce\xc4\x10nnnnnnnnnnnnnnnn\xa7created\x05\xa7is_open\xc3\xaais_charged\xc3\xa5model\x92\xa3ash\xa1f\xa9sequences\x91"
    b"\x84\xa6output\x92\x01\x02\xa7outcome\xa0\xaanum_cached\x03\xa8logprobs\x91\x93\xcb\xbf\xe0\x00\x00\x00\x00\x00\x00\x91\x07\x91"
    b"\xcb\xbf\xe0\x00\x00\x00\x00\x00\x00\xa8began_ns\t\x82\xa8listener\xa5admin\xaaconnection\x83\xa8received\xc4\x00\xa7is_used\xc2"
    b"\xa7request\xc0\xa6stored\xc4\x06stored"
)
HOST_1 = (
    b"\x83\xa7version\x01\xaaslot_bytes\xcd\x10\x00\xa6copies\x92\x98\xa3ash\xa6layout\xa1f\x92\x03\x01\xcd\x1f@M\xc4\x00\x00\x98\xa3ash"
    b"\xa6layout\xa1f\x91\x02\xcd\x0f\xa0\x00\xc4\x05index\t"
)
DEVICE_1 = (
    b"\x83\xa7version\x01\xa6device\xa5cpu:0\xa7weights\x91\x82\xa6layout\xa6layout\xa4held\x99\xabWeightsHeld\x04\xa3ash\xa1f\xa7float32"
    b"\xa0\xcd\x1f@\x92\x05\x06M"
)

REQUEST = RequestSoFar(b"n" * 16, 5, True, True, ("ash", "f"), [SequenceSoFar([1, 2], "", 3, [(-0.5, [7], [-0.5])])], 9)
LISTED = [Listed("main", ConnectionSoFar(b"GET", True, REQUEST)), Listed("admin", ConnectionSoFar(b"", False))]
COPIES: list[tuple[str, HostCopy]] = [
    ("ash", KeptWeights("f", (3, 1), 8000, checksums=(77,))),
    ("ash", SavedKV("f", (2,), 4000, index=b"index", num_tokens=9)),
]
HELD = {"ash": protocol.WeightsHeld(4, "ash", "f", "float32", "", 8000, [5, 6], 77)}


class NoCopies:
    host_revision = 0

    def host_copies(self) -> list[tuple[str, HostCopy]]:
        return []


def connections(notify: NotifySocket, content: bytes) -> list[Listed]:
    pairs = [socket.socketpair() for _ in LISTED]
    with contextlib.ExitStack() as ends:
        for pair in pairs:
            for end in pair:
                ends.enter_context(end)
        with contextlib.closing(Account.make("account")) as account:
            account.write(content)
            with queue_of([account.fd, *(ours.fileno() for ours, _ in pairs)]) as queue:
                store_of(notify).put(handed_over.NAME, queue.fileno())
        found = handed_over.take(store_of(notify))
        for sock, _ in found:
            sock.close()
        return [listed for _, listed in found]


def host(notify: NotifySocket, content: bytes) -> list[tuple[str, HostCopy]]:
    with contextlib.closing(Account.make("host")) as account:
        account.write(content)
        return HostAccount(account, 4096, NoCopies(), lambda model: "layout").found()


def device(notify: NotifySocket, content: bytes) -> dict[str, protocol.WeightsHeld]:
    kept = KeptDevice(store_of(notify), "cpu:0", lambda model: "layout")
    kept._account.write(content)
    return kept.weights()


READERS: dict[str, tuple[Any, bytes, Any]] = {
    "connections": (connections, CONNECTIONS_1, LISTED),
    "host memory": (host, HOST_1, COPIES),
    "device memory": (device, DEVICE_1, HELD),
}


def changed(content: bytes, **fields: Any) -> bytes:
    return msgspec.msgpack.encode(msgspec.msgpack.decode(content) | fields)


@pytest.mark.parametrize("name", READERS)
def test_what_earlier_code_wrote_is_read(name: str, notify: NotifySocket) -> None:
    read, content, expected = READERS[name]
    assert read(notify, content) == expected


@pytest.mark.parametrize("name", READERS)
def test_what_later_code_writes_is_read_if_it_can_be(name: str, notify: NotifySocket) -> None:
    """After a downgrade. Its further fields are skipped."""
    read, content, expected = READERS[name]
    assert read(notify, changed(content, version=2, readable_from=1, further=[1])) == expected
    for fields in ({"version": 2, "readable_from": 2}, {"version": 2}, {"version": 0}):
        assert not read(notify, changed(content, **fields)), fields


def test_a_format_is_read_a_step_back_and_where_its_writer_says_so() -> None:
    code = Format(version=5, reads_from=4, readable_from=4)
    read = {(version, since) for version in range(3, 8) for since in (0, 4, 5, 6, 7) if code.reads(version, since)}
    assert read == {(version, since) for version in (4, 5) for since in (0, 4, 5, 6, 7)} | {(6, 4), (6, 5), (7, 4), (7, 5)}


BEGUN_1 = {
    "public_id": "resp_1", "tenant": "ann", "received": b"POST", "nonce": b"n", "created": 5, "model": ["ash", "f"], "shown": b"{}",
    "is_streamed": True, "max_tokens": 9,
}  # fmt: skip
STORED_1 = {
    "public_id": "resp_1", "tenant": "ann", "previous": "", "messages": b"m", "shown": b"s", "has_calls": True, "next_call": 2,
    "background": True, "events": b"e",
}  # fmt: skip


def test_records_of_responses_are_read_with_and_without_further_fields() -> None:
    for further in ({}, {"further": 1}):
        begun = background._decoder.decode(msgspec.msgpack.encode(BEGUN_1 | further))
        assert msgspec.to_builtins(begun, builtin_types=(bytes,)) == BEGUN_1 | {"model": ("ash", "f")}
        records = KeptRecords()
        records.add(msgspec.msgpack.encode(STORED_1 | further))
        stored = ResponseStore(1 << 20, records).get("ann", "resp_1")
        assert msgspec.to_builtins(stored, builtin_types=(bytes,)) == STORED_1 | {"input": b""}


def test_records_of_another_form_are_given_up(tmp_path: Path) -> None:
    fd = os.memfd_create("records")
    os.pwrite(fd, b"another form" * 1000, 0)
    records = KeptRecords(fd)
    assert list(records) == []
    assert os.fstat(fd).st_size < 4096
    place = records.add(b"content")
    assert KeptRecords(os.dup(fd)).read(place) == b"content"
