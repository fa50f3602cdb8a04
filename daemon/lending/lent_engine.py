"""Runs an engine for a daemon on another host, for as long as the connection to that daemon's proxy lives."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from daemon.engines.engine_process import Spawned, describe, make_journal, variables_of
from daemon.lending.regions import LentRegions
from engine.loop.pulse import read_pulse
from engine.memory.group_region import GroupRegion
from engine.memory.stage_link import StageLink
from engine.protocol import (
    Configure,
    Evicted,
    EvictModel,
    FrameReader,
    FromEngine,
    LoadFailed,
    LoadModel,
    Message,
    ToEngine,
    encode,
    read_journal,
)
from engine.remote.frames import BEAT_EVERY_S, Beat, BeginShare, EngineEnded, GroupGone, Lines, Refused, States, Step, Told
from engine.remote.states_sender import StatesSender
from engine.remote.wire import Wire, WireClosed
from loader.models.catalog import scan_one
from loader.threads import Thread

END_LIMIT_S = 3.0  # how long an engine whose daemon is gone may take to end
RECV_BYTES = 1 << 18


@dataclass(slots=True, frozen=True)
class LentDevice:
    """A device that is lent. name: the device's name, such as cpu:0. budget_bytes: how much of its memory may be used. uuid: the
    GPU's UUID, "" for a cpu device. threads: the number of threads for computing (protocol.Configure)."""

    name: str
    budget_bytes: int
    uuid: str
    threads: int


@dataclass(slots=True)
class _Share:
    """A share of a split model that the engine holds. received: where the hidden states from the previous pipeline stage are
    written, if that stage is on another host; else None. sender: sends the engine's hidden states to the next stage, if that is on
    another host; else None. token_bytes: bytes of the states for each token."""

    region: GroupRegion
    received: StageLink | None
    sender: StatesSender | None


