"""Asks the driver for the machine's GPUs, from the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from config.devices import NoGpus
from daemon.gpu.inventory import Gpu, Inventory

ANSWER_LIMIT_S = 10.0


class GpuQuestion:
    """The question which GPUs the machine has. It is asked in a thread, and by one caller at a time: the others get the same
    answer. A driver may never answer while a GPU has a fault, and each question would keep a thread that other work needs.
    inventory: answers it."""

    def __init__(self, inventory: Inventory) -> None:
        self._inventory = inventory
        self._asked: asyncio.Future[Sequence[Gpu]] | None = None

    async def ask(self) -> Sequence[Gpu]:
        """Returns all GPUs of the machine. Raises NoGpus if there is no driver, or if it does not answer within
        ANSWER_LIMIT_S."""
        if self._asked is None or self._asked.done():
            self._asked = asyncio.ensure_future(asyncio.to_thread(self._inventory.gpus))
        try:
            async with asyncio.timeout(ANSWER_LIMIT_S):
                return await asyncio.shield(self._asked)
        except TimeoutError:
            raise NoGpus(f"the driver does not answer within {ANSWER_LIMIT_S:g} s") from None
