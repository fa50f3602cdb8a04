"""Which layers of a decoder attend to a window of recent positions only: one rule for each way config.json has of saying it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from loader.config_fields import Fields

_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(slots=True, frozen=True)
class Asked:
    """What a rule goes by. name: the architecture's; listed: by layer, whether the key `layer_types` calls it sliding (None: the
    key is absent); default_tokens: length of the window where the key `sliding_window` is absent (None: no default)."""

    fields: Fields
    name: str
    num_layers: int
    listed: list[bool] | None
    default_tokens: int | None


Rule = Callable[[Asked], list[bool]]  # by layer: whether it has a window


def no_layer(asked: Asked) -> list[bool]:
    """Refuses a config.json that asks for windows."""
    message = f"{asked.name} is supported without windows only"
    if asked.fields.boolean("use_sliding_window"):
        raise asked.fields.unsupported("use_sliding_window", message)
    if asked.listed is not None and any(asked.listed):
        raise asked.fields.unsupported("layer_types", message)
    return [False] * asked.num_layers


def every_layer(asked: Asked) -> list[bool]:
    """Windows on all layers where `sliding_window` is set, else on none."""
    fields = asked.fields
    window = None if fields.is_null("sliding_window") else fields.values.get("sliding_window", asked.default_tokens)
    slides = [window is not None] * asked.num_layers
    if asked.listed is not None and asked.listed != slides:
        raise fields.unsupported("layer_types", f"{asked.name} is supported with layers of one kind only")
    return slides


def from_a_layer_on(asked: Asked) -> list[bool]:
    """Windows from layer `max_window_layers` on, or as `layer_types` lists them, where `use_sliding_window` is true."""
    fields = asked.fields
    if not fields.boolean("use_sliding_window"):
        if asked.listed is not None and any(asked.listed):
            raise fields.fail("layer_types", f"has {_SLIDING} layers, but use_sliding_window is false")
        return [False] * asked.num_layers
    first = fields.integer("max_window_layers", 28, at_least=0)
    windowed = not fields.is_null("sliding_window")
    return asked.listed if asked.listed is not None else [windowed and layer >= first for layer in range(asked.num_layers)]


def all_but_every_nth(nth: int, key: str = "") -> Rule:
    """Windows on all layers but the last of every `nth`, or as `layer_types` lists them. key: where config.json says how many, with
    nth as its default; "": that is fixed."""

    def rule(asked: Asked) -> list[bool]:
        pattern = asked.fields.integer(key, nth) if key else nth
        return asked.listed if asked.listed is not None else [(layer + 1) % pattern != 0 for layer in range(asked.num_layers)]

    return rule


@dataclass(slots=True, frozen=True)
class Windows:
    """A family's rule, and the length of its windows where the key `sliding_window` is absent (None: it must not be)."""

    rule: Rule = no_layer
    default_tokens: int | None = None

    def by_layer(
        self, fields: Fields, name: str, num_layers: int, max_position_embeddings: int, keeps_all: bool
    ) -> tuple[int, ...]:
        """Returns [num_layers]: how many positions a query of the layer sees, its own included; 0: all.

        A window that no sequence can outgrow counts as none, unless keeps_all. Raises UnsupportedModel or CheckpointError."""
        sliding = self.rule(Asked(fields, name, num_layers, _listed(fields, num_layers), self.default_tokens))
        if not any(sliding):
            return (0,) * num_layers
        if fields.is_null("sliding_window") or (self.default_tokens is None and not fields.has("sliding_window")):
            raise fields.fail("sliding_window", "missing, but there are sliding_attention layers")
        window = fields.integer("sliding_window", self.default_tokens)
        if window >= max_position_embeddings and not keeps_all:
            return (0,) * num_layers
        return tuple(window if slides else 0 for slides in sliding)


def _listed(fields: Fields, num_layers: int) -> list[bool] | None:
    kinds = fields.values.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise fields.fail("layer_types", f"not a list of num_hidden_layers {num_layers} kinds")
    for kind in kinds:
        if kind not in (_FULL, _SLIDING):
            raise fields.unsupported("layer_types", f"{kind!r} is not supported; supported: {_FULL}, {_SLIDING}")
    return [kind == _SLIDING for kind in kinds]