class LentEngine:
    """One lent engine and its connection to the proxy, the process on the daemon's host that stands for the engine. device: the
    lent device. wire: the connection. leader: identifies the daemon. regions: for each split model its part of the memory that the
    engines of this host share. models_dir: the models folder of this host. cache_dir: the folder for compiled kernels and
    measurements. log: gets lines for operators."""

    def __init__(
        self,
        device: LentDevice,
        wire: Wire,
        leader: str,
        regions: LentRegions,
        models_dir: str,
        cache_dir: str,
        log: Callable[[str], None],
    ) -> None:
        self._device, self._wire, self._leader, self._regions = device, wire, leader, regions
        self._models_dir, self._cache_dir, self._log = Path(models_dir), cache_dir, log
        self._number = regions.memory.number(device.name)
        self._shares: dict[int, _Share] = {}  # by placement id
        self._from_daemon, self._from_engine = FrameReader(ToEngine), FrameReader(FromEngine)
        self._over = False

    def run(self) -> str:
        """Runs the engine until the connection or the engine ends; when this method returns, the engine has ended. Returns why, for
        the log. Raises OSError if the engine cannot be started."""
        self._channel, theirs = socket.socketpair()
        journal_fd, self._journal = make_journal(self._device.name)
        arguments, shared = self._regions.memory.arguments(self._device.name)
        command = ["--channel-fd", str(theirs.fileno()), "--journal-fd", str(journal_fd), *arguments]
        variables = variables_of(self._device.threads, self._device.uuid)
        try:
            self._process = Spawned(command, [theirs.fileno(), journal_fd, *shared], variables)
        except BaseException:
            self._channel.close()
            raise
        finally:
            theirs.close()
            os.close(journal_fd)
        threads = []
        try:
            for work, name in ((self._tell, "engine"), (self._pass_lines, "lines"), (self._watch, "end")):
                thread = Thread(target=work, name=name)
                thread.start()
                threads.append(thread)
            return self._serve()
        finally:
            self._over = True
            self._end_process()
            for placement_id in list(self._shares):
                self._leave(placement_id)
            for thread in threads:
                thread.join(END_LIMIT_S)  # a process that the engine has started may still hold its standard error
            self._channel.close()
            self._process.close()
            self._journal.close()

    # ---- from the proxy

    def _serve(self) -> str:
        """Receives messages (frames) from the proxy on the daemon's host and carries them out until the connection ends. Returns
        why it ended."""
        try:
            while True:
                self._take(self._wire.receive())
        except WireClosed as error:
            return str(error)
        except OSError as error:  # the engine has closed its end of the channel
            return f"the engine is gone: {error.strerror}"
        except (ValueError, msgspec.MsgspecError) as error:
            with contextlib.suppress(WireClosed):
                self._wire.send(Refused(f"what the daemon sent could not be used: {error}"))
            return f"what the daemon sent could not be used: {error}"

    def _take(self, frame: Any) -> None:
        match frame:
            case Step():
                num_tokens = self._regions.post(self._leader, frame, self._number)
                share = self._shares.get(frame.placement_id)
                if share is not None and share.sender is not None:
                    share.sender.step(num_tokens)
            case States():
                share = self._shares.get(frame.placement_id)
                if share is not None and share.received is not None:
                    share.received.place[: len(frame.data)] = frame.data
                    share.received.send()
            case BeginShare():
                self._begin(frame)
            case Told():
                for message in self._from_daemon.feed(frame.data):
                    self._pass_on(message)
            case _:
                raise ValueError(f"a frame {type(frame).__name__} is not expected once a device is lent")

    def _pass_on(self, message: Any) -> None:
        if isinstance(message, EvictModel):  # the daemon has ended the group; an engine here may still wait in a step of it
            self._regions.break_group(self._leader, message.placement_id)
        elif isinstance(message, Configure):
            asked_bytes = message.num_chunks * message.chunk_bytes
            if asked_bytes > self._device.budget_bytes:
                asked, lent = (f"{num_bytes / 2**30:.2f} GiB" for num_bytes in (asked_bytes, self._device.budget_bytes))
                raise ValueError(f"{self._device.name} is lent with {lent}, and the daemon's budget for it is {asked}")
            message = msgspec.structs.replace(
                message, device=self._device.name, threads=self._device.threads, cache_dir=self._cache_dir, host_tier_slots=0
            )
        self._channel.sendall(encode(message))

    def _begin(self, frame: BeginShare) -> None:
        """Tells the engine to load its share of a split model (the part on its device), with this host's model folder and this
        host's region (the part of the engines' shared memory for the model) in place of those on the daemon's host. If that is
        impossible, reports LoadFailed to the proxy. Raises ValueError if the frame contains no load of a share."""
        (message,) = FrameReader(ToEngine).feed(frame.message)
        if not isinstance(message, LoadModel) or message.group is None:
            raise ValueError(f"{type(message).__name__} loads no share of a split model")
        try:
            folder, fingerprint = self._files(frame.folder, message.group.files_id)
            group, region = self._regions.hold(self._leader, message, self._number, frame.block_tokens)
        except (ValueError, OSError) as error:
            failed = LoadFailed(message.placement_id, message.model, str(error), permanent=False)
            self._wire.send(Told(encode(failed)))
            return
        placement_id = message.placement_id
        sender = None
        if frame.sends:
            broken = GroupGone(placement_id)
            sender = StatesSender(
                self._wire, placement_id, region.new_link(region.stage + 1), frame.token_bytes, lambda: self._wire.send(broken)
            )
        received = region.new_link(region.stage - 1) if frame.receives else None
        self._shares[placement_id] = _Share(region, received, sender)
        self._channel.sendall(encode(msgspec.structs.replace(message, path=str(folder), fingerprint=fingerprint, group=group)))

    def _files(self, relative: str, files_id: str) -> tuple[Path, str]:
        """Returns the folder of a model on this host, and the fingerprint that its files have here. relative: the folder's path
        below the models folder. files_id: identifies the files on the daemon's host. Raises ValueError or OSError if the folder on
        this host does not hold the same files."""
        folder = (self._models_dir / relative).resolve()
        if not folder.is_relative_to(self._models_dir.resolve()):
            raise ValueError(f"{relative} is not in the models folder {self._models_dir}")
        try:
            checkpoint = scan_one(folder)
        except OSError as error:
            raise ValueError(f"{folder}: {error.strerror}") from None
        if not checkpoint.complete:
            raise ValueError(f"{folder}: {checkpoint.fault}")
        if checkpoint.files_id != files_id:
            raise ValueError(f"{folder} holds other files than the daemon's host has under this name")
        return folder, checkpoint.fingerprint

    def _leave(self, placement_id: int) -> None:
        """Ends the engine's use of a split model's region (the part of the engines' shared memory for that model), because the
        engine does not hold its share (the part of the model on its device) any more. placement_id: identifies the load of that
        share."""
        share = self._shares.pop(placement_id, None)
        if share is None:
            return
        share.region.leave()
        if share.sender is not None:
            share.sender.close()
        self._regions.leave(self._leader, placement_id, self._number)

    # ---- from the engine

    def _tell(self) -> None:
        """Passes the engine's messages on to the proxy on the daemon's host, until the engine closes its end of the channel."""
        with contextlib.suppress(WireClosed, OSError):
            while data := self._channel.recv(RECV_BYTES):
                messages: Sequence[Message] = list(self._from_engine.feed(data))
                for message in messages:
                    if isinstance(message, LoadFailed | Evicted):
                        self._leave(message.placement_id)
                self._wire.send(Told(b"".join(map(encode, messages))))

    def _pass_lines(self) -> None:
        """Passes the engine's standard error on to the proxy until its end, and closes it here, because only this thread knows when
        it reads no more."""
        with self._process.stderr as lines, contextlib.suppress(WireClosed, OSError):
            while data := os.read(lines.fileno(), RECV_BYTES):
                self._wire.send(Lines(data))

    def _watch(self) -> None:
        """Reports the engine's signs of life to the proxy on the daemon's host, and finally that the engine has ended."""
        poller = select.poll()
        poller.register(self._process.pidfd, select.POLLIN)
        with contextlib.suppress(WireClosed):
            while not poller.poll(BEAT_EVERY_S * 1e3):
                self._wire.send(self._beat())
        code = self._process.wait()
        if not self._over:
            self._log(f"{self._device.name}: the engine {describe(code)}")
            with contextlib.suppress(WireClosed):
                self._wire.send(EngineEnded(describe(code), list(read_journal(self._journal))))
        self._wire.shut()

    def _beat(self) -> Beat:
        pulse, now = read_pulse(self._journal), time.monotonic()
        first_age_s = now - pulse.first_since_s if pulse.first_since_s else -1.0
        return Beat(now - pulse.at_s if pulse.at_s else -1.0, pulse.expected_s, first_age_s, pulse.doing)

    def _end_process(self) -> None:
        """Ends the engine process: closes the channel, which makes the process end, and kills it if it takes too long. Returns when
        it has ended, because it holds the device's memory until then."""
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)
        poller = select.poll()
        poller.register(self._process.pidfd, select.POLLIN)
        if not poller.poll(END_LIMIT_S * 1e3):
            self._process.kill()
            poller.poll()
