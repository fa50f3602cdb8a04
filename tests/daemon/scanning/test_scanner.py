"""The scanning process: what it finds, and what happens when it hangs, dies or grows."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from daemon.scanning import scanner as scanner_module
from daemon.scanning.rescans import Rescans
from daemon.scanning.scanner import ModelScanner
from loader.models.catalog import Checkpoint, scan
from tests.loader.checkpoints import write_checkpoint

LIMIT_S = 0.3


@pytest_asyncio.fixture
async def scanner(request: pytest.FixtureRequest) -> AsyncIterator[ModelScanner]:
    made = ModelScanner(LIMIT_S if "parts_hang" in request.fixturenames else 60.0, look_again_s=0.0)
    yield made
    await made.close()


@pytest.fixture
def parts_hang(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """Scanning processes are those of `hanging`. Returns their pids, in the order of their starts. The limit of their silence
    begins when they hang: starting one takes seconds where others have the processors."""
    pids: list[int] = []
    hangs, watch = tmp_path_factory.mktemp("hangs"), scanner_module._Process._watch
    monkeypatch.setenv("HEARTHD_TEST_HANGS", str(hangs))

    async def watch_what_hangs(process: Any, limit_s: float) -> None:
        while not (hangs / str(process._process.pid)).exists():  # noqa: ASYNC110 (other processes set no event)
            await asyncio.sleep(0.02)
        await watch(process, limit_s)

    monkeypatch.setattr(scanner_module._Process, "_watch", watch_what_hangs)

    def popen(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        assert "daemon.scanning" in command
        process = subprocess.Popen(
            [word if word != "daemon.scanning" else "tests.daemon.scanning.hanging" for word in command], **options
        )
        pids.append(process.pid)
        return process

    class Instead:
        DEVNULL, Popen = subprocess.DEVNULL, staticmethod(popen)

    monkeypatch.setattr(scanner_module, "subprocess", Instead)
    return pids


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 (other processes set no event)
            await asyncio.sleep(0.02)


def reasons(found: dict[str, Checkpoint]) -> dict[str, str]:
    return {name: one.reason or one.error for name, one in found.items()}


async def test_it_finds_what_a_scan_finds(tmp_path: Path, scanner: ModelScanner) -> None:
    write_checkpoint(tmp_path / "org" / "a")
    write_checkpoint(tmp_path / "b")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "config.json").write_text("{}")
    found = await scanner.scan(str(tmp_path), {})
    direct = scan(tmp_path)
    assert list(found) == ["b", "c", "org/a"]
    assert found["b"] == direct["b"]
    assert found["org/a"] == direct["org/a"]
    assert reasons(found)["c"] == reasons(direct)["c"] != ""


async def test_what_has_not_changed_is_the_same_object(tmp_path: Path, scanner: ModelScanner) -> None:
    for name in ("a", "b"):
        write_checkpoint(tmp_path / name)
    before = await scanner.scan(str(tmp_path), {})
    os.utime(tmp_path / "b" / "model.safetensors", ns=(5, 5))
    after = await scanner.scan(str(tmp_path), before)
    assert after["a"] is before["a"]
    assert after["b"].fingerprint != before["b"].fingerprint


async def test_a_folder_that_hangs_does_not_hide_the_others(tmp_path: Path, scanner: ModelScanner, parts_hang: list[int]) -> None:
    for name in ("a", "hung", "z"):
        write_checkpoint(tmp_path / name)
    found = await scanner.scan(str(tmp_path), {})
    assert reasons(found) == {"a": "", "hung": f"does not answer: no sign of it for {LIMIT_S:g} s", "z": ""}
    assert found["a"].complete
    assert found["z"].complete
    assert scanner.look_again_in_s is not None


async def test_a_file_that_hangs_hides_no_model_and_keeps_its_signature(
    tmp_path: Path, scanner: ModelScanner, parts_hang: list[int]
) -> None:
    folders: list[str] = []
    scanner.looked_into = lambda found: folders.extend(found)
    write_checkpoint(tmp_path / "models" / "a")
    for name in ("far", "near"):
        (tmp_path / name).mkdir()
    far, near, none = (tmp_path / path for path in ("far/hung.jinja", "near/b.jinja", "near/none.jinja"))
    far.write_text("x")
    near.write_text("x")
    mended = tmp_path / "far" / "mended"
    mended.touch()
    asked = {"files": [str(far), str(near), str(none)]}
    found = await scanner.scan(str(tmp_path / "models"), {}, **asked)
    assert {str(far.parent), str(near.parent)} <= set(folders)
    before = {path: scanner.signature_of(str(path)) for path in (far, near, none)}
    assert len(set(before.values())) == 3
    mended.unlink()
    folders.clear()
    near.write_text("longer")
    write_checkpoint(tmp_path / "models" / "b")
    found = await scanner.scan(str(tmp_path / "models"), found, **asked)
    assert reasons(found) == {"a": "", "b": ""}
    assert scanner.signature_of(str(far)) == before[far]
    assert scanner.signature_of(str(near)) != before[near]
    assert str(near.parent) in folders
    assert str(far.parent) not in folders, "watching it would hang, too"
    far.write_text("longer")
    mended.touch()
    await until(lambda: not os.path.exists(f"/proc/{parts_hang[-2]}"))
    await scanner.scan(str(tmp_path / "models"), found, **asked)
    assert scanner.signature_of(str(far)) != before[far]


async def test_a_folder_that_answers_again_is_found(tmp_path: Path, scanner: ModelScanner, parts_hang: list[int]) -> None:
    write_checkpoint(tmp_path / "hung")
    found = await scanner.scan(str(tmp_path), {})
    assert not found["hung"].complete
    (tmp_path / "hung" / "mended").touch()
    assert (await scanner.scan(str(tmp_path), found))["hung"].complete
    assert scanner.look_again_in_s is None


async def test_what_was_known_of_a_hanging_folder_stays(tmp_path: Path, scanner: ModelScanner, parts_hang: list[int]) -> None:
    """Its models may be running, or be kept in memory."""
    for name in ("hung/x", "hung/y"):
        write_checkpoint(tmp_path / name)
    (tmp_path / "hung" / "mended").touch()
    before = await scanner.scan(str(tmp_path), {})
    assert list(before) == ["hung/x", "hung/y"]
    (tmp_path / "hung" / "mended").unlink()
    after = await scanner.scan(str(tmp_path), before)
    assert list(after) == ["hung/x", "hung/y"]
    assert after["hung/x"] is before["hung/x"]


async def test_a_folder_that_ends_the_process_is_told(tmp_path: Path, scanner: ModelScanner, parts_hang: list[int]) -> None:
    for name in ("a", "deadly", "z"):
        write_checkpoint(tmp_path / name)
    found = await scanner.scan(str(tmp_path), {})
    assert reasons(found) == {"a": "", "deadly": "cannot be read: the process that reads it ended by SIGKILL", "z": ""}


async def test_a_models_folder_that_hangs_is_an_error(tmp_path: Path, scanner: ModelScanner, parts_hang: list[int]) -> None:
    (tmp_path / "hung").mkdir()
    with pytest.raises(OSError, match="does not answer"):
        await scanner.scan(str(tmp_path / "hung"), {})


async def test_no_second_process_waits_for_a_models_folder_that_hangs(
    tmp_path: Path, scanner: ModelScanner, parts_hang: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that waits for a file system may not end although it was killed."""
    folder = tmp_path / "hung"
    folder.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(scanner_module._Process, "is_running", True)
        for _ in range(3):
            with pytest.raises(OSError, match="does not answer"):
                await scanner.scan(str(folder), {})
        assert len(parts_hang) == 1
        write_checkpoint(tmp_path / "other" / "a")
        assert (await scanner.scan(str(tmp_path / "other"), {}))["a"].complete
    (folder / "mended").touch()
    write_checkpoint(folder / "b")
    assert (await scanner.scan(str(folder), {}))["b"].complete


