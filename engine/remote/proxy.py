"""Takes the place, on the daemon's host, of an engine that runs on another host.

To the daemon and the other engines the proxy is an engine: it has an engine's channel, journal and doorbell, and a queue in the
memory that engines share to run split models. It passes messages on between the daemon and the engine. When a step of a split model
is in its queue, it sends to the other host the plan and those rows of the sequence table that the step reads. It also passes the
hidden states of pipelines on, in either direction."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import sys
import threading
import time
from pathlib import PurePath
from typing import Any, NoReturn

import numpy as np

from engine.exchange import Membership
from engine.loop.pulse import write_pulse
from engine.memory.group_region import GroupRegion, open_region
from engine.protocol import (
    Configure,
    EvictModel,
    FrameReader,
    FromEngine,
    Group,
    LoadFailed,
    LoadModel,
    encode,
    write_journal,
)
from engine.remote.frames import (
    BEAT_EVERY_S,
    MISSED_BEATS,
    Beat,
    BeginShare,
    EngineEnded,
    GroupGone,
    Lent,
    Lines,
    Refused,
    States,
    Step,
    Told,
)
from engine.remote.states_sender import StatesSender
from engine.remote.table_rows import TableReader
from engine.remote.wire import Wire, WireClosed
from engine.serve.channel import Channel, ChannelClosed
from loader.sizes.work_space import staged_tokens
from loader.threads import Thread
from scheduler.batch.plan import BatchPlan

log = logging.getLogger("engine")


class Ended(Exception):
    """Raised when the engine on the other host has ended or can no longer be reached; the text says why."""


class Proxy:
    """Passes messages, steps and states on between this host (the daemon, the other engines) and the engine on the other host.
    wire: the connection to the lender, which runs that engine.
    host: the other host's name, for messages.
    models_dir: the models folder.
    channel, journal: the connection to the daemon and the memory of the step journal, as an engine has them.
    membership: the proxy's access to the memory that this host's engines share to run split models."""

    def __init__(self, wire: Wire, host: str, models_dir: str, channel: Channel, journal: Any, membership: Membership) -> None:
        self._wire, self._host, self._models_dir = wire, host, PurePath(models_dir)
        self._channel, self._journal = channel, journal
        self._exchange, self._number, self._doorbell = membership.exchange, membership.number, membership.doorbell
        self._queue = self._exchange.queue(self._number)
        self._from_engine = FrameReader(FromEngine)
        self._configure: Configure | None = None
        self._shares: dict[int, _Share] = {}  # by placement id
        self._ended: Ended | None = None
        self._woken = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._telling = threading.Lock()

    def run(self) -> NoReturn:
        """Runs until the daemon has closed its end of the channel, which raises ChannelClosed, or until the engine can no longer be
        reached, which raises Ended."""
        os.set_blocking(self._doorbell, False)
        self._exchange.reset(self._number)
        Thread(target=self._receive, name="wire").start()
        poller = select.poll()
        for fd in (self._channel.fileno(), self._doorbell, self._woken):
            poller.register(fd, select.POLLIN)
        try:
            while True:
                poller.poll()
                if self._ended is not None:
                    raise self._ended
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._doorbell)
                self._run_queue()
                for message in self._channel.receive():
                    self._take(message)
        except WireClosed as error:
            raise self._ended or Ended(f"the connection to host {self._host} has ended: {error}") from None
        finally:
            self._wire.shut()
            for share in list(self._shares.values()):
                share.close()

    # ---- to the engine

    def _run_queue(self) -> None:
        """Takes the steps of split models out of this proxy's queue, in the memory that engines share, and sends them to the other
        host."""
        while (offset := self._queue.take()) is not None:
            share = next((one for one in list(self._shares.values()) if one.region.offset == offset), None)
            if share is None:
                log.error("engine %d is told of a step of a group that it has no share of", self._number)
                self._exchange.break_group(offset)
            else:
                self._wire.send(share.next_step())

    def _take(self, message: Any) -> None:
        """Handles a message from the daemon: does the proxy's own part of the work, then passes the message on to the lender. A
        load of a share of a split model is passed on as BeginShare."""
        match message:
            case Configure():
                self._configure = message
            case LoadModel(group=Group()):
                self._begin(message)
                return
            case EvictModel():
                self._close(message.placement_id)
        self._wire.send(Told(encode(message)))

    def _begin(self, message: LoadModel) -> None:
        """Prepares this host for a share of a split model that the other host's engine will hold, and asks the lender to load the
        share. If the preparation fails, the load is reported to the daemon as failed."""
        assert self._configure is not None
        assert message.group is not None
        folder = PurePath(message.path)
        if not folder.is_relative_to(self._models_dir):
            why = f"{folder} is not in the models folder {self._models_dir}, so host {self._host} cannot know it"
            self._tell(LoadFailed(message.placement_id, message.model, why, True))
            return
        try:
            region = open_region(self._exchange, message, self._configure.block_tokens)
        except (ValueError, OSError) as error:
            self._tell(LoadFailed(message.placement_id, message.model, str(error), False))
            return
        cap = staged_tokens(message.max_sequences, self._configure.max_num_batched_tokens)
        share = _Share(self._wire, message, region, self._configure.block_tokens, message.group.handed_bytes // cap)
        self._shares[message.placement_id] = share
        relative = str(folder.relative_to(self._models_dir))
        told, tokens = encode(message), self._configure.block_tokens
        self._wire.send(BeginShare(told, relative, tokens, share.token_bytes, share.sender is not None, share.receives))

    def _close(self, placement_id: int) -> None:
        """Ends the proxy's part in a split model, before another model may get the model's region (part of the engines' shared
        memory)."""
        if (share := self._shares.pop(placement_id, None)) is not None:
            share.close()

    # ---- from the engine

    def _receive(self) -> None:
        """Receives and handles what the lender sends, until the connection ends. Runs in a thread of its own."""
        try:
            while True:
                self._handle(self._wire.receive())
        except WireClosed as error:
            self._end(f"the connection to host {self._host} has ended: {error}")
        except ChannelClosed:
            pass  # the thread that waits for the daemon's messages notices, too
        except Exception as error:  # a bug here must not leave the daemon with an engine that says nothing
            log.exception("a frame of host %s was not understood", self._host)
            self._end(f"what host {self._host} sent could not be used: {error}")

    def _handle(self, frame: Any) -> None:
        match frame:
            case States():
                if (share := self._shares.get(frame.placement_id)) is not None:
                    share.take_states(frame.data)
            case Told():
                for message in self._from_engine.feed(frame.data):
                    if isinstance(message, LoadFailed):
                        self._close(message.placement_id)
                    self._tell(message)
            case Beat():
                now = time.monotonic()
                self._wire.limit_silence(MISSED_BEATS * BEAT_EVERY_S)
                if frame.age_s >= 0.0:
                    first_since_s = now - frame.first_age_s if frame.first_age_s >= 0.0 else 0.0
                    write_pulse(self._journal, now - frame.age_s, frame.expected_s, first_since_s, frame.doing)
            case Lines():
                sys.stderr.write(frame.data.decode(errors="replace"))
                sys.stderr.flush()
            case GroupGone():
                if (share := self._shares.get(frame.placement_id)) is not None:
                    self._exchange.break_group(share.region.offset)
            case EngineEnded():
                write_journal(self._journal, np.array(frame.running, np.int64))
                self._end(f"the engine on host {self._host} {frame.reason}")
            case Refused():
                self._end(f"host {self._host}: {frame.reason}")
            case Lent():
                pass

    def _tell(self, message: Any) -> None:
        """Sends a message to the daemon. Any thread may call it."""
        with self._telling:
            self._channel.send(message)
            while self._channel.backlog_bytes:
                self._channel.wait_for_room(1.0)
                self._channel.flush()

    def _end(self, reason: str) -> None:
        if self._ended is None:
            self._ended = Ended(reason)
            self._wire.shut()  # the thread that `run` runs in may be sending to a host that takes nothing
            os.eventfd_write(self._woken, 1)


class _Share:
    """A device's share of a split model, which the engine on the other host holds.
    token_bytes: bytes of the hidden states that a stage passes to the next, for each token.
    sender: sends the states of the previous stage to the engine's host; None: the previous stage is on the engine's host, too, or
    there is none.
    receives: whether the next stage is on another host than the engine, so that the engine's states come here as frames."""

    def __init__(self, wire: Wire, message: LoadModel, region: GroupRegion, block_tokens: int, token_bytes: int) -> None:
        assert message.group is not None
        group, rank = message.group, message.group.rank
        self.region, self.token_bytes = region, token_bytes
        self._placement_id, self._model, self._num_steps = message.placement_id, message.model, 0
        self._reader = TableReader(region.table, block_tokens)
        before, after = rank + region.stage_size, rank - region.stage_size
        self.receives = after >= 0 and group.hosts[after] != group.hosts[rank]
        self._sent = region.new_link() if self.receives else None
        self.sender: StatesSender | None = None
        if before < len(group.members) and group.hosts[before] != group.hosts[rank]:
            self.sender = StatesSender(wire, message.placement_id, region.new_link(), token_bytes, lambda: None)

    def next_step(self) -> Step:
        """Returns the frame of the next step of the split model that its rank 0 has posted. If the share has a `sender`, also asks
        it to send the states that the previous stage computes in this step."""
        plan = self.region.read_plan(self._model)
        if self.sender is not None:
            self.sender.step(int(plan.num_new.sum()))
        frame = step_frame(self._placement_id, self._num_steps, plan, self._reader)
        self._num_steps += 1
        return frame

    def take_states(self, data: memoryview) -> None:
        """Passes on to the next stage the states `data`, which the engine has computed."""
        if self._sent is not None and not self.region.is_broken:
            self._sent.place[: len(data)] = data
            self._sent.send()

    def close(self) -> None:
        """Ends the proxy's part in the split model, which marks the model as broken. Afterwards the proxy does not use the model's
        region (part of the engines' shared memory) any more."""
        self.region.leave()
        if self.sender is not None:
            self.sender.close()


def step_frame(placement_id: int, number: int, plan: BatchPlan, reader: TableReader) -> Step:
    """Returns the frame that sends a step of a split model to another host. placement_id: identifies the load of the model. number:
    the number of earlier steps of the model since that load. plan: the step's plan. reader: reads the plan's rows from the sequence
    table."""
    of_plan = (plan.slots.tobytes(), plan.num_computed.tobytes(), plan.num_new.tobytes(), plan.samples.tobytes())
    return Step(placement_id, number, plan.step_id, plan.all_decode, plan.drafted, *of_plan, *reader.read(plan))
