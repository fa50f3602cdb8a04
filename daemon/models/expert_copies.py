"""Chooses copies of experts for a model whose experts are divided among devices, from what its experts have computed so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from daemon.models.registered import Registered
from scheduler import expert_copies
from scheduler.node import events


def chosen(found: Registered, counts: Mapping[int, Sequence[int]]) -> events.ExpertCopies | None:
    """Returns the copies for the next loads of a model; None for none: its tokens are spread evenly, or too few are counted yet.
    counts: for each layer, the tokens that have passed through each of its experts."""
    shape = found.shape
    assert shape is not None
    assert shape.experts is not None
    experts = shape.experts
    rows = {layer: counts.get(layer, ()) for layer in range(shape.num_layers) if layer not in experts.dense_layers}
    if any(len(row) != experts.num_experts for row in rows.values()):
        return None  # nothing is counted yet, or of other files
    by_layer = [rows.get(layer) for layer in range(shape.num_layers)]
    table = expert_copies.choose(by_layer, found.division.expert_parts, max(found.bytes_with_copies))
    if not table:
        return None
    number = max(len(part) for parts in table for part in parts)
    num_bytes = next(num_bytes for most, num_bytes in sorted(found.bytes_with_copies.items()) if most >= number)
    return events.ExpertCopies(number, num_bytes, table)
