"""Determines from a `quantization_config` which matrices of a quantised checkpoint are stored plain. This is needed only if
config.json alone is known; if the checkpoint's files exist, their tensors decide.

compressed-tensors lists modules under `ignore`: whole names, or regular expressions (`re:`) that match a name's beginning. ModelOpt
lists names with wildcards under `ignore` or `exclude_modules`. Transformers' own formats, and AWQ, list names, or parts of names,
under `modules_to_not_convert`. GPTQ has regular expressions among the rules of `dynamic`, where `-:` marks those of plain modules.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable

from loader.formats.modelopt import EXCLUDED
from loader.shapes.config_fields import Fields

IGNORE, NOT_CONVERTED, DYNAMIC = "ignore", "modules_to_not_convert", "dynamic"
_EXPRESSION, LEFT_OUT, _WILDCARD = "re:", "-:", "*"


def left_plain(config: Fields) -> Callable[[str], bool]:
    """Returns a function that takes a module's name and returns whether a quantised checkpoint's configuration leaves the module
    unquantised. config: the `quantization_config`. Raises CheckpointError, which names the key, for a value that is not a list of
    names, or for an expression that is not valid."""
    names: set[str] = set()
    parts: list[str] = []
    patterns: list[re.Pattern[str]] = []
    for key in (IGNORE, EXCLUDED, NOT_CONVERTED):
        listed = config.values.get(key) or []
        if not isinstance(listed, list) or not all(isinstance(one, str) and one for one in listed):
            raise config.fail(key, "not a list of names")
        for one in listed:
            if one.startswith(_EXPRESSION):
                patterns.append(_expression(config, key, one.removeprefix(_EXPRESSION)))
            elif key == NOT_CONVERTED:
                parts.append(one)
            elif _WILDCARD in one:
                patterns.append(re.compile(fnmatch.translate(one)))
            else:
                names.add(one)
    rules = config.values.get(DYNAMIC) or {}
    if isinstance(rules, dict):  # other values are refused by gptq_settings.py
        left_out = [rule.removeprefix(LEFT_OUT) for rule in rules if rule.startswith(LEFT_OUT)]
        patterns += [_expression(config, DYNAMIC, rule) for rule in left_out]
    return lambda module: (
        module in names or any(part in module for part in parts) or any(pattern.match(module) for pattern in patterns)
    )


def _expression(config: Fields, key: str, text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise config.fail(key, f"{text[:64]!r} is no regular expression: {error}") from None
