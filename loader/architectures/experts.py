"""Describes mixtures of experts: layers with many small MLPs (experts), of which a router chooses a few for each token.

The description of a family of decoders that has them contains an `Experts`. Defaults are those of transformers' configuration
classes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from loader.architectures.architecture import COLUMNS, FIRST_ALONE, ROWS, Dims, TensorGroup, one_tensor
from loader.shapes.config_fields import Fields
from loader.shapes.model_shape import ALTERNATING, INPUT_MAJOR, ExpertShape, SigmoidShape

MAX_EXPERTS = 4096  # most experts of a layer; the largest models have 512
# transformers 5 writes the second for families that published the first
NUM_KEYS, ROUTED_NUM_KEYS = ("num_experts", "num_local_experts"), ("n_routed_experts", "num_local_experts")
_GROUP_BEST = 2  # number of best experts whose scores are added up as a group's score
_METHOD_KEY, _FACTOR_KEY, _IN_GROUPS = "topk_method", "routed_scaling_factor", "group_limited_greedy"
_SHARED_NUM_KEY, _SHARED_SIZE_KEY = "n_shared_experts", "shared_expert_intermediate_size"
_TYPES_KEY, _LAYER_TYPES = "mlp_layer_types", ("dense", "sparse")
_CHOSEN_KEY, _CHOSEN_KEYS = "num_experts_per_tok", ("num_experts_per_tok", "experts_per_token")  # gpt-oss has both


@dataclass(slots=True, frozen=True)
class ExpertNames:
    """The names of the tensors of a layer's experts, without `.weight`. They follow the layer's prefix.

    expert: prefix of the names gate_up and down of a routed expert; {} stands for the expert's index. shared: prefix of the same
    names of the shared expert; "": there is none. shared_gate: the matrix that computes, for each token, the factor of the shared
    expert's output; "": the factor is 1.

    correction: the complete name of the biases that are added to the router's scores only to choose experts; "": there are none.
    stacked_gate_up, stacked_down: complete names, for checkpoints that hold the matrices of all experts in one tensor; "": the
    family has no such checkpoints. The biases of these tensors have the same names followed by `_bias`."""

    router: str = "mlp.gate"
    expert: str = "mlp.experts.{}."
    gate_up: tuple[str, str] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    shared: str = ""
    shared_gate: str = ""
    correction: str = ""
    stacked_gate_up: str = ""
    stacked_down: str = ""

    def all_gate_up(self, numbers: Iterable[int]) -> tuple[str, ...]:
        """Returns the names of the gate and up matrices of the experts with the indices `numbers`, in the order in which the
        matrices lie in memory: the gate and the up matrix of one expert, then those of the next."""
        return tuple(self.expert.format(number) + name for number in numbers for name in self.gate_up)

    def all_down(self, numbers: Iterable[int]) -> tuple[str, ...]:
        return tuple(self.expert.format(number) + self.down for number in numbers)

    @property
    def router_and_gate(self) -> tuple[str, ...]:
        """The names of the matrices that one matrix multiplication reads together: the router's and, if there is one, that of the
        shared expert's gate."""
        return (self.router, self.shared_gate) if self.shared_gate else (self.router,)


@dataclass(slots=True, frozen=True)
class BesideNames:
    """The names of the additional tensors of a layer that has both an MLP and experts (engine/layers/beside_experts.py), without
    `.weight`; router_scale and expert_scale are complete names. All follow the layer's prefix.

    router_scale: factors of the router's normalised input. expert_scale: factor of each expert's weight. norm: norm of the experts'
    input. mlp_output_norm, output_norm: norms of the outputs of the MLP and of the experts."""

    router_scale: str = "router.scale"
    expert_scale: str = "router.per_expert_scale"
    mlp_output_norm: str = "post_feedforward_layernorm_1"
    norm: str = "pre_feedforward_layernorm_2"
    output_norm: str = "post_feedforward_layernorm_2"


