"""Computes, for models of which devices hold copies of experts, which experts of a layer each device holds, and which of an
expert's tokens each device computes.

With expert parallelism the experts of a layer are divided into parts, and one or several devices have each part. These devices may
also hold copies of experts of other parts (Division.copies). The tokens of an expert are then divided among all parts that hold it.

A token's slot in the KV cache decides which part computes it, because the slot is the same number on all devices of a stage. The
token's index in the step is not, since devices may pad a step in different ways.
"""

from __future__ import annotations

from loader.shapes.model_shape import Division, ExpertCopies, ExpertShape, ModelShape, SplitShape


def refused_copies(shape: ModelShape, division: Division) -> str:
    """Returns why a model cannot have the copies of experts that a division lists (Division.copies), as a sentence; "" if it
    can."""
    experts, copies = shape.experts, division.copies
    if experts is None or division.expert_parts == 1:
        return "copies of experts need experts that are divided (expert)"
    if len(copies) != shape.num_layers:
        return f"copies of experts are given for {len(copies)} layers of {shape.num_layers}"
    num_own = experts.num_experts // division.expert_parts
    for layer, parts in enumerate(copies):
        if len(parts) != (0 if layer in experts.dense_layers else division.expert_parts):
            return f"copies of experts are given for {len(parts)} parts of layer {layer}"
        for part, further in enumerate(parts):
            others = set(range(experts.num_experts)) - set(range(part * num_own, (part + 1) * num_own))
            if list(further) != sorted(others.intersection(further)):
                return f"copies of experts {list(further)} are no ascending numbers of other parts' experts (layer {layer})"
    return ""


def any_copies(shape: ModelShape, division: Division, number: int) -> ExpertCopies:
    """Returns one possible choice of copies of experts, for computing the memory that a model takes with copies. In each layer,
    each part of the experts gets copies of the first `number` experts that it lacks, or of all that it lacks if these are fewer."""
    experts = shape.experts
    assert experts is not None
    num_own, every = experts.num_experts // division.expert_parts, range(experts.num_experts)
    parts = tuple(tuple(one for one in every if one // num_own != part)[:number] for part in range(division.expert_parts))
    return tuple(() if layer in experts.dense_layers else parts for layer in range(shape.num_layers))


def turns(share: SplitShape, layer: int, experts: ExpertShape) -> list[tuple[int, int, int]]:
    """Returns, for each expert of a layer, which of the expert's tokens this share of the model computes: (number of holders, index
    of this share's part among the holders, index of the expert among those that this share holds). The holders are the parts of the
    layer's experts that contain the expert or a copy of it. The last two numbers are -1 if the share does not hold the expert. A
    holder computes the tokens whose slot in the KV cache, modulo the number of holders, is the holder's index.

    The order of an expert's holders is rotated by the expert's index plus the layer's index. Otherwise the first holder would
    compute most tokens in steps with few tokens."""
    held = [share.experts_of(part, layer, experts.num_experts) for part in range(share.expert_parts)]
    own = {expert: at for at, expert in enumerate(held[share.expert_part])}
    found = []
    for expert in range(experts.num_experts):
        holders = [part for part, of_part in enumerate(held) if expert in of_part]
        number = at = -1
        if expert in own:
            number, at = (holders.index(share.expert_part) + expert + layer) % len(holders), own[expert]
        found.append((len(holders), number, at))
    return found
