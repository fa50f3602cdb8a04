"""Reads the settings in a `quantization_config` that compressed-tensors wrote. They come in groups, each for some of a model's
matrices. Source: https://github.com/vllm-project/compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from loader.formats.refused import Refused, not_served

FoundT = TypeVar("FoundT")


def read_groups(
    config: Mapping[str, Any], form: str, read: Callable[[str, Mapping[str, Any]], FoundT | Refused]
) -> FoundT | Refused | None:
    """Reads a `quantization_config` that compressed-tensors wrote, with groups of settings, each for some of the model's matrices.
    Returns the settings of the groups, which must all have the same; a Refused (key and reason) for the first setting that is not
    served; None if there are no groups, or if one of them has another format than `form`. A group without a key `format` has the
    format of the whole configuration.

    read(key, weights): returns the settings of one group, or a Refused. key: the key of the group's weights, for messages. weights:
    what the group says about weights."""
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        return None
    found: FoundT | None = None
    for name, group in groups.items():
        if not isinstance(group, dict) or (group.get("format") or config.get("format")) != form:
            return None
        key, weights = f"config_groups.{str(name)[:64]}.weights", group.get("weights")
        one = read(key, weights) if isinstance(weights, dict) else Refused(key, "missing")
        if isinstance(one, Refused):
            return one
        if found not in (None, one):
            return Refused("config_groups", "groups whose scales are stored differently are not served")
        found = one
    if config.get("transform_config"):
        return Refused("transform_config", "transformed weights are not served")
    sparsity = config.get("sparsity_config")
    if sparsity and not (isinstance(sparsity, dict) and sparsity.get("format") in (None, "dense")):
        return Refused("sparsity_config", "compressed sparse weights are not served; served: dense")
    return found


def first_other(key: str, weights: Mapping[str, Any], served: Mapping[str, object]) -> Refused | None:
    """Returns a Refused (key and reason) for the first setting whose value is not served; None if all values are served. key: the
    key of the object that holds the settings, for messages; "": it is the configuration itself. weights: the settings. served:
    setting -> the only value that is served."""
    for name, value in served.items():
        if weights.get(name) != value:
            return not_served(f"{key}.{name}" if key else name, weights.get(name), str(value))
    return None
