"""Probes engines, for `/readyz?probe=SECONDS`: asks engines for a token that is known beforehand, and measures how long their
answers take."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from engine import protocol

FRESH_S = 1.0  # an answer counts for this long, so that any number of clients costs an engine one probe a second


@dataclass(slots=True)
class _Probe:
    """One probe of one engine. asked_s: when it was sent, in monotonic seconds. answer: a future that gets the milliseconds until
    the engine's answer, or None if the engine has ended."""

    number: int
    asked_s: float
    answer: asyncio.Future[float | None]


class Probes:
    """The probes of a node's engines, on the event loop. An engine has at most one probe at a time: further requests for a probe
    get the answer to the one that was sent last, if it is unanswered or was sent at most FRESH_S seconds ago. send: passes a
    message to a device's engine."""

    def __init__(self, send: Callable[[str, protocol.Message], None]) -> None:
        self._send = send
        self._numbers = itertools.count(1)
        self._latest: dict[str, _Probe] = {}

    async def ask(self, devices: Iterable[str], limit_s: float) -> Mapping[str, float | None]:
        """Returns how many milliseconds each device's engine took to answer, by device; None for engines that have ended or have
        not answered within limit_s seconds."""
        probes = {device: self._probe(device) for device in devices}
        if probes:
            await asyncio.wait([probe.answer for probe in probes.values()], timeout=limit_s)
        return {device: probe.answer.result() if probe.answer.done() else None for device, probe in probes.items()}

    def answered(self, device: str, message: protocol.Probed) -> None:
        probe = self._latest.get(device)
        if probe is not None and probe.number == message.number and not probe.answer.done():
            probe.answer.set_result(round((time.monotonic() - probe.asked_s) * 1e3, 3))

    def engine_down(self, device: str) -> None:
        """Ends the waiting for the answer of an engine that has ended."""
        probe = self._latest.pop(device, None)
        if probe is not None and not probe.answer.done():
            probe.answer.set_result(None)

    def _probe(self, device: str) -> _Probe:
        now, latest = time.monotonic(), self._latest.get(device)
        if latest is not None and (not latest.answer.done() or now - latest.asked_s < FRESH_S):
            return latest
        probe = _Probe(next(self._numbers), now, asyncio.get_running_loop().create_future())
        self._latest[device] = probe
        self._send(device, protocol.Probe(probe.number))
        return probe
