"""Mixtures of experts: layers whose MLP is many small ones, of which a router chooses a few for each token.

A family of decoders that has them says so with `Experts` in its description. Defaults are those of transformers' configuration
classes, as in decoder.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from loader.architectures.architecture import TensorGroup
from loader.config_fields import Fields
from loader.model_shape import ExpertShape

MAX_EXPERTS = 4096  # of a layer; the largest models have 512
_NUM_KEYS = ("num_experts", "num_local_experts")  # transformers 5 writes the second for families that published the first
_CHOSEN_KEY = "num_experts_per_tok"


@dataclass(slots=True, frozen=True)
class ExpertNames:
    """Names of the tensors of a layer's experts, without `.weight`. Like those of TensorNames they follow the layer's prefix.

    expert: what the names gate_up and down of each expert follow; {} is its number. shared: the same for the expert that all tokens
    pass through; "": there is none. shared_gate: the vector that weighs its output for each token."""

    router: str = "mlp.gate"
    expert: str = "mlp.experts.{}."
    gate_up: tuple[str, str] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    shared: str = ""
    shared_gate: str = ""

    def all_gate_up(self, num_experts: int) -> tuple[str, ...]:
        """Returns the names of all experts' gate and up, in the order in which they lie in memory."""
        return tuple(self.expert.format(number) + name for number in range(num_experts) for name in self.gate_up)

    def all_down(self, num_experts: int) -> tuple[str, ...]:
        return tuple(self.expert.format(number) + self.down for number in range(num_experts))

    @property
    def router_and_gate(self) -> tuple[str, ...]:
        """The names of the matrices that one product multiplies with each token: the router, and the shared expert's gate."""
        return (self.router, self.shared_gate) if self.shared else (self.router,)


@dataclass(slots=True, frozen=True)
class Experts:
    """What config.json may say about a family's experts, and what applies if it leaves a key out."""

    num_experts: int
    num_chosen: int
    names: ExpertNames = ExpertNames()
    size_key: str = "moe_intermediate_size"
    size: int | None = None  # None: config.json must have size_key
    shared_size: int = 0  # default of the key shared_expert_intermediate_size, of families whose names have `shared`
    normalised: bool | None = None  # whether a token's weights are made to add up to 1; None: the key norm_topk_prob says
    has_dense_layers: bool = False  # whether the keys decoder_sparse_step and mlp_only_layers name layers with an MLP instead

    def parse(self, fields: Fields, num_layers: int) -> ExpertShape:
        """Reads config.json. Raises CheckpointError, which names a key with a wrong value."""
        num_experts = self._num_experts(fields)
        num_chosen = fields.integer(_CHOSEN_KEY, self.num_chosen)
        if num_chosen > num_experts:
            raise fields.fail(_CHOSEN_KEY, f"{num_chosen} is more than there are experts ({num_experts})")
        return ExpertShape(
            num_experts=num_experts,
            num_chosen=num_chosen,
            intermediate_size=fields.integer(self.size_key, self.size),
            normalised=fields.boolean("norm_topk_prob") if self.normalised is None else self.normalised,
            shared_size=fields.integer("shared_expert_intermediate_size", self.shared_size) if self.names.shared else 0,
            dense_layers=_dense_layers(fields, num_layers) if self.has_dense_layers else frozenset(),
        )

    def tensor_groups(self, experts: ExpertShape, hidden: int) -> list[TensorGroup]:
        """Returns the groups of one layer, with names that lack the layer's prefix. All experts' gate and up lie in one block
        [experts, 2 * intermediate, hidden], all their down in another [experts, hidden, intermediate]."""
        names, num, inner, shared = self.names, experts.num_experts, experts.intermediate_size, experts.shared_size
        groups = [
            _matrices(names.router_and_gate, ((num, hidden), (1, hidden))[: len(names.router_and_gate)]),
            _matrices(names.all_gate_up(num), ((inner, hidden),) * 2 * num, may_be_quantized=True),
            _matrices(names.all_down(num), ((hidden, inner),) * num, may_be_quantized=True),
        ]
        if names.shared:
            gate_up = tuple(names.shared + name for name in names.gate_up)
            groups.append(_matrices(gate_up, ((shared, hidden),) * 2, may_be_quantized=True))
            groups.append(_matrices((names.shared + names.down,), ((hidden, shared),), may_be_quantized=True))
        return groups

    def _num_experts(self, fields: Fields) -> int:
        given = {key: fields.integer(key, at_most=MAX_EXPERTS) for key in _NUM_KEYS if fields.has(key)}
        if len(set(given.values())) > 1:
            raise fields.fail(_NUM_KEYS[0], f"{given[_NUM_KEYS[0]]} contradicts {_NUM_KEYS[1]} {given[_NUM_KEYS[1]]}")
        return next(iter(given.values()), self.num_experts)


def _dense_layers(fields: Fields, num_layers: int) -> frozenset[int]:
    """Returns the layers that have one MLP for all tokens: those that `mlp_only_layers` lists, and of every `decoder_sparse_step`
    layers all but the last."""
    step, key = fields.integer("decoder_sparse_step", 1), "mlp_only_layers"
    listed = fields.values.get(key) or []
    if not isinstance(listed, list) or not all(type(layer) is int and 0 <= layer < num_layers for layer in listed):
        raise fields.fail(key, f"not a list of layers from 0 to {num_layers - 1}")
    return frozenset(listed) | {layer for layer in range(num_layers) if (layer + 1) % step}


def _matrices(names: tuple[str, ...], shapes: tuple[tuple[int, int], ...], may_be_quantized: bool = False) -> TensorGroup:
    pairs = tuple((f"{name}.weight", dims) for name, dims in zip(names, shapes, strict=True))
    return TensorGroup(pairs, may_be_quantized=may_be_quantized)