async def test_a_missing_models_folder_is_an_error(tmp_path: Path, scanner: ModelScanner) -> None:
    with pytest.raises(FileNotFoundError):
        await scanner.scan(str(tmp_path / "none"), {})


async def test_closing_does_not_wait_for_what_hangs(tmp_path: Path, parts_hang: list[int]) -> None:
    scanner = ModelScanner()
    (tmp_path / "hung").mkdir()
    under_way = asyncio.ensure_future(scanner.scan(str(tmp_path), {}))
    await until(lambda: bool(parts_hang))
    async with asyncio.timeout(8):
        await scanner.close()
        with pytest.raises(OSError, match=r"stopping|cannot be read"):
            await under_way
    with pytest.raises(ProcessLookupError):
        os.kill(parts_hang[0], 0)


async def test_a_stop_in_the_middle_of_a_scan_is_no_fault_of_the_folder(
    tmp_path: Path, parts_hang: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """Ends the looking for models without a word in the log on a folder that cannot be read."""
    scanner = ModelScanner()
    (tmp_path / "hung").mkdir()
    said: list[str] = []

    async def rescan() -> None:
        try:
            await scanner.scan(str(tmp_path), {})
        except OSError as error:
            said.append(str(error.strerror))
            raise

    rescans = Rescans(rescan, scanner)
    rescans.changed()
    looking = asyncio.ensure_future(rescans.run())
    await until(lambda: bool(parts_hang))
    async with asyncio.timeout(8):
        await scanner.close()
        await looking
    assert said == ["hearthd is stopping"]
    assert rescans.problems() == []
    assert "cannot be read" not in caplog.text


async def test_closing_ends_a_process_that_is_being_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_go_on, pids, spawn = threading.Event(), threading.Event(), list[int](), scanner_module._spawn

    def slow(fd: int) -> subprocess.Popen[bytes]:
        process = spawn(fd)
        pids.append(process.pid)
        begun.set()
        assert may_go_on.wait(30)
        return process

    monkeypatch.setattr(scanner_module, "_spawn", slow)
    scanner = ModelScanner()
    under_way = asyncio.ensure_future(scanner.scan(str(tmp_path), {}))
    await until(begun.is_set)
    await scanner.close()
    may_go_on.set()
    with pytest.raises(OSError, match="stopping"):
        await under_way
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


async def test_a_cancelled_start_closes_nothing_that_the_new_process_is_to_inherit(
    tmp_path: Path, scanner: ModelScanner, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_go_on, pids, spawn = threading.Event(), threading.Event(), list[int](), scanner_module._spawn
    sockets: list[str] = []

    def slow(fd: int) -> subprocess.Popen[bytes]:
        sockets.append(os.readlink(f"/proc/self/fd/{fd}"))
        begun.set()
        assert may_go_on.wait(30)
        sockets.append(os.readlink(f"/proc/self/fd/{fd}"))
        process = spawn(fd)
        pids.append(process.pid)
        return process

    with monkeypatch.context() as patched:
        patched.setattr(scanner_module, "_spawn", slow)
        under_way = asyncio.ensure_future(scanner.scan(str(tmp_path), {}))
        await until(begun.is_set)
        under_way.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        may_go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await under_way
    assert sockets[0] == sockets[1]
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)
    assert await scanner.scan(str(tmp_path), {}) == {}


async def test_the_answer_of_a_cancelled_scan_is_not_that_of_the_next(tmp_path: Path, scanner: ModelScanner) -> None:
    """A client that loads an adapter, and leaves, cancels the scan of it."""
    write_checkpoint(tmp_path / "models" / "a")
    await scanner.scan(str(tmp_path / "models"), {})
    (tmp_path / "empty").mkdir()
    under_way = asyncio.ensure_future(scanner.scan(str(tmp_path / "empty"), {}))
    process = scanner._process
    assert process is not None
    while process._answer is None:  # noqa: ASYNC110 (the next step of that task sends the request)
        await asyncio.sleep(0)
    under_way.cancel()
    with pytest.raises(asyncio.CancelledError):
        await under_way
    assert list(await scanner.scan(str(tmp_path / "models"), {})) == ["a"]


async def test_a_killed_process_is_replaced_and_leaves_no_zombie(
    tmp_path: Path, scanner: ModelScanner, parts_hang: list[int]
) -> None:
    write_checkpoint(tmp_path / "a")
    await scanner.scan(str(tmp_path), {})
    os.kill(parts_hang[0], signal.SIGKILL)
    await until(lambda: not Path(f"/proc/{parts_hang[0]}").exists())
    assert (await scanner.scan(str(tmp_path), {}))["a"].complete
    assert len(parts_hang) == 2


async def test_a_process_that_grew_gives_its_memory_back(tmp_path: Path, scanner: ModelScanner, parts_hang: list[int]) -> None:
    for name in ("a", "large"):
        write_checkpoint(tmp_path / name)
    found = await scanner.scan(str(tmp_path), {})
    assert reasons(found) == {"a": "", "large": ""}
    await until(lambda: not Path(f"/proc/{parts_hang[0]}").exists())
    assert (await scanner.scan(str(tmp_path), found))["a"] is found["a"]


async def test_rescans_look_again_at_what_did_not_answer(tmp_path: Path, scanner: ModelScanner, parts_hang: list[int]) -> None:
    """No event tells that a mount is back."""
    write_checkpoint(tmp_path / "hung")
    found: dict[str, Checkpoint] = {}

    async def rescan() -> None:
        found.update(await scanner.scan(str(tmp_path), dict(found)))

    await rescan()
    assert not found["hung"].complete
    task = asyncio.ensure_future(Rescans(rescan, scanner).run())
    (tmp_path / "hung" / "mended").touch()
    try:
        await until(lambda: found["hung"].complete)
    finally:
        task.cancel()