@dataclass(slots=True, frozen=True)
class SigmoidRule:
    """The settings of a router whose scores pass through a sigmoid and which first chooses groups of experts: defaults of the keys
    n_group, topk_group and routed_scaling_factor. by_softmax: whether the scores pass through a softmax instead; the score of a
    group is then that of its best expert."""

    num_groups: int = 1
    num_chosen_groups: int = 1
    factor: float = 1.0
    by_softmax: bool = False

    def parse(self, fields: Fields, num_key: str, num_experts: int, num_chosen: int) -> SigmoidShape:
        """Returns the sizes of a router whose scores pass through a sigmoid, from config.json. num_key: the key that gave
        num_experts. num_chosen: number of experts that each token passes through. Raises CheckpointError, which names a key with a
        wrong value."""
        num_groups = fields.integer("n_group", self.num_groups)
        num_chosen_groups = fields.integer("topk_group", self.num_chosen_groups)
        size, rest = divmod(num_experts, num_groups)
        if rest:
            raise fields.fail("n_group", f"{num_groups} does not divide {num_key} {num_experts}")
        if size < _GROUP_BEST:
            raise fields.fail(
                "n_group", f"{num_groups} leaves {size} of {num_key} {num_experts} to a group, which needs {_GROUP_BEST}"
            )
        if num_chosen_groups > num_groups:
            raise fields.fail("topk_group", f"{num_chosen_groups} is more than there are groups (n_group {num_groups})")
        if num_chosen > num_chosen_groups * size:
            held = f"{num_chosen_groups} groups of {size} experts (topk_group, n_group) hold"
            raise fields.fail(_CHOSEN_KEY, f"{num_chosen} is more than {held}")
        return SigmoidShape(num_groups, num_chosen_groups, fields.positive(_FACTOR_KEY, self.factor), self.by_softmax)


