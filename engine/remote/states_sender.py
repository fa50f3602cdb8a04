"""Sends the states (activations) of a pipeline's steps from memory of this host to the next stage on another host."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable

from engine.memory.stage_link import StageLink
from engine.remote.frames import States
from engine.remote.wire import Wire, WireClosed
from loader.threads import Thread

log = logging.getLogger("engine")


class StatesSender:
    """Sends the hidden states of each step, which the previous stage writes to this host's memory, to the next stage on another
    host, as frames and in a thread of its own.
    wire: the connection to the other host. placement_id: identifies the load of the model.
    link: the place in this host's memory where the previous stage leaves its states (the receiving end).
    token_bytes: bytes of the states for each token.
    broken: called by the thread if a device of the split model is lost while the thread waits for states; may raise WireClosed."""

    def __init__(self, wire: Wire, placement_id: int, link: StageLink, token_bytes: int, broken: Callable[[], None]) -> None:
        self._wire, self._placement_id, self._link, self._token_bytes = wire, placement_id, link, token_bytes
        self._broken = broken
        self._steps: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._thread = Thread(target=self._send, name="states")
        self._thread.start()

    def step(self, num_tokens: int) -> None:
        """Queues a step of num_tokens tokens for the thread, which sends the step's states once the previous stage has computed
        them."""
        self._steps.put(num_tokens)

    def close(self) -> None:
        """Ends the thread, and waits until the thread no longer reads the memory. The split model must have been marked as
        broken."""
        self._steps.put(None)
        self._thread.join()

    def _send(self) -> None:
        try:
            while (num_tokens := self._steps.get()) is not None:
                if (place := self._link.take()) is None:
                    self._broken()
                    return
                self._wire.send(States(self._placement_id, place[: num_tokens * self._token_bytes].data))
        except WireClosed:
            pass  # whoever receives from the connection notices, too
        except Exception:  # the other host would wait without limit for states that nobody sends
            log.exception("the states of a pipeline's steps cannot be sent")
            self._wire.shut()
