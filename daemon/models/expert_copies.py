"""Chooses the experts of a model that are copied to further devices, by how many tokens each expert has computed so far. Only
models whose experts are divided among devices have copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from daemon.models.registered import Registered
from scheduler import expert_copies
from scheduler.node import events


def chosen(found: Registered, counts: Mapping[int, Sequence[int]]) -> events.ExpertCopies | None:
    """Returns which experts of a model its next loads copy to further devices, so that the work is spread more evenly. Returns None
    if no expert is to be copied, because the tokens are spread evenly already or too few have been counted. counts: layer -> number
    of tokens that each of its experts has computed."""
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