@dataclass(slots=True, frozen=True)
class Experts:
    """The settings of the mixtures of experts in a family of decoders: the names of their tensors, and the keys of config.json
    about them with their defaults."""

    num_experts: int | None  # default; None: config.json must have the number; the same holds for num_chosen
    num_chosen: int | None
    names: ExpertNames = ExpertNames()
    enabled_key: str = ""  # the key that says whether layers have experts, with default false; "": they always have
    num_keys: tuple[str, str] = NUM_KEYS  # either has the number of experts
    size_key: str = "moe_intermediate_size"
    size: int | None = None  # default of the key size_key; None: config.json must have it
    shared_size: int = 0  # default of the key shared_expert_intermediate_size, of families whose names have `shared`
    num_shared: int = 0  # default of the key n_shared_experts: the shared expert is so many times as wide as others
    normalised: bool | None = None  # whether a token's weights are made to add up to 1; None: the key norm_topk_prob says
    normalised_default: bool = False  # default of that key
    sigmoid: SigmoidRule | None = None  # None: the weights are a softmax of the router's scores
    in_groups: SigmoidRule | None = None  # the rule that the key topk_method may ask for instead
    has_dense_layers: bool = False  # whether the keys decoder_sparse_step and mlp_only_layers name layers with an MLP instead
    num_dense_first: int | None = None  # default of first_k_dense_replace: so many first layers have an MLP; None: no such key
    has_layer_types: bool = False  # whether the key mlp_layer_types may list the layers with an MLP instead
    fixed: tuple[tuple[str, str | float], ...] = ()  # keys, and the only values that are supported
    has_biases: bool = False  # the router and, if experts are stacked, their matrices have biases
    swiglu_limit: float = 0.0  # default of the key swiglu_limit, of families with the clamped SwiGLU; 0: the activation is SiLU
    swiglu_alpha: float = 0.0  # default of the key swiglu_alpha, for the same families
    stack: str = ""  # how stacked tensors are ordered, in families with stacked_gate_up (loader/shapes/model_shape.py)
    weighs_inputs: bool = False  # the sigmoid of an expert's score multiplies the expert's input
    beside: BesideNames | None = None  # None: experts take the place of the MLP
    chosen_keys: tuple[str, str] = _CHOSEN_KEYS  # either has the number of experts that a token passes through
    has_sparse_layers: bool = False  # whether the keys moe_layers and interleave_moe_layer_step name the layers with experts

    @property
    def shared_key(self) -> str:
        """The key of config.json that gives the size of the shared expert."""
        return f"{_SHARED_NUM_KEY} * {self.size_key}" if self.num_shared else _SHARED_SIZE_KEY

    def parse(self, fields: Fields, num_layers: int) -> ExpertShape | None:
        """Returns the sizes of the experts, from config.json; None if config.json turns experts off. Raises CheckpointError, which
        names a key with a wrong value, and UnsupportedModel for a variant that is not served."""
        if self.enabled_key and not fields.boolean(self.enabled_key):
            return None
        rule, fixed = self.sigmoid, dict(self.fixed)
        if self.in_groups is not None and fields.values.get(_METHOD_KEY) == _IN_GROUPS:
            rule = self.in_groups
            fixed = {key: value for key, value in fixed.items() if key not in (_METHOD_KEY, _FACTOR_KEY)}
            fixed["norm_topk_prob"] = False
        for key, value in fixed.items():
            if fields.has(key) and fields.values[key] != value:
                raise fields.unsupported(key, f"{fields.values[key]!r} is not supported; supported: {value!r}")
        num_experts = _same_of(fields, self.num_keys, self.num_experts, MAX_EXPERTS)
        num_chosen = _same_of(fields, self.chosen_keys, self.num_chosen, 1 << 40)
        if num_chosen > num_experts:
            raise fields.fail(self.chosen_keys[0], f"{num_chosen} is more than there are experts ({num_experts})")
        size = fields.integer(self.size_key, self.size)
        sigmoid = None if rule is None else rule.parse(fields, self.num_keys[0], num_experts, num_chosen)
        normalised = fields.boolean("norm_topk_prob", self.normalised_default) if self.normalised is None else self.normalised
        return ExpertShape(
            num_experts=num_experts,
            num_chosen=num_chosen,
            intermediate_size=size,
            normalised=normalised,
            shared_size=self._shared_size(fields, size) if self.names.shared else 0,
            dense_layers=self._dense_layers(fields, num_layers),
            sigmoid=sigmoid,
            stacked=bool(self.stack),
            stack=self.stack,
            weighs_inputs=self.weighs_inputs,
            swiglu_limit=fields.positive("swiglu_limit", self.swiglu_limit) if self.swiglu_limit else 0.0,
            swiglu_alpha=fields.positive("swiglu_alpha", self.swiglu_alpha) if self.swiglu_alpha else 0.0,
            beside=self.beside is not None,
        )

    def tensor_groups(self, experts: ExpertShape, hidden: int) -> list[TensorGroup]:
        """Returns the tensor groups of one layer's experts and router, with names that lack the layer's prefix. hidden: the model's
        width. One group has the gate and up matrices of all experts, another one their down matrices; if experts are stored one by
        one, these groups are [experts, 2 * intermediate, hidden] and [experts, hidden, intermediate] in memory."""
        if experts.stack == ALTERNATING:
            return self._stacked_groups(experts, hidden)
        names, num, shared = self.names, experts.num_experts, experts.shared_size
        router = _matrices(names.router_and_gate, ((num, hidden), (1, hidden))[: len(names.router_and_gate)])
        groups = [
            *(self._float32_router(router, num) if experts.sigmoid is not None else [router]),
            *self._expert_matrices(experts, hidden),
        ]
        if (beside := self.beside) is not None:
            groups += [one_tensor(beside.router_scale, hidden), one_tensor(beside.expert_scale, num)]
            norms = (beside.mlp_output_norm, beside.norm, beside.output_norm)
            groups += [one_tensor(f"{name}.weight", hidden) for name in norms]
        if names.shared:
            gate_up = tuple(names.shared + name for name in names.gate_up)
            down = (names.shared + names.down,)
            for own, shapes, divided in ((gate_up, ((shared, hidden),) * 2, ROWS), (down, ((hidden, shared),), COLUMNS)):
                group = _matrices(own, shapes, may_be_quantized=True)
                groups.append(group._replace(may_be_reordered=True, divided=divided))
        return groups

    def as_stored(self, experts: ExpertShape, tensors: Collection[str]) -> ExpertShape:
        """Returns `experts` with the field `stacked` set according to a checkpoint's tensor names: True if one tensor holds the
        matrices of all experts of a layer, False if each expert has tensors of its own. tensors: the names."""
        stacked = any(name.endswith((self.names.stacked_gate_up, self.names.stacked_down)) for name in tensors)
        return replace(experts, stacked=stacked)

    def _expert_matrices(self, experts: ExpertShape, hidden: int) -> list[TensorGroup]:
        names, num, inner = self.names, experts.num_experts, experts.intermediate_size
        if experts.stacked:
            turned = experts.stack == INPUT_MAJOR
            gate_up = _stack(names.stacked_gate_up, (num, hidden, 2 * inner) if turned else (num, 2 * inner, hidden))
            down = _stack(names.stacked_down, (num, inner, hidden) if turned else (num, hidden, inner))
            outputs, inputs = (COLUMNS, ROWS) if turned else (ROWS, COLUMNS)
            return [gate_up._replace(divided=outputs, joined=((inner, inner),)), down._replace(divided=inputs)]
        gate_up = _matrices(names.all_gate_up(range(num)), ((inner, hidden),) * 2 * num, may_be_quantized=True)
        down = _matrices(names.all_down(range(num)), ((hidden, inner),) * num, may_be_quantized=True)
        return [gate_up._replace(divided=ROWS, num_experts=num), down._replace(divided=COLUMNS, num_experts=num)]

    def _shared_size(self, fields: Fields, size: int) -> int:
        """Returns the intermediate size of the shared expert, in elements. size: intermediate size of each routed expert."""
        if self.num_shared:
            return fields.integer(_SHARED_NUM_KEY, self.num_shared, at_most=MAX_EXPERTS) * size
        return fields.integer(_SHARED_SIZE_KEY, self.shared_size)

    def _dense_layers(self, fields: Fields, num_layers: int) -> frozenset[int]:
        """Returns the indices of the layers that have an MLP instead of experts."""
        if self.has_layer_types and fields.has(_TYPES_KEY):
            types = fields.values[_TYPES_KEY]
            if not isinstance(types, list) or len(types) != num_layers or not all(one in _LAYER_TYPES for one in types):
                raise fields.fail(_TYPES_KEY, f"not a list of {num_layers} values, each {' or '.join(map(repr, _LAYER_TYPES))}")
            return frozenset(layer for layer, one in enumerate(types) if one == _LAYER_TYPES[0])
        if self.has_sparse_layers:
            return frozenset(range(num_layers)) - _sparse_layers(fields, num_layers)
        if self.num_dense_first is not None:
            return frozenset(range(min(num_layers, fields.integer("first_k_dense_replace", self.num_dense_first, at_least=0))))
        return _dense_layers(fields, num_layers) if self.has_dense_layers else frozenset()

    def _float32_router(self, router: TensorGroup, num_experts: int) -> list[TensorGroup]:
        """Returns the tensor groups of a router whose scores are computed in float32, because lower precision would choose other
        experts: its matrices, and the biases that the family may add to the scores. router: the group of its matrices."""
        own = router._replace(held_as="float32")
        if not self.names.correction:
            return [own]
        return [own, TensorGroup(((self.names.correction, (num_experts,)),), held_as="float32")]

    def _stacked_groups(self, experts: ExpertShape, hidden: int) -> list[TensorGroup]:
        """Returns the tensor groups of one layer's router and experts, for a family that stacks experts as ALTERNATING: one tensor
        holds the gate and up matrices of all experts, of which the rows alternate, and another one their down matrices. hidden: the
        model's width."""
        names, num, inner = self.names, experts.num_experts, experts.intermediate_size
        groups = [_matrices((names.router,), ((num, hidden),))]
        if self.has_biases:
            groups.append(one_tensor(f"{names.router}.bias", num))
        gate_up, down = (names.stacked_gate_up, (2 * inner, hidden), ROWS, 2), (names.stacked_down, (hidden, inner), COLUMNS, 1)
        for name, (outputs, inputs), divided, unit in (gate_up, down):
            matrices = _stack(name, (num, outputs, inputs))
            groups.append(matrices._replace(may_be_quantized=True, divided=divided, unit=unit))
            if self.has_biases:
                of_biases = FIRST_ALONE if divided == COLUMNS else divided
                groups.append(_stack(f"{name}_bias", (num, outputs))._replace(divided=of_biases, unit=unit))
        return groups


