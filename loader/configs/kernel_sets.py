"""Names the sets of kernels of the `cpu` device. Each set has the kernels of one kind of operation, such as attention.
engine/cpu/kernel_units.py lists the kernels of each set. Some weight formats have sets of their own (WeightFormat.kernels).
"""

from __future__ import annotations

from typing import NamedTuple

PLAIN = ""  # a step's inputs, embeddings, products of plain matrices, RMS norms, SwiGLU
ATTENTION = "attention"  # attention over keys and values of each head, and the kernels that rotate and store these
LAYER_NORM, GELU, EXPERTS, DELTAS = "layer_norm", "gelu", "experts", "deltas"
GREEDY = "greedy"  # choice of the most likely token
SAMPLING = "sampling"  # any other choice, log-probabilities, penalties
OF_DECODERS = (PLAIN, ATTENTION, LAYER_NORM, GELU, EXPERTS, DELTAS, GREEDY, SAMPLING)
ADAPTERS = "adapters"  # for models with LoRA adapters
RANKS = "ranks"  # for models that are split over devices
INT8_EXPERTS = "int8_experts"  # products of experts in int8
_WORDS = {
    PLAIN: "{dtype}",
    ATTENTION: "attention in {dtype}",
    LAYER_NORM: "LayerNorm in {dtype}",
    GELU: "GELU in {dtype}",
    EXPERTS: "experts in {dtype}",
    DELTAS: "delta rules in {dtype}",
    GREEDY: "greedy choice in {dtype}",
    SAMPLING: "sampling in {dtype}",
    ADAPTERS: "{dtype} with LoRA adapters",
    RANKS: "{dtype} of models that are split",
    INT8_EXPERTS: "{dtype} with int8 experts",
}


class KernelSet(NamedTuple):
    """A set of kernels of the `cpu` device for elements of one dtype, float32 or bfloat16. name: the purpose of the kernels, such
    as "attention"; "": the kernels that every decoder needs."""

    dtype: str
    name: str

    def __str__(self) -> str:
        return _WORDS.get(self.name, "{dtype} with {name} weights").format(dtype=self.dtype, name=self.name)

    @property
    def title(self) -> str:
        """The name of the set in messages for operators. It is "sampling" for the sets that choose tokens, and a description such
        as "bfloat16 with LoRA adapters" for sets that only some models need. For the sets that all decoders with plain weights need
        it is the dtype alone, for example "bfloat16"."""
        if self.name in (GREEDY, SAMPLING):
            return "sampling"
        return self.dtype if self.name in OF_DECODERS else str(self)
