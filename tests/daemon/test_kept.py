"""What outlives the daemon: accounts that are whole wherever their writer was killed, the FD store, memory and its content."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from daemon.engines.host_account import HostAccount
from daemon.engines.host_memory import HostMemory
from daemon.engines.kept_device import KeptDevice
from daemon.engines.left_memory import LeftMemory
from daemon.process import account as account_module
from daemon.process import passed_descriptors
from daemon.process.account import Account
from daemon.process.fd_store import MOST_QUICK_STARTS, QUICK_S, FdStore
from daemon.process.systemd_notify import Notifier
from engine import protocol
from engine.memory import handles
from scheduler.node.host_tier import HostCopy, HostTierAccount, KeptWeights, SavedKV
from tests.daemon.service_manager import NotifySocket
from tests.daemon.test_left_memory import CHUNK_BYTES, CHUNKS, ask, engine, first_life, held, load_message


@pytest.fixture(autouse=True)
def descriptors() -> Iterator[None]:
    """Closes what a test has opened for daemons that "were killed": nobody else would in this process."""
    before = set(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    for fd in set(os.listdir("/proc/self/fd")) - before:
        with contextlib.suppress(OSError):  # that of the listing itself
            os.close(int(fd))


_starts_s = itertools.count(0.0, QUICK_S)


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def store_of(notify: NotifySocket, clock: Callable[[], float] | None = None) -> FdStore:
    """The store of the next daemon: what the service manager holds by now is passed as duplicates. clock: by default daemons start
    far apart."""
    notify.read()
    passed: dict[str, list[int]] = {}
    for name, fd in notify.stored:
        passed.setdefault(name, []).append(os.dup(fd))
    return FdStore(Notifier(dict(notify.environment)), passed, clock or (lambda: next(_starts_s)))


def names(notify: NotifySocket) -> set[str]:
    notify.read()
    return {name.removeprefix("kept-") for name, _ in notify.stored}


# ---- accounts


def test_an_account_holds_what_was_written_last() -> None:
    account = Account.make("t")
    assert account.read() == b""
    for text in (b"a", b"longer" * 1000, b"", b"b" * 10, b"c" * 5000):
        account.write(text)
        assert account.read() == text
        assert Account(os.dup(account.fd)).read() == text
    assert os.fstat(account.fd).st_size < 3 * 6000 + 100


@pytest.mark.parametrize("old", [b"", b"before", b"x" * 3000])
@pytest.mark.parametrize("new", [b"after", b"y" * 7000, b""])
def test_a_writer_killed_anywhere_leaves_the_old_or_the_new(monkeypatch: pytest.MonkeyPatch, old: bytes, new: bytes) -> None:
    """Each write is cut at every position in turn, as far as it matters."""
    write = account_module.write_at
    total = len(new) + 32
    for at in {*range(0, min(total, 40)), *range(max(0, len(new) - 3), total + 1)}:
        account = Account.make("t")
        account.write(b"first")
        account.write(old)
        left = [at]

        def cut(fd: int, data: bytes, offset: int, left: list[int] = left) -> None:
            part = data[: left[0]]
            write(fd, part, offset)
            left[0] -= len(part)
            if len(part) < len(data):
                raise KeyboardInterrupt

        monkeypatch.setattr(account_module, "write_at", cut)
        try:
            account.write(new)
            expected = [new]
        except KeyboardInterrupt:
            expected = [old]
        monkeypatch.setattr(account_module, "write_at", write)
        assert Account(os.dup(account.fd)).read() in expected
        account.close()


@pytest.mark.parametrize("garbage", [b"\xff" * 200, os.urandom(300), b"\0" * 500, b"x"])
def test_garbage_is_an_empty_account(garbage: bytes) -> None:
    fd = os.memfd_create("t")
    os.write(fd, garbage)
    account = Account(fd)
    assert account.read() == b""
    account.write(b"new")
    assert Account(os.dup(fd)).read() == b"new"


# ---- the store


def test_without_a_service_manager_nothing_is_kept() -> None:
    read, write = os.pipe()
    store = FdStore(Notifier({}), {"kept-host-tier": [read], "http": [write]})
    assert not store.usable
    assert store.take("host-tier") is None
    store.put("x", write)
    store.stopped_in_order()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(read)
    os.close(write)  # a listener is not the store's
    memory = HostMemory(4, 4096, store)
    assert memory.account is None
    memory.close()


def test_a_name_holds_one_descriptor(notify: NotifySocket) -> None:
    store = store_of(notify)
    for text in (b"one", b"two"):
        fd = os.memfd_create("t")
        os.write(fd, text)
        store.put("thing", fd)
        os.close(fd)
    assert names(notify) == {"starts", "thing"}
    again = store_of(notify)
    fd = again.take("thing")
    assert fd is not None
    assert os.pread(fd, 9, 0) == b"two"
    assert again.take("thing") is None
    again.remove("thing")
    assert names(notify) == {"starts"}
    os.close(fd)


def test_what_nobody_takes_is_dropped(notify: NotifySocket, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    store = store_of(notify)
    store.put("of-another-version", notify._socket.fileno())
    store_of(notify).drop_rest()
    assert names(notify) == {"starts"}
    assert "of-another-version, kept by the previous hearthd, is not used by this one" in caplog.text


def test_two_of_a_name_and_nameless_ones_are_dropped(notify: NotifySocket) -> None:
    store_of(notify).put("thing", notify._socket.fileno())
    notify.read()
    notify.stored += [("kept-thing", os.dup(0)), ("stored", os.dup(0))]
    store = store_of(notify)
    assert store.take("thing") is None
    assert "thing" not in names(notify)


def test_quick_starts_without_an_orderly_stop_between_them_give_all_up(notify: NotifySocket) -> None:
    clock = Clock()
    for _ in range(3 * MOST_QUICK_STARTS):  # stopped in order: never
        store = store_of(notify, clock)
        store.put("thing", notify._socket.fileno())
        store.stopped_in_order()
    for _ in range(3 * MOST_QUICK_STARTS):  # crashes, but slow ones: never
        clock.now_s += QUICK_S / (MOST_QUICK_STARTS - 1)
        assert store_of(notify, clock).take("thing") is not None
    clock.now_s += QUICK_S
    for _ in range(MOST_QUICK_STARTS):
        clock.now_s += 1
        assert store_of(notify, clock).take("thing") is not None
    assert store_of(notify, clock).take("thing") is None
    assert names(notify) == {"starts"}


def test_passed_descriptors_are_named_and_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passed_descriptors, "FIRST_FD", 900)
    read, write = os.pipe()
    for at, fd in enumerate((read, write)):
        os.dup2(fd, 900 + at, inheritable=True)
        os.close(fd)
    variables = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "2", "LISTEN_FDNAMES": "http", "HOME": "/"}
    assert passed_descriptors.take(variables) == {"http": [900], "unknown": [901]}
    assert variables == {"HOME": "/"}
    assert not os.get_inheritable(900)
    for fd in (900, 901):
        os.close(fd)
    assert passed_descriptors.take({"LISTEN_PID": "1", "LISTEN_FDS": "1"}) == {}


# ---- host memory


class Copies:
    """The scheduler's side: a host tier without a scheduler."""

    def __init__(self, num_slots: int = 8) -> None:
        self.tier = HostTierAccount(num_slots)

    @property
    def host_revision(self) -> int:
        return self.tier.revision

    def host_copies(self) -> list[tuple[str, HostCopy]]:
        return self.tier.valid_copies()