def _same_of(fields: Fields, keys: tuple[str, str], default: int | None, at_most: int) -> int:
    """Returns a whole number that config.json may give under either of two keys, or under both. default: the number if both keys
    are absent; None: one of them must be there. Raises CheckpointError if the number is missing or out of range, or if the two keys
    have different values."""
    given = {key: fields.integer(key, at_most=at_most) for key in keys if fields.has(key)}
    if len(set(given.values())) > 1:
        raise fields.fail(keys[0], f"{given[keys[0]]} contradicts {keys[1]} {given[keys[1]]}")
    found = next(iter(given.values()), default)
    if found is None:
        raise fields.fail(keys[0], "missing")
    return found


def _sparse_layers(fields: Fields, num_layers: int) -> frozenset[int]:
    """Returns the indices of the layers with experts: those that `moe_layers` lists or, if that key is absent, the last of every
    `interleave_moe_layer_step` layers. Raises CheckpointError for a list that is not valid."""
    step, key = fields.integer("interleave_moe_layer_step", 1), "moe_layers"
    listed = fields.values.get(key)
    if listed is None:
        listed = list(range(step - 1, num_layers, step))
    if not isinstance(listed, list) or not all(type(layer) is int and 0 <= layer < num_layers for layer in listed):
        raise fields.fail(key, f"not a list of layers from 0 to {num_layers - 1}")
    return frozenset(listed)


