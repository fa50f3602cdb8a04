"""Determines which sets of kernels a model needs on the `cpu` device, so that only these are compiled.

If a step needs a kernel of another set after all, the reference implementation computes it until that set has been compiled, and
the log says so (engine/cpu/ops.py).
"""

from __future__ import annotations

from loader.architectures.decoder import SILU, Decoder
from loader.architectures.eagle import layer_family
from loader.architectures.registry import architecture_of
from loader.architectures.wrapper import Wrapper
from loader.configs.kernel_sets import (
    ADAPTERS,
    ATTENTION,
    DELTAS,
    EXPERTS,
    GELU,
    GREEDY,
    LAYER_NORM,
    PLAIN,
    RANKS,
    SAMPLING,
    KernelSet,
)
from loader.formats.weight_format import WeightFormat
from loader.shapes.model_shape import ModelShape

# Rows whose logits are edited are sampled in float32, whatever the model's dtype.
_OF_EDITED_ROWS = [KernelSet("float32", GREEDY), KernelSet("float32", SAMPLING)]


def needed_kernels(
    shape: ModelShape, dtype: str, weight_format: WeightFormat, is_split: bool = False, has_adapters: bool = False
) -> list[KernelSet]:
    """Returns the sets of compiled CPU kernels that the steps of a model call; none for an encoder. dtype: the dtype in which the
    model is computed. is_split: whether it is divided among several devices. has_adapters: whether LoRA adapters may be applied.

    There are no kernels for float16. A float16 model needs only two kinds of sets, both for float32: those for sampling and, if it
    is split, the one for collectives between devices."""
    family = architecture_of(shape)
    if not isinstance(family, Decoder | Wrapper):
        return []
    further = [RANKS] if is_split else []
    samples = not shape.pooling
    if dtype == "float16":
        return [KernelSet("float32", name) for name in further] + (_OF_EDITED_ROWS if samples else [])
    names = [PLAIN, *sorted(_of_layers(family.decoder_of(shape), shape)), *further]
    if weight_format.kernels:
        names.append(weight_format.kernels)
    if weight_format.expert_kernels and shape.experts is not None:
        names.append(weight_format.expert_kernels)
    if has_adapters:
        names.append(ADAPTERS)
    if samples:
        names += [GREEDY, SAMPLING]
    found = [KernelSet(dtype, name) for name in names]
    return found + [one for one in _OF_EDITED_ROWS if samples and one not in found]


def _of_layers(family: Decoder, shape: ModelShape) -> set[str]:
    """Returns the names of the kernel sets that the layers of a model and of its draft head call. The set PLAIN, which every
    decoder needs, is left out."""
    found = set()
    if shape.latent is None:
        found.add(ATTENTION)
    if shape.delta is not None:
        found.add(DELTAS)
    if shape.experts is not None:
        found.add(EXPERTS)
    if family.has_layer_norms:
        found.add(LAYER_NORM)
    if family.activation != SILU or shape.layer_inputs is not None:
        found.add(GELU)
    if shape.eagle is not None:
        found |= _of_layers(layer_family(shape.eagle), shape.eagle.layer)
    return found
