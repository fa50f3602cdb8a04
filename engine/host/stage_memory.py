"""Defines the layout of the memory through which each stage of a pipeline passes the states (activations) of a step's tokens to the
next stage.

The memory has a part for each device of a stage, because a device passes states to the device with the same index in the next
stage. Each part has a piece for every stage but the last; the stage sends through its piece. A piece begins with a line of
LINE_BYTES, which holds two int64: the number of steps that the stage has sent, and the number of devices that sleep until that
number grows. Then come places for the states of as many steps as there are stages, which are filled in turn. All memory is zero at
the beginning."""

from __future__ import annotations

from engine.host.rank_memory import LINE_BYTES


def piece_bytes(num_stages: int, handed: int) -> int:
    """Returns the bytes of a piece: the memory through which one device of one stage sends states to the next stage. handed: bytes
    of the states of one step (loader/sizes/work_space.py), a multiple of LINE_BYTES."""
    return LINE_BYTES + num_stages * handed


def stage_memory_bytes(stage_size: int, num_stages: int, handed: int) -> int:
    """Returns the bytes of the memory for num_stages stages of stage_size devices each. handed: bytes of the states of one step, a
    multiple of LINE_BYTES."""
    return stage_size * (num_stages - 1) * piece_bytes(num_stages, handed)