def test_host_memory_and_its_account_are_found_again(notify: NotifySocket) -> None:
    memory = HostMemory(8, 4096, store_of(notify))
    os.pwrite(memory.fd, b"weights", 4096)
    assert memory.account is not None
    copies = Copies()
    account = HostAccount(memory.account, 4096, copies, "layout of {}".format)
    assert account.found() == []
    weights = KeptWeights("print", (1, 2), 8000, checksums=(2**63 + 5,))
    kv = SavedKV("print", (4,), 4096, index=b"\x00index", num_tokens=33)
    assert copies.tier.found("a", weights)
    assert copies.tier.found("a", kv)
    assert copies.tier.found("gone", KeptWeights("print", (7,), 1, checksums=(1,)))
    account.look()
    memory.close()

    memory = HostMemory(8, 4096, store_of(notify))
    assert memory.account is not None
    assert os.pread(memory.fd, 7, 4096) == b"weights"
    layouts = {"a": "layout of a", "gone": "another"}
    found = HostAccount(memory.account, 4096, Copies(), lambda model: layouts.get(model, "")).found()
    assert found == [("a", weights), ("a", kv)]
    assert HostAccount(memory.account, 8192, Copies(), "layout of {}".format).found() == [], "slots of another size"
    memory.close()


def test_the_account_follows_each_change_and_nothing_else(notify: NotifySocket, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = HostMemory(8, 4096, store_of(notify))
    assert memory.account is not None
    copies = Copies()
    account = HostAccount(memory.account, 4096, copies, str)
    writes: list[int] = []
    write = memory.account.write

    def counted(data: bytes) -> None:
        writes.append(len(data))
        write(data)

    monkeypatch.setattr(memory.account, "write", counted)

    def seen() -> list[str]:
        account.look()
        account.look()
        return [model for model, _ in account.found()]

    assert seen() == []
    slots = copies.tier.grant(1, "a", 2)
    assert seen() == [], "granted slots are about to be written"
    copies.tier.end_grant(1, slots)
    copies.tier.hold("a", KeptWeights("print", slots, 8000, checksums=(1,)))
    assert seen() == ["a"]
    copies.tier.lend("a", 2)
    copies.tier.drop_weights("a")
    assert seen() == [], "given up, though a load still reads it"
    copies.tier.returned("a")
    assert seen() == []
    assert len(writes) <= 5, "at most once a change"


def test_memory_of_another_size_is_new(notify: NotifySocket) -> None:
    memory = HostMemory(8, 4096, store_of(notify))
    assert memory.account is not None
    memory.account.write(b"content")
    os.pwrite(memory.fd, b"weights", 0)
    memory.close()
    memory = HostMemory(4, 4096, store_of(notify))
    assert memory.account is not None
    assert memory.account.read() == b""
    assert os.pread(memory.fd, 7, 0) == bytes(7)
    memory.close()
    assert names(notify) == {"starts", "host-tier", "host-tier-account"}


def test_an_account_of_another_version_is_not_used(notify: NotifySocket) -> None:
    memory = HostMemory(8, 4096, store_of(notify))
    assert memory.account is not None
    for data in (b"\xc1", b"text", protocol._encoder.encode({"version": 99, "slot_bytes": 4096, "copies": []})):
        memory.account.write(data)
        assert HostAccount(memory.account, 4096, Copies(), str).found() == []
    memory.close()


# ---- device memory


def device(notify: NotifySocket, layout_of: Callable[[str], str] = str) -> LeftMemory:
    left = LeftMemory("cuda:0", False, KeptDevice(store_of(notify), "cuda:0", layout_of))
    left.take_up()
    return left


def offered(left: LeftMemory, **options: Any) -> tuple[list[str], list[bytes]]:
    """What the next engine is given: models, and the beginning of each descriptor's memory."""
    with engine(left) as sock:
        given = ask(sock, **options)
        found = [os.pread(fd, 7, 0) for fd in given.handles]
        if not given.handles:
            handles.send(sock, [], CHUNKS, CHUNK_BYTES)
        handles.close(given.handles)
    return [weights.model for weights in protocol.decode_held(given.note)], found


def test_device_memory_is_found_again_and_again(notify: NotifySocket) -> None:
    first_life(device(notify), held("a", 1, 3, 4), held("b", 2, 5))
    for _ in range(3):
        assert offered(device(notify)) == (["a", "b"], [b"weights"])
    left = device(notify)
    left.sent(protocol.EvictModel(1, "a", 0))
    assert offered(device(notify)) == (["b"], [b"weights"]), "noted before the engine hears of it"


def test_weights_that_are_laid_out_otherwise_now_are_not_offered(notify: NotifySocket) -> None:
    first_life(device(notify), held("a", 1, 3, 4), held("b", 2, 5))
    layouts = {"a": "a", "b": "another"}
    assert offered(device(notify, lambda model: layouts.get(model, ""))) == (["a"], [b"weights"])
    assert offered(device(notify, lambda model: "")) == ([], []), "nothing of use: the memory is given back"
    assert "device" not in " ".join(name for name in names(notify) if "account" not in name)


def test_memory_that_was_let_go_is_let_go_by_the_store_too(notify: NotifySocket) -> None:
    left = device(notify)
    first_life(left, held("a", 1, 3, 4))
    left.let_go("the device had a fault")
    assert all("account" in name for name in names(notify) if name.startswith("device"))
    assert offered(device(notify)) == ([], [])


def test_thousands_of_descriptors_take_one_place_in_the_store(notify: NotifySocket) -> None:
    left, num_chunks = device(notify), 1100
    with engine(left) as sock:
        assert ask(sock, num_chunks).handles == []
        fds = [os.memfd_create("chunk") for _ in range(num_chunks)]
        for at, fd in enumerate(fds):
            os.write(fd, b"%7d" % at)
        handles.send(sock, fds, num_chunks, CHUNK_BYTES)
        handles.close(fds)
        left.sent(load_message("path", "a", 1))
        left.told(held("a", 1, 3))
    notify.read()
    assert sum(name.startswith("kept-device") for name, _ in notify.stored) == 2
    again = device(notify)
    with engine(again) as sock:
        given = ask(sock, num_chunks)
        assert [int(os.pread(fd, 7, 0)) for fd in given.handles] == list(range(num_chunks))
        handles.close(given.handles)
    for one in (left, again):
        one.let_go("")
