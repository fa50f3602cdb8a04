"""Engines that share models, as the daemon starts and tells them, for tests."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from engine.exchange import RegionSizes
from engine.protocol import Configure, Evicted, EvictModel, Group, LoadDone
from tests.engine.engine_process import EngineProcess, Node, load_message, submit_message

HANDED_BYTES = 16 << 10  # of the states of a step of a tiny model
LEASE = 16  # chunks, of 64; a model has 4 of weights and 4 of KV


class Engines:
    """Engines of one node, and the models that are split over them, as the daemon has them."""

    def __init__(
        self,
        number: int,
        configure: Configure,
        module: str = "engine",
        lent: Mapping[int, Sequence[str]] | None = None,
        **loads: Any,
    ) -> None:
        """module: what is run as an engine. lent: the engines on another host, and the arguments of their proxies. loads: what all
        LoadModels have."""
        self.node, self._module, self._lent = Node(number), module, lent or {}
        self._configure, self._loads = configure, {"lease_chunks": LEASE, **loads}
        self.all = [self._start(at) for at in range(number)]
        for engine in self.all:
            engine.__enter__()
        self.groups: dict[str, tuple[list[int], tuple[int, int]]] = {}
        self._placement_id = self.request_id = 0
        self._placements: dict[str, int] = {}  # the last one of each model

    def _start(self, number: int) -> EngineProcess:
        module = "engine.remote" if number in self._lent else self._module
        return EngineProcess(self._configure, node=self.node, number=number, module=module, arguments=self._lent.get(number, ()))

    def close(self) -> None:
        for engine in self.all:
            engine.__exit__(None, None, None)
        self.node.close()

    def replace(self, number: int) -> None:
        """Starts another engine in the place of one that has died."""
        self.all[number].__exit__(None, None, None)
        self.all[number] = self._start(number)
        self.all[number].__enter__()

    def begin(
        self,
        path: str,
        model: str,
        members: list[int],
        ranks: Sequence[int] = (),
        num_stages: int = 1,
        num_kv_groups: int = 1,
        handed_bytes: int = HANDED_BYTES,
        files_id: str = "",
        **changes: Any,
    ) -> None:
        """Sends the loads of a split model, or of some of its ranks, without waiting for them."""
        whole = load_message(path, model, **self._loads, **changes)
        of_model = (whole.max_sequences, whole.max_model_len, self._configure.block_tokens, num_kv_groups)
        sizes = RegionSizes(len(members), *of_model, num_stages, handed_bytes)
        self.groups[model] = members, self.node.region(sizes)
        self._placement_id += 1
        self._placements[model] = self._placement_id
        hosts = ["b" if member in self._lent else "" for member in members] if self._lent else []
        of_form = (1, num_stages, handed_bytes, num_kv_groups, hosts, files_id)
        for rank in ranks or range(len(members)):
            group = Group(rank, members, *self.groups[model][1], *of_form)
            self.all[members[rank]].send(load_message(path, model, self._placement_id, group=group, **self._loads, **changes))

    def load(self, path: str, model: str, members: list[int], **changes: Any) -> EngineProcess:
        """Loads a model that is split over these engines, and returns the one that leads it."""
        self.begin(path, model, members, **changes)
        for number in members:
            self.wait_loaded(number)
        return self.all[members[0]]

    def load_alone(self, path: str, model: str, number: int, **changes: Any) -> None:
        self._placement_id += 1
        self._placements[model] = self._placement_id
        self.all[number].send(load_message(path, model, self._placement_id, **self._loads, **changes))
        self.wait_loaded(number)

    def wait_loaded(self, number: int) -> None:
        engine, placement_id = self.all[number], self._placement_id
        engine.until(lambda: any(done.placement_id == placement_id for done in engine.of(LoadDone)))

    def evict(self, model: str, numbers: Sequence[int] | None = None, pause_s: float = 0.0, comes_back: bool = False) -> None:
        """Evicts a model from its engines in a given order, and waits until all have answered."""
        members, region = self.groups.pop(model)
        numbers = members if numbers is None else numbers
        counts = [len(self.evicted(number, model)) for number in numbers]
        for number in numbers:
            self.all[number].send(EvictModel(self._placements[model], model, LEASE, comes_back=comes_back))
            time.sleep(pause_s)
        for number, count in zip(numbers, counts, strict=True):
            self.all[number].until(lambda number=number, count=count: len(self.evicted(number, model)) > count)  # type: ignore[misc]
        self.node.give_back(region)

    def evict_alone(self, model: str, number: int) -> None:
        self.groups[model] = [number], self.node.region(RegionSizes(1, 1, 16, 16))
        self.evict(model)

    def evicted(self, number: int, model: str) -> list[Evicted]:
        return [each for each in self.all[number].of(Evicted) if each.model == model]

    def ask(self, number: int, model: str, num_tokens: int = 8, prompt: Sequence[int] = (5, 6, 7), **changes: Any) -> int:
        self.request_id += 1
        message = submit_message(self.request_id, model, prompt=list(prompt), max_tokens=num_tokens, **changes)
        self.all[number].send(message)
        return self.request_id

    def wait_tokens(self, number: int, request_id: int, num_tokens: int) -> None:
        engine = self.all[number]
        engine.until(lambda: len(engine.output().get(request_id, [])) >= num_tokens)
