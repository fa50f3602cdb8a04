"""Frequencies of the rotary position embedding, with the scalings checkpoints ask for.

llama3: wavelengths longer than original / low_freq_factor are stretched by `factor`, those shorter than original / high_freq_factor
stay, those between are blended (Llama 3.1's model card; https://arxiv.org/abs/2407.21783).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from loader.hf_config import RopeParameters


def inverse_frequencies(rope: RopeParameters, head_dim: int) -> Tensor:
    """[head_dim / 2] float32: the angle each pair of dimensions turns by per position."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    inv_freq = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return inv_freq / rope.factor
    if rope.kind != "llama3":
        return inv_freq
    original = rope.original_max_position_embeddings
    wavelength = 2 * math.pi / inv_freq
    stretched = torch.where(wavelength > original / rope.low_freq_factor, inv_freq / rope.factor, inv_freq)
    blend = (original / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * stretched / rope.factor + blend * stretched
    between = (wavelength <= original / rope.low_freq_factor) & (wavelength >= original / rope.high_freq_factor)
    return torch.where(between, blended, stretched)
