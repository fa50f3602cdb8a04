"""Decides whether an engine refuses to load its share of a split model, and says why."""

from __future__ import annotations

from engine.protocol import LoadModel


def why_not_split(spec: LoadModel) -> str:
    """Returns why this engine cannot load a device's share of a split model as the message asks; "" if it can, or if the model is
    not split. The daemon never sends a load that is refused here."""
    group = spec.group
    if group is None:
        return ""
    if not 0 <= group.rank < len(group.members) or len(group.members) < 2 or len(set(group.members)) < len(group.members):
        return f"rank {group.rank} of engines {group.members}, which must be two or more different ones"
    if spec.predicts:
        return f"speculator {spec.speculator} is not built for a model that is split; prompt-lookup is"
    if spec.kv_slots:
        return "the host tier keeps no KV of a model that is split"
    if spec.kv_reserved_chunks <= 0:
        return "a model that is split has no KV but what is reserved for it, and none is"
    return ""
