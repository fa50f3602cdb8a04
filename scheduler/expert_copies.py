"""Chooses which experts of a mixture-of-experts model are copied to further devices. The model's experts are divided among several
devices: each has an equal part of every layer's experts. A step lasts as long as the device with the most tokens computes. Copies
of the experts that get most tokens let other devices compute a part of these tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

# for each layer and part, the numbers of the further experts in ascending order; () for a layer without experts
Table = tuple[tuple[tuple[int, ...], ...], ...]

MIN_TOKENS = 100  # tokens per expert, on average: with fewer, differences may be chance
MIN_IMBALANCE = 1.1  # below this, copies are not worth their memory
MIN_GAIN = 0.05  # by how much copies must lower the imbalance
_LEAST = 0.002  # the least share of a layer's tokens by which a copy must make the busiest part less busy
_ALIKE = 0.02  # among numbers of copies whose imbalances differ by less than this, the smallest is chosen


def choose(counts: Sequence[Sequence[int] | None], num_parts: int, most: int) -> Table:
    """Returns the experts of which each part (an equal share of every layer's experts, on one device or divided among several) is
    to hold a copy in addition to its own experts, at most `most` in each layer. The result has an entry for each layer, in it one
    for each part, which lists the indices, within the layer, of the copied experts. It is () if the tokens counted so far show no
    clear imbalance, or if copies would not lower it. counts: for each layer, how many tokens have passed through each of its
    experts; None for a layer without experts. num_parts: number of equal parts of a layer's experts."""
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
    """Returns the numbers of copies, in each part and layer, among which `choose` chooses: the powers of two up to `most`, the
    largest number allowed, and `most` itself, in ascending order."""
    return tuple(sorted({most, *(1 << at for at in range(most.bit_length()))})) if most > 0 else ()


def imbalance(tokens: Any, held: Any) -> float:
    """Returns the imbalance of the parts (devices' shares of the experts): the sum over all layers of the busiest part's tokens,
    divided by the sum over all layers of the mean of all parts; 1.0 if there are no tokens. The tokens of an expert are divided
    evenly among the parts that hold it. tokens [L, E]: by layer and expert. held [L, P, E] bool: which of P parts hold each
    expert."""
    loads = _loads(tokens, held)
    return float(loads.max(axis=1).sum() / loads.mean(axis=1).sum()) if loads.any() else 1.0


def _loads(tokens: Any, held: Any) -> Any:
    """Returns the number of tokens [L, P] that each of P parts (devices' shares of the experts) computes in each of L layers, in
    which the tokens of an expert are divided evenly among the parts that hold it. tokens [L, E]: the tokens of each expert. held
    [L, P, E] bool: which parts hold each expert."""
    return (held * (tokens / held.sum(axis=1))[:, None]).sum(axis=2)


def _homes(tokens: Any, num_parts: int) -> Any:
    """Returns [L, P, E] bool: which of P parts (devices' shares of the experts) hold each of E experts in each of L layers before
    any copies are made. Each part has its own E / P consecutive experts. tokens: [L, E], of which only the shape is used."""
    num_layers, num_experts = tokens.shape
    home = np.arange(num_experts) // (num_experts // num_parts) == np.arange(num_parts)[:, None]
    return np.broadcast_to(home, (num_layers, num_parts, num_experts)).copy()


def _held(tokens: Any, num_parts: int, number: int) -> Any:
    """Returns [L, P, E] bool: which of P parts (devices' shares of the experts) hold each of E experts in each of L layers, if each
    part may hold `number` copies in each layer besides its own experts. tokens: [L, E], the tokens of each expert.

    All layers are handled at once, one copy in each layer at a time. The least busy part that may hold a further copy is the
    receiver: it gets a copy of an expert of the busiest part, namely the expert for which the busier of these two parts has the
    fewest tokens afterwards. If no expert lowers the busiest part's tokens, the receiver is passed over until another part has
    received a copy."""
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
        less = tokens[layers, expert] / holders[layers, expert] - gets[layers, expert]  # of each earlier holder
        loads -= held[layers, :, expert] * (gains * less)[:, None]
        loads[layers, receiver] += gains * gets[layers, expert]
        holders[layers, expert] += gains
        held[layers, receiver, expert] |= gains
        places[layers, receiver] -= gains
        asked[gains] = places[gains] > 0
    return held
