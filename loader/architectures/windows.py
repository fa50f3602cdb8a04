"""Decides from config.json which layers have a sliding window. In a decoder a window has the most recent positions; in an encoder
it lies around each token. config.json says this in a different way in each family; each way is a rule (a function) in this file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from loader.shapes.config_fields import Fields
from loader.shapes.rope_config import rotated_layers

_FULL, _SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


@dataclass(slots=True, frozen=True)
class Asked:
    """The values of config.json by which a rule decides which layers have sliding windows. fields: config.json. name: the
    architecture, for errors. listed: for each layer, whether the key `layer_types` gives it a sliding window (or a chunk, in a
    family with chunks); None: the key is absent. default_tokens: the window's length in tokens if config.json gives none; None:
    there is no default."""

    fields: Fields
    name: str
    num_layers: int
    listed: list[bool] | None
    default_tokens: int | None


Rule = Callable[[Asked], list[bool]]  # returns for each layer whether it has a window


def no_layer(asked: Asked) -> list[bool]:
    """Returns False for every layer: the rule of families without sliding windows. Raises UnsupportedModel if config.json asks for
    windows."""
    message = f"{asked.name} is supported without windows only"
    if asked.fields.boolean("use_sliding_window"):
        raise asked.fields.unsupported("use_sliding_window", message)
    if asked.listed is not None and any(asked.listed):
        raise asked.fields.unsupported("layer_types", message)
    return [False] * asked.num_layers


def every_layer(asked: Asked) -> list[bool]:
    """Returns which layers have a sliding window: all of them if the key `sliding_window` has a value, in config.json or by
    default, else none. Raises UnsupportedModel if `layer_types` contradicts that."""
    fields = asked.fields
    window = None if fields.is_null("sliding_window") else fields.values.get("sliding_window", asked.default_tokens)
    slides = [window is not None] * asked.num_layers
    if asked.listed is not None and asked.listed != slides:
        raise fields.unsupported("layer_types", f"{asked.name} is supported with layers of one kind only")
    return slides


def from_a_layer_on(asked: Asked) -> list[bool]:
    """Returns which layers have a sliding window: none unless `use_sliding_window` is true, and otherwise those that `layer_types`
    lists. If that key is absent, they are the layers from index `max_window_layers` on, or none if `sliding_window` is null."""
    fields = asked.fields
    if not _wants_windows(asked):
        return [False] * asked.num_layers
    first = fields.integer("max_window_layers", 28, at_least=0)
    windowed = not fields.is_null("sliding_window")
    return asked.listed if asked.listed is not None else [windowed and layer >= first for layer in range(asked.num_layers)]


def every_second_up_to_a_layer(asked: Asked) -> list[bool]:
    """Returns which layers have a sliding window: none unless `use_sliding_window` is true, and otherwise those that `layer_types`
    lists. If that key is absent, they are the layers 0, 2, 4 and so on below `max_window_layers`."""
    if not _wants_windows(asked):
        return [False] * asked.num_layers
    end = asked.fields.integer("max_window_layers", 28, at_least=0)
    return asked.listed if asked.listed is not None else [layer % 2 == 0 and layer < end for layer in range(asked.num_layers)]


def every_layer_if_asked(asked: Asked) -> list[bool]:
    """Returns which layers have a sliding window: none unless `use_sliding_window` is true; if it is, as `every_layer` decides."""
    return every_layer(asked) if _wants_windows(asked) else [False] * asked.num_layers


def all_but_every_nth(nth: int, key: str = "") -> Rule:
    """Returns a rule that decides which layers have a window: those that `layer_types` lists or, if that key is absent, all layers
    except the last of every `nth`. key: the key of config.json that may give another number than `nth`; "": the number is always
    `nth`."""

    def rule(asked: Asked) -> list[bool]:
        pattern = asked.fields.integer(key, nth) if key else nth
        return asked.listed if asked.listed is not None else [(layer + 1) % pattern != 0 for layer in range(asked.num_layers)]

    return rule


def all_but_every_nth_and_the_last(nth: int) -> Rule:
    """Returns a rule that decides which layers have a window: those that `layer_types` lists or, if that key is absent, all layers
    except the last of every `nth`. The model's last layer never has a window, whatever `layer_types` says."""
    rule = all_but_every_nth(nth)
    return lambda asked: [*rule(asked)[:-1], False]


