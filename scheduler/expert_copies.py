"""Chooses which experts of a mixture are held by several devices, where each device has a part of a layer's experts: those that
tokens are routed to most. Each step waits for the device whose experts were chosen most, so the copies are to make the parts'
shares of the tokens equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

# for each layer and part, the numbers of the further experts in ascending order; () for a layer without experts
Table = tuple[tuple[tuple[int, ...], ...], ...]

MIN_TOKENS = 100  # an expert's, on average: with fewer, differences may be chance
MIN_IMBALANCE = 1.1  # below this, copies are not worth their memory
MIN_GAIN = 0.05  # by how much copies must lower the imbalance
_LEAST = 0.002  # the least share of a layer's tokens by which a copy must make the busiest part less busy
_ALIKE = 0.02  # of numbers of copies whose imbalances differ by less, the smallest is chosen


def choose(counts: Sequence[Sequence[int] | None], num_parts: int, most: int) -> Table:
    """Returns which further experts each part is to hold, at most `most` in each layer; () if the tokens counted so far show no
    clear imbalance, or copies would not lower it. counts: for each layer, how many tokens have passed
    through each of its experts; None for a layer without experts. num_parts: number of equal parts of a layer's experts."""
    rows = [row for row in counts if row is not None]
    if not rows or num_parts < 2:
        return ()
    tokens = np.array(rows, dtype=np.float64)
    num_own = tokens.shape[1] // num_parts
    tried = numbers(min(most, tokens.shape[1] - num_own))
    before = imbalance(tokens, _homes(tokens, num_parts))
    if not tried or tokens.mean() < MIN_TOKENS or before < MIN_IMBALANCE:
        return ()
    found = [_held(tokens, num_parts, number) for number in tried]
    after = [imbalance(tokens, held) for held in found]
    least = min(after)
    if before - least < MIN_GAIN:
        return ()
    held = next(held for held, value in zip(found, after, strict=True) if value <= least + _ALIKE)
    further = iter(held & ~_homes(tokens, num_parts))
    return tuple(() if row is None else tuple(tuple(np.flatnonzero(part).tolist()) for part in next(further)) for row in counts)


def numbers(most: int) -> tuple[int, ...]:
    """Returns the numbers of copies that are tried if `most` are allowed: 1, 2, 4 and so on, and the largest allowed one."""
    return tuple(sorted({most, *(1 << at for at in range(most.bit_length()))})) if most > 0 else ()


def imbalance(tokens: Any, held: Any) -> float:
    """Returns how many times as many tokens as the mean part the busiest one of each layer has, both added up over the layers, if
    an expert's tokens are divided evenly among the parts that hold it. tokens [L, E]. held [L, P, E] bool: which parts hold it."""
    loads = _loads(tokens, held)
    return float(loads.max(axis=1).sum() / loads.mean(axis=1).sum()) if loads.any() else 1.0


def _loads(tokens: Any, held: Any) -> Any:
    """Returns the tokens of each part [L, P]."""
    return (held * (tokens / held.sum(axis=1))[:, None]).sum(axis=2)


def _homes(tokens: Any, num_parts: int) -> Any:
    """Returns which parts hold which experts [L, P, E] without copies."""
    num_layers, num_experts = tokens.shape
    home = np.arange(num_experts) // (num_experts // num_parts) == np.arange(num_parts)[:, None]
    return np.broadcast_to(home, (num_layers, num_parts, num_experts)).copy()


def _held(tokens: Any, num_parts: int, number: int) -> Any:
    """Returns which parts hold which experts [L, P, E] if each may hold `number` further ones.

    In turns, in all layers at once, the least busy part that has a place left gets the expert after which the busier one of this
    part and the busiest is least busy. Such an expert is usually the busiest part's hottest, but not if half of its tokens would
    make the receiver the busiest. A part for which there is no such expert is passed over until another one has got something."""
    held = _homes(tokens, num_parts)
    layers, places = np.arange(len(tokens)), np.full((len(tokens), num_parts), number)
    holders, loads, least = held.sum(axis=1), _loads(tokens, held), _LEAST * tokens.sum(axis=1)
    asked = places > 0
    while asked.any():
        receiver, giver = np.where(asked, loads, np.inf).argmin(axis=1), loads.argmax(axis=1)
        gets = tokens / (holders + 1)
        gives = np.where(held[layers, giver], tokens / holders - gets, 0.0)
        busier = np.maximum(loads[layers, receiver][:, None] + gets, loads[layers, giver][:, None] - gives)
        busier[held[layers, receiver]] = np.inf
        expert = busier.argmin(axis=1)
        gains = asked[layers, receiver] & (busier[layers, expert] < loads[layers, giver] - least)
        asked[layers, receiver] = False
        less = tokens[layers, expert] / holders[layers, expert] - gets[layers, expert]  # for each of its holders so far
        loads -= held[layers, :, expert] * (gains * less)[:, None]
        loads[layers, receiver] += gains * gets[layers, expert]
        holders[layers, expert] += gains
        held[layers, receiver, expert] |= gains
        places[layers, receiver] -= gains
        asked[gains] = places[gains] > 0
    return held
