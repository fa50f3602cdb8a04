"""Decides whether engines hang, from the sign of life that each engine's loop leaves in shared memory (engine/loop/pulse.py).

It reads no clock and does no I/O. The limit between two signs of life is `stall_s` seconds, or during a step eight times the step's
usual duration, if that is longer. The limit is ten times `stall_s` for work whose duration is unknown: a step of a size that was
seen fewer than three times, which may compile kernels; the capture of steps for later replay; and a model's first step, from the
time when all weights are there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.loop.pulse import BEAT_EVERY_S, Doing, Pulse

LOOK_EVERY_S = 5.0
LONG_STEP_S = 1.0  # a step that has lasted so long is told to the scheduler (EngineWatch.long_steps)
HELD_S = 2.0  # a timer that is later than this shows that the whole process stood still, and perhaps other processes, too
TIMES_EXPECTED = 8
TIMES_UNKNOWN = 10
SUSPECT, SUSPECT_S = 1 / 3, BEAT_EVERY_S + 3.0  # silence is suspect after this share of its limit, but not before SUSPECT_S


@dataclass(slots=True, frozen=True)
class Silence:
    """The silence of an engine: the seconds without a sign of life (silent_s), their limit (limit_s), and what the engine was
    doing, in words."""

    silent_s: float
    limit_s: float
    doing: str

    @property
    def is_suspect(self) -> bool:
        return self.silent_s >= max(SUSPECT_S, SUSPECT * self.limit_s)

    @property
    def is_too_long(self) -> bool:
        return self.silent_s >= self.limit_s

    def __str__(self) -> str:
        return f"no sign of life for {self.silent_s:.0f} s, {self.doing}"


def silence(pulse: Pulse, since_s: float, now: float, stall_s: float) -> Silence:
    """Returns how long the engine has been silent, and its limit. If a model's first step runs beside other work, the result is for
    the first step or for the other work, whichever is nearer to its limit. pulse: the engine's last sign of life. since_s: silence
    before this time does not count. stall_s: the usual limit in seconds."""
    silent_s = max(0.0, now - max(pulse.at_s, since_s))
    unknown_s = TIMES_UNKNOWN * stall_s
    if pulse.doing == Doing.STEP and pulse.expected_s:
        limit_s = max(stall_s, TIMES_EXPECTED * pulse.expected_s)
        found = Silence(silent_s, limit_s, f"in a step that usually takes {pulse.expected_s:.3g} s")
    elif pulse.doing == Doing.STEP:
        found = Silence(silent_s, unknown_s, "in one of the first steps of its size")
    elif pulse.doing == Doing.CAPTURE:
        found = Silence(silent_s, unknown_s, "capturing a step")
    else:
        found = Silence(silent_s, stall_s, "idle" if pulse.doing == Doing.IDLE else "between two steps")
    if pulse.first_since_s:
        computing_s = max(0.0, now - max(pulse.first_since_s, since_s))
        first = Silence(computing_s, unknown_s, "in a model's first step, all of whose weights are there")
        if first.silent_s / first.limit_s > found.silent_s / found.limit_s:
            return first
    return found


@dataclass(slots=True)
class _Life:
    """One engine process, as EngineWatch knows it. since_s: silence before this time does not count. hangs: whether `look` has
    already reported it as hanging."""

    pid: int
    since_s: float
    hangs: bool = False


class EngineWatch:
    """Finds the engines of a node that hang, by the time since their last sign of life. due_s: when `look` is to be called next.
    All times are those of time.monotonic()."""

    def __init__(self, now: float) -> None:
        self.due_s = now + LOOK_EVERY_S
        self._lives: dict[str, _Life] = {}

    def look(self, now: float, pulses: Mapping[str, tuple[int, Pulse]], stall_s: float) -> dict[str, Silence]:
        """Returns the engines that hang and were not returned before, by device. pulses: device -> the process id and the last sign
        of life, for engines that are up. stall_s: the usual limit in seconds; 0 turns the check off. If this call comes much later
        than it was due, the daemon itself stood still and may not have received signs of life; then the silence of all engines is
        measured from now on."""
        was_held = now - self.due_s > HELD_S
        self.due_s = now + LOOK_EVERY_S
        before, self._lives = self._lives, {}
        if stall_s <= 0:
            return {}
        found: dict[str, Silence] = {}
        for device, (pid, pulse) in pulses.items():
            life = before.get(device)
            if life is None or life.pid != pid:
                life = _Life(pid, now)
            elif was_held:
                life.since_s = now
            self._lives[device] = life
            if life.hangs:
                continue
            one = silence(pulse, life.since_s, now, stall_s)
            if one.is_too_long:
                life.hangs = True
                found[device] = one
            else:
                self.due_s = min(self.due_s, now + one.limit_s - one.silent_s)
        return found

    def long_steps(self, now: float, pulses: Mapping[str, tuple[int, Pulse]]) -> dict[str, float]:
        """Returns the engines that have been in one step, or in the capture of one, for at least LONG_STEP_S and do not hang, as
        device -> when the step began (time.monotonic()). pulses: device -> the process id and the last sign of life, for engines
        that are up."""
        found = {}
        for device, (pid, pulse) in pulses.items():
            life = self._lives.get(device)
            hangs = life is not None and life.pid == pid and life.hangs
            if pulse.doing in (Doing.STEP, Doing.CAPTURE) and now - pulse.at_s >= LONG_STEP_S and not hangs:
                found[device] = pulse.at_s
        return found

    def problem(self, device: str, now: float, pid: int, pulse: Pulse, stall_s: float) -> str:
        """Returns a text for operators if the device's engine has been silent for suspiciously long, otherwise "". pid: the
        engine's process id. pulse: its last sign of life. stall_s: the usual limit in seconds; 0 turns the check off."""
        life = self._lives.get(device)
        if life is None or life.pid != pid or stall_s <= 0:
            return ""
        one = silence(pulse, life.since_s, now, stall_s)
        if life.hangs:
            return f"{one}; it was killed and has not ended yet"
        return str(one) if one.is_suspect else ""
