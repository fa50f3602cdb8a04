"""LoRA adapters that operators load by folder and name, at /v1/load_lora_adapter or with `hearth load NAME --adapter DIR`."""

from __future__ import annotations

from collections.abc import Callable

from daemon.contracts import LoadedAdapter
from daemon.models.adapters import AdapterRecord
from daemon.models.registry import Registry
from daemon.record.event_ring import EventRing
from daemon.record.state_keeper import StateKeeper
from daemon.requests.dispatcher import Dispatcher
from engine.protocol import AdapterSource, BringAdapter, Message, RetireAdapter
from scheduler.node import residency
from scheduler.node.node_scheduler import NodeScheduler


class LoadedAdapters:
    """Loads and unloads LoRA adapters by an operator's order; implements AdapterPort for the API and the control socket. changed:
    called after each load or unload, so that all folders are scanned and watched anew; set by the lifecycle."""

    def __init__(
        self, registry: Registry, scheduler: NodeScheduler, dispatcher: Dispatcher, keeper: StateKeeper, ring: EventRing
    ) -> None:
        """keeper: saves the node's state, in which the registry records the loaded adapters."""
        self._registry, self._scheduler, self._dispatcher = registry, scheduler, dispatcher
        self._keeper, self._ring = keeper, ring
        self.changed: Callable[[], None] = lambda: None

    async def load(self, name: str, path: str, in_place: bool) -> LoadedAdapter:
        before = self._registry.adapters.get(name)
        record = await self._registry.load_adapter(name, path, in_place)
        if before is not None and _identity(before) != _identity(record):
            self._tell_engine(before, RetireAdapter)
        self._tell_engine(record, BringAdapter)
        self._ring.add("adapter_added", model=record.base, adapter=name, path=path)
        self.changed()
        return LoadedAdapter(name, record.base, await self._keeper.save(f"load {name}"))

    async def unload(self, name: str) -> LoadedAdapter:
        record = await self._registry.unload_adapter(name)
        base = "" if record is None else record.base
        if record is not None:
            self._tell_engine(record, RetireAdapter)
        self._ring.add("adapter_removed", model=base, adapter=name)
        self.changed()
        return LoadedAdapter(name, base, await self._keeper.save(f"unload {name}"))

    def _tell_engine(self, record: AdapterRecord, message: Callable[[str, AdapterSource], Message]) -> None:
        """Sends a message about the adapter to each engine that has the adapter's base model in memory. message: makes the message
        for a model and an adapter, such as BringAdapter."""
        if (served := record.served) is None:
            return
        for replica in self._registry.replicas(record.base):
            view = self._scheduler.model(replica)
            if view is not None and view.state in residency.RUNNING and (engine := self._dispatcher.engines.get(view.device)):
                engine.send(message(replica, AdapterSource(served.name, served.path, served.fingerprint)))


def _identity(record: AdapterRecord) -> tuple[str, str]:
    """Returns what identifies an adapter in an engine's memory: the name of its base model and the fingerprint of its files ("" if
    it cannot be served)."""
    return record.base, record.served.fingerprint if record.served is not None else ""