def _dense_layers(fields: Fields, num_layers: int) -> frozenset[int]:
    """Returns the indices of the layers that have an MLP instead of experts: those that `mlp_only_layers` lists, and all but the
    last of every `decoder_sparse_step` layers. Raises CheckpointError for a list that is not valid."""
    step, key = fields.integer("decoder_sparse_step", 1), "mlp_only_layers"
    listed = fields.values.get(key) or []
    if not isinstance(listed, list) or not all(type(layer) is int and 0 <= layer < num_layers for layer in listed):
        raise fields.fail(key, f"not a list of layers from 0 to {num_layers - 1}")
    return frozenset(listed) | {layer for layer in range(num_layers) if (layer + 1) % step}


def _stack(name: str, dims: Dims) -> TensorGroup:
    """Returns the tensor group for a single tensor that holds, along its first axis, one matrix or bias for each expert of a layer.
    name, dims: the tensor's name and shape."""
    return TensorGroup(((name, dims),), num_experts=dims[0], stacked=True)


def _matrices(names: tuple[str, ...], shapes: tuple[tuple[int, int], ...], may_be_quantized: bool = False) -> TensorGroup:
    pairs = tuple((f"{name}.weight", dims) for name, dims in zip(names, shapes, strict=True))
    return TensorGroup(pairs, may_be_quantized=may_be_quantized)
