"""Arithmetic on the host for the grids of launches and the sizes that kernels are compiled for. Triton's own cdiv and
next_power_of_2, which kernels can call as well, take the host some 3 µs a call, and a step calls them hundreds of times."""

from __future__ import annotations


def ceil_div(number: int, divisor: int) -> int:
    """Returns number / divisor, rounded up."""
    return -(-number // divisor)


def power_of_two(number: int) -> int:
    """Returns the smallest power of two that is at least `number`, which must be 1 or more."""
    return 1 << (number - 1).bit_length()
