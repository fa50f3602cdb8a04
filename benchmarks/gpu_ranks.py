"""Processes that are the ranks of a group, for the part `split` of `make gpu`. Each sees one GPU alone, as an engine does, and
calls what it is told. They share the memory in which the ranks of a group meet, and through which stages of a pipeline pass on
states.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_limits import give_back
from engine.contracts.ranks import GroupBroken
from engine.cuda.collectives import Connects
from engine.cuda.nccl import nccl
from engine.cuda.peers import Peers
from engine.cuda.ranks import DeviceRanks, connect
from engine.cuda.share import ShareLinks
from engine.cuda.stages import DeviceStages
from engine.host.rendezvous import Rendezvous, rendezvous_words
from engine.host.stage_memory import stage_memory_bytes
from engine.memory.stage_link import StageLink
from loader.shapes.model_shape import ModelShape
from loader.sizes.work_space import MOST_STAGED_TOKENS, handed_bytes

NCCL, HOST = "NCCL", "host"  # ways through which ranks exchange; HOST: gloo, and copies of the tensors in the host's memory
ANSWER_LIMIT_S = 120.0
KILL_LIMIT_S = 5.0
STAGES_BYTES = 32 << 20  # for the states of the steps under way: of two stages of the 8B model 16 MiB
BEGUN = "begun"


class RanksFailed(Exception):
    """Raised if a rank raises, ends, or does not answer in time."""


class Rank:
    """The objects that a function in a rank's process gets. device: "cuda", or "cpu" where kernels are interpreted. through: NCCL
    or HOST. words: the memory that the ranks share, of which the first word is the flag of a broken group, and the second one tells
    how many steps of a pipeline rank 0 has ended. tell: sends a word to the process that started this one. kept: what earlier
    functions have left for later ones. to_end: what give_up calls."""

    def __init__(
        self,
        rank: int,
        size: int,
        device: str,
        through: str,
        words: Any = None,
        tell: Callable[[str], None] = lambda word: None,
    ) -> None:
        self.rank, self.size, self.device, self.through, self.tell = rank, size, device, through, tell
        self.words = np.zeros(num_words(size), np.int64) if words is None else words
        self.broken, self.kept, self.to_end = self.words[:1], dict[str, Any](), list[Callable[[], None]]()
        self.ended = self.words[1:2]

    @property
    def captures(self) -> bool:
        """Returns whether exchanges can be captured in a graph."""
        return self.device == "cuda" and self.through == NCCL

    @property
    def alone(self) -> Connects:
        """Returns what connects ranks whose sums do not go through memory that they map from each other."""
        if self.through == NCCL:
            return nccl()
        from benchmarks.gpu_host_exchange import ThroughHost

        return ThroughHost()

    @property
    def connects(self) -> Connects:
        """Returns what connects ranks as engines do: sums of small tensors go through memory that they map from each other."""
        if self.device == "cuda":
            from engine.cuda.peer_regions import DeviceRegions

            return Peers(self.alone, DeviceRegions)
        from tests.engine.shared_regions import SharedRegions

        return Peers(self.alone, SharedRegions, on_device=False)

    @property
    def meeting(self) -> Rendezvous:
        return Rendezvous(self.words[2 : -STAGES_BYTES // 8], self.rank, self.broken)

    def connected(self, maps: bool = True) -> DeviceRanks:
        """Returns the connection to the other ranks, which all connect. give_up closes it. maps: whether small sums go through
        memory that ranks map from each other, where they can."""
        ranks = connect(
            self.connects if maps else self.alone, self.meeting, self.rank, self.size, self.broken, torch.device(self.device)
        )
        self.to_end += [ranks.close, ranks.wait_closed]
        return ranks

    def linked(self, shape: ModelShape, dtype: str) -> ShareLinks:
        """Returns the connection of this rank, which is a stage of a pipeline, to the other stages. give_up closes it. shape: of
        this stage."""
        assert shape.split is not None
        of_split, handed = shape.split, handed_bytes(shape, dtype, MOST_STAGED_TOKENS)
        memory = self.words[-STAGES_BYTES // 8 :].view(np.uint8)[: stage_memory_bytes(1, self.size, handed)]
        taking, sending = (StageLink(memory, of_split.stage, self.size, handed, self.broken) for _ in range(2))
        stages = DeviceStages(taking, sending, shape.hidden_size, getattr(torch, dtype), torch.device(self.device))
        self.to_end += [stages.close, stages.wait_closed]
        return ShareLinks(None, stages, self.broken)

    def await_turn(self, step: int) -> None:
        """Waits until rank 0 may have posted this step of a pipeline: as many are under way as there are stages. Raises
        GroupBroken."""
        while self.rank and self.ended[0] <= step - self.size:
            if self.broken[0]:
                raise GroupBroken(f"rank {self.rank} of {self.size}: the group has lost a device")
            time.sleep(1e-5)

    def give_up(self) -> float:
        """Ends connections, and gives back memory. Called once no other rank is in an exchange any more. Returns the seconds until
        the connections had ended."""
        began_s = time.perf_counter()
        for end in self.to_end:
            end()
        seconds = time.perf_counter() - began_s
        self.to_end.clear()
        self.kept.clear()
        give_back(self.device)
        return seconds


def num_words(size: int) -> int:
    return 2 + rendezvous_words(size) + STAGES_BYTES // 8


class RankProcesses:
    """The ranks of a group. visible: for each rank the value of CUDA_VISIBLE_DEVICES. broken [1]: the flag of the group, which the
    daemon sets in a node."""

    def __init__(self, visible: Sequence[str], device: str, through: str) -> None:
        self.size, self._fd = len(visible), os.memfd_create("ranks")
        os.ftruncate(self._fd, 8 * num_words(self.size))
        self._words = np.frombuffer(mmap.mmap(self._fd, 0), np.int64)
        self.broken = self._words[:1]
        context, path = multiprocessing.get_context("spawn"), f"/proc/{os.getpid()}/fd/{self._fd}"
        self._pipes, self._processes = list[Connection](), list[Any]()
        before = os.environ.get("CUDA_VISIBLE_DEVICES")
        try:
            for rank, own in enumerate(visible):
                os.environ["CUDA_VISIBLE_DEVICES"] = own
                pipe, other = context.Pipe()
                arguments = (other, path, rank, self.size, device, through)
                self._processes.append(context.Process(target=_serve, args=arguments, daemon=True))
                self._processes[-1].start()
                other.close()
                self._pipes.append(pipe)
        finally:
            if before is None:
                del os.environ["CUDA_VISIBLE_DEVICES"]
            else:
                os.environ["CUDA_VISIBLE_DEVICES"] = before

    def start(self, function: Callable[..., Any], *arguments: Any, ranks: Sequence[int] | None = None) -> None:
        """Has ranks call function(Rank, *arguments) as a group that is new. Raises RanksFailed."""
        self._words[:] = 0
        for rank in range(self.size) if ranks is None else ranks:
            try:
                self._pipes[rank].send((function, arguments))
            except ConnectionError:
                raise RanksFailed(self._end_of(rank)) from None

    def results(self, ranks: Sequence[int] | None = None, limit_s: float = ANSWER_LIMIT_S) -> list[Any]:
        """Returns what the functions return. Raises RanksFailed as soon as one has failed, for which the others may wait."""
        end_s, found = time.monotonic() + limit_s, dict[int, Any]()
        wanted = [*(range(self.size) if ranks is None else ranks)]
        while len(found) < len(wanted):
            for rank in self._that_told([rank for rank in wanted if rank not in found], end_s):
                found[rank] = self._result(rank)
        return [found[rank] for rank in wanted]

    def run(self, function: Callable[..., Any], *arguments: Any, limit_s: float = ANSWER_LIMIT_S) -> list[Any]:
        self.start(function, *arguments)
        return self.results(limit_s=limit_s)

    def await_word(self, rank: int) -> None:
        """Waits until a rank has told BEGUN. Raises RanksFailed."""
        self._that_told([rank], time.monotonic() + ANSWER_LIMIT_S)
        if (told := self._received(rank)) != BEGUN:
            raise RanksFailed(f"rank {rank}: {told[1] or 'it ended before it began'}")

    def has_told(self, rank: int) -> bool:
        return self._pipes[rank].poll(0)

    def kill(self, rank: int) -> None:
        self._processes[rank].kill()
        self._processes[rank].join(KILL_LIMIT_S)

    def close(self) -> None:
        self.broken[0] = 1  # so that ranks that wait for others go on
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(KILL_LIMIT_S)
            process.kill()
            process.join(KILL_LIMIT_S)
        os.close(self._fd)

    def _that_told(self, ranks: Sequence[int], end_s: float) -> list[int]:
        """Waits until some of these ranks have told something or ended, and returns them. Raises RanksFailed after end_s."""
        ready = wait([self._pipes[rank] for rank in ranks], max(0.0, end_s - time.monotonic()))
        if not ready:
            raise RanksFailed(f"no answer from ranks {', '.join(map(str, ranks))}")
        return [rank for rank in ranks if self._pipes[rank] in ready]

    def _result(self, rank: int) -> Any:
        result, problem = self._received(rank)
        if problem:
            raise RanksFailed(f"rank {rank}: {problem}")
        return result

    def _received(self, rank: int) -> Any:
        try:
            return self._pipes[rank].recv()
        except (EOFError, ConnectionError):
            raise RanksFailed(self._end_of(rank)) from None

    def _end_of(self, rank: int) -> str:
        self._processes[rank].join(KILL_LIMIT_S)
        return f"rank {rank} ended with {self._processes[rank].exitcode}"


def visible_devices(count: int) -> list[str]:
    """Returns for each of the first `count` GPUs that this process sees the CUDA_VISIBLE_DEVICES with which a process sees it
    alone."""
    own = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(number) for number in range(count)] if own is None else own.split(",")[:count]


def _serve(pipe: Connection, path: str, rank: int, size: int, device: str, through: str) -> None:
    fd = os.open(path, os.O_RDWR)
    own = Rank(rank, size, device, through, np.frombuffer(mmap.mmap(fd, 0), np.int64), pipe.send)
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((function(own, *arguments), ""))
        except Exception:
            pipe.send((None, traceback.format_exc()))