def where_rotated(asked: Asked) -> list[bool]:
    """Returns which layers have a window: those with rotary embedding (RoPE). Raises UnsupportedModel if `layer_types` lists other
    layers."""
    rotated = rotated_layers(asked.fields, asked.num_layers)
    if asked.listed is not None and asked.listed != rotated:
        raise asked.fields.unsupported("layer_types", f"{asked.name} has chunks where layers are rotated")
    return rotated


def where_unrotated_if_asked(asked: Asked) -> list[bool]:
    """Returns which layers have a sliding window: none unless `use_sliding_window` is true, and otherwise those that `layer_types`
    lists. If that key is absent, they are the layers without rotary embedding (RoPE), or none if `sliding_window` is not set."""
    if not _wants_windows(asked):
        return [False] * asked.num_layers
    has_window = asked.fields.has("sliding_window")
    return asked.listed or [has_window and not one for one in rotated_layers(asked.fields, asked.num_layers)]


def _wants_windows(asked: Asked) -> bool:
    """Returns whether `use_sliding_window` is true in config.json. Raises CheckpointError if it is false or absent and
    `layer_types` lists layers with sliding windows."""
    if asked.fields.boolean("use_sliding_window"):
        return True
    if asked.listed is not None and any(asked.listed):
        raise asked.fields.fail("layer_types", f"has {_SLIDING} layers, but use_sliding_window is false")
    return False


@dataclass(slots=True, frozen=True)
class Windows:
    """The sliding windows of a family. rule: decides which layers have a window. key: the key of config.json that gives the
    windows' length in tokens. default_tokens: the length if that key is absent; None: a config.json with windows must have the key.
    kind: the name of layers with windows in `layer_types`; CHUNKED: windows are chunks, and a query attends only to positions of
    its own chunk."""

    rule: Rule = no_layer
    default_tokens: int | None = None
    key: str = "sliding_window"
    kind: str = _SLIDING

    def sliding(self, fields: Fields, name: str, num_layers: int) -> list[bool]:
        """Returns for each layer whether it has a sliding window. name: the architecture, for errors. Raises UnsupportedModel for
        windows that the family's rule does not allow, and CheckpointError for a wrong value."""
        return self.rule(Asked(fields, name, num_layers, _listed(fields, num_layers, self.kind), self.default_tokens))

    def by_layer(self, fields: Fields, sliding: list[bool], max_position_embeddings: int, keeps_all: bool) -> tuple[int, ...]:
        """Returns for each layer how many positions a query attends to, its own included; 0: all of them. sliding: for each layer,
        whether it has a window. max_position_embeddings: the longest context in tokens. keeps_all: whether windows that are as long
        as the longest context are kept; if not, their layers get 0. Raises CheckpointError if there are windows and config.json
        gives no length."""
        num_layers = len(sliding)
        if not any(sliding):
            return (0,) * num_layers
        if fields.is_null(self.key) or (self.default_tokens is None and not fields.has(self.key)):
            raise fields.fail(self.key, f"missing, but there are {self.kind} layers")
        window = fields.integer(self.key, self.default_tokens)
        if window >= max_position_embeddings and not keeps_all:
            return (0,) * num_layers
        return tuple(window if slides else 0 for slides in sliding)


def _listed(fields: Fields, num_layers: int, windowed: str) -> list[bool] | None:
    kinds = fields.values.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise fields.fail("layer_types", f"not a list of num_hidden_layers {num_layers} kinds")
    for kind in kinds:
        if kind not in (_FULL, windowed):
            raise fields.unsupported("layer_types", f"{kind!r} is not supported; supported: {_FULL}, {windowed}")
    return [kind == windowed for kind in kinds]
