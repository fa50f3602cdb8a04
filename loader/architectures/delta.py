"""Describes layers of the gated delta rule (linear attention, https://arxiv.org/abs/2412.06464), which keep all earlier tokens in a
state of fixed size. They take the place of attention in some layers of a decoder.

The description of a family of decoders that has such layers contains a `Deltas`. Defaults are those of transformers' configuration
classes.
"""

from __future__ import annotations

from dataclasses import dataclass

from loader.architectures.architecture import COLUMNS, ROWS, Dims, TensorGroup, one_tensor
from loader.shapes.config_fields import Fields
from loader.shapes.model_shape import DeltaShape

_LINEAR, _FULL = "linear_attention", "full_attention"


@dataclass(slots=True, frozen=True)
class DeltaNames:
    """The names of the tensors of a layer of the gated delta rule, without `.weight`; decay and step_bias are complete names. All
    follow the layer's prefix.

    inputs: the matrices that make queries, keys, values and the output's gates. gates: the matrices that make the update rate and
    the decay of each head. decay, step_bias: the logarithm of a factor of each head's decay, and a bias that is added before the
    decay is computed. convolution: the depthwise convolution over queries, keys and values. norm: the norm of each head's
    output."""

    inputs: tuple[str, ...] = ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z")
    gates: tuple[str, ...] = ("linear_attn.in_proj_b", "linear_attn.in_proj_a")
    convolution: str = "linear_attn.conv1d"
    decay: str = "linear_attn.A_log"
    step_bias: str = "linear_attn.dt_bias"
    norm: str = "linear_attn.norm"
    output: str = "linear_attn.out_proj"


@dataclass(slots=True, frozen=True)
class Deltas:
    """The settings of the layers of the gated delta rule in a family of decoders: tensor names, and defaults for keys that
    config.json leaves out.

    by_head: the order of the outputs of the layers' input and gate matrices. True: they are grouped by key head. False: they are
    grouped by kind, with all queries first, then all keys, and so on. names.inputs and names.gates then have two matrices each:
    (queries, keys and values; output gates) and (update rates; decays). With by_head, each has one matrix that makes both."""

    names: DeltaNames = DeltaNames()
    by_head: bool = False
    num_key_heads: int = 16
    num_value_heads: int = 32
    key_dim: int = 128
    value_dim: int = 128
    conv_tokens: int = 4
    full_interval: int = 4  # the last of every so many layers has attention

    def parse(self, fields: Fields, num_layers: int) -> DeltaShape:
        """Returns the sizes of the layers of the gated delta rule, from config.json. Raises CheckpointError, which names a key with
        a wrong value, and UnsupportedModel for a variant that is not served."""
        num_key_heads = fields.integer("linear_num_key_heads", self.num_key_heads)
        num_value_heads = fields.integer("linear_num_value_heads", self.num_value_heads)
        if num_value_heads % num_key_heads:
            raise fields.fail("linear_num_value_heads", f"{num_value_heads} is no multiple of linear_num_key_heads {num_key_heads}")
        return DeltaShape(
            layers=self._layers(fields, num_layers),
            num_key_heads=num_key_heads,
            num_value_heads=num_value_heads,
            key_dim=fields.integer("linear_key_head_dim", self.key_dim),
            value_dim=fields.integer("linear_value_head_dim", self.value_dim),
            conv_tokens=fields.integer("linear_conv_kernel_dim", self.conv_tokens, at_least=2, at_most=16),
            by_head=self.by_head,
        )

    def tensor_groups(self, delta: DeltaShape, hidden: int) -> list[TensorGroup]:
        """Returns the tensor groups of one layer of the gated delta rule, with names that lack the layer's prefix. hidden: the
        model's width. Devices divide the key heads, each with the value heads that it serves."""
        names, values, heads = self.names, delta.num_value_heads * delta.value_dim, delta.num_value_heads
        keys = delta.num_key_heads * delta.key_dim
        convolved = (keys, keys, values)  # queries, keys, values
        inputs = ((sum(convolved) + values,),) if self.by_head else (convolved, (values,))
        gates = ((2 * heads,),) if self.by_head else ((heads,), (heads,))
        convolution = one_tensor(f"{names.convolution}.weight", delta.conv_width, 1, delta.conv_tokens, divided=ROWS)
        return [
            _matrices(names.inputs, inputs, hidden)._replace(may_be_quantized=True),
            _matrices(names.gates, gates, hidden),
            convolution._replace(joined=(convolved,)),
            one_tensor(names.decay, heads, divided=ROWS)._replace(held_as="float32"),
            one_tensor(names.step_bias, heads, divided=ROWS)._replace(held_as="float32"),
            one_tensor(f"{names.norm}.weight", delta.value_dim),
            one_tensor(f"{names.output}.weight", hidden, values, divided=COLUMNS)._replace(may_be_quantized=True),
        ]

    def _layers(self, fields: Fields, num_layers: int) -> frozenset[int]:
        interval = fields.integer("full_attention_interval", self.full_interval)
        kinds = fields.values.get("layer_types")
        if kinds is None:
            kinds = [_FULL if (layer + 1) % interval == 0 else _LINEAR for layer in range(num_layers)]
        if not isinstance(kinds, list) or len(kinds) != num_layers:
            raise fields.fail("layer_types", f"not a list of num_hidden_layers {num_layers} kinds")
        for kind in kinds:
            if kind not in (_LINEAR, _FULL):
                raise fields.unsupported("layer_types", f"{kind!r} is not supported; supported: {_LINEAR}, {_FULL}")
        if _FULL not in kinds:
            raise fields.unsupported("layer_types", f"no layer is {_FULL}; supported are models that have one")
        return frozenset(layer for layer, kind in enumerate(kinds) if kind == _LINEAR)


def _matrices(names: tuple[str, ...], outputs: tuple[Dims, ...], inputs: int) -> TensorGroup:
    """Returns the tensor group of matrices that one matrix multiplication reads and that devices divide by rows. outputs: for each
    named tensor, the numbers of rows of the matrices that it holds. inputs: number of columns."""
    pairs = tuple((f"{name}.weight", (sum(rows), inputs)) for name, rows in zip(names, outputs, strict=True))
    return TensorGroup(pairs, divided=ROWS, joined=outputs)
