"""Computes the frequencies of the rotary position embedding, with the scalings that checkpoints ask for. A longer wavelength is a
lower frequency; to stretch a wavelength by a factor means to divide the frequency by it. The kinds of scaling:

linear: all wavelengths are stretched by `factor`.

llama3: wavelengths longer than original / low_freq_factor are stretched by `factor`, those shorter than original / high_freq_factor
stay, and those between are blended (Llama 3.1's model card; https://arxiv.org/abs/2407.21783).

longrope: each frequency is divided by a factor of its own. There are two lists of factors, one for contexts up to the original
length and one for longer ones (https://arxiv.org/abs/2402.13753). Stored keys cannot change lists, so the longest context with
which the model is served decides for all its sequences.

dynamic: the base grows with the context beyond the original length. Here, too, the longest context decides for all sequences.

yarn: dimensions that rotate often within the original length keep their frequency, those that hardly rotate are stretched by
`factor`, and those between are blended (https://arxiv.org/abs/2309.00071).

proportional: the frequencies are those of a rotation of the whole head, divided by `factor`, but only the first pairs rotate; the
angle of the others is 0."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.ops.ops import Rotary
from loader.shapes.model_shape import ModelShape
from loader.shapes.rope_config import PROPORTIONAL, RopeParameters


def rotaries_of(shape: ModelShape, max_model_len: int) -> tuple[Rotary, Rotary]:
    """Returns the rotary embedding (RoPE) of a model's full-attention layers, and that of its sliding-window layers; the same
    object twice if both are equal. max_model_len: the longest context with which the model is served, in tokens."""

    def made(rope: RopeParameters, head_dim: int) -> Rotary:
        return Rotary(inverse_frequencies(rope, head_dim, max_model_len), rope.attention_factor)

    full_head_dim, head_dim = shape.rotary_head_dims
    if shape.temperature is not None:  # layers without windows are not rotated, that is, rotated by an angle of 0
        local = made(shape.rope, head_dim)
        return Rotary(torch.zeros_like(local.inv_freq), temperature=shape.temperature), local
    rotary = made(shape.rope, full_head_dim)
    return rotary, rotary if shape.local_rope is None else made(shape.local_rope, head_dim)


def inverse_frequencies(rope: RopeParameters, head_dim: int, max_model_len: int) -> Tensor:
    """Returns the frequencies of a rotary embedding (RoPE), [rotary dimensions / 2] float32: the angle in radians by which each
    pair of dimensions rotates per position. rope: the checkpoint's settings, with the kind of scaling. max_model_len: the longest
    context with which the model is served, in tokens, on which some kinds depend."""
    turning = rope.rotary_dim(head_dim)
    if rope.kind == PROPORTIONAL:
        num_turned = int(rope.partial_rotary_factor * head_dim // 2)
        inv_freq = torch.zeros(turning // 2)
        inv_freq[:num_turned] = 1.0 / (rope.theta ** (torch.arange(0, 2 * num_turned, 2, dtype=torch.int64).float() / head_dim))
        return inv_freq / rope.factor
    exponents = torch.arange(0, turning, 2, dtype=torch.int64).float() / turning
    if rope.kind == "longrope":
        is_long = max_model_len > rope.original_max_position_embeddings
        factors = torch.tensor(rope.long_factors if is_long else rope.short_factors, dtype=torch.float32)
        return 1.0 / (factors * rope.theta**exponents)
    inv_freq = 1.0 / (_base(rope, turning, max_model_len) ** exponents)
    if rope.kind == "yarn":
        stretch = _yarn_ramp(rope, turning)
        return inv_freq * (1 - stretch) + inv_freq / rope.factor * stretch
    if rope.kind == "linear":
        return inv_freq / rope.factor
    if rope.kind != "llama3":
        return inv_freq
    original = rope.original_max_position_embeddings
    wavelength = 2 * math.pi / inv_freq
    stretched = torch.where(wavelength > original / rope.low_freq_factor, inv_freq / rope.factor, inv_freq)
    if rope.low_freq_factor == rope.high_freq_factor:  # no wavelength lies between
        return stretched
    blend = (original / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * stretched / rope.factor + blend * stretched
    between = (wavelength <= original / rope.low_freq_factor) & (wavelength >= original / rope.high_freq_factor)
    return torch.where(between, blended, stretched)


def _base(rope: RopeParameters, turning: int, max_model_len: int) -> float:
    """Returns the base of the frequencies: rope.theta, or, with dynamic scaling and max_model_len beyond the original length, the
    larger base for contexts of max_model_len positions. turning: number of a head's dimensions that are rotated."""
    original = rope.original_max_position_embeddings
    if rope.kind != "dynamic" or max_model_len <= original:
        return rope.theta
    return float(rope.theta * (rope.factor * max_model_len / original - (rope.factor - 1)) ** (turning / (turning - 2)))


def _yarn_ramp(rope: RopeParameters, turning: int) -> Tensor:
    """Returns for each pair of dimensions, [turning / 2], how much yarn scaling stretches it, from 0 (the pair keeps its frequency)
    to 1 (its frequency is divided by rope.factor). turning: number of a head's dimensions that are rotated."""

    def pair(turns: float) -> float:
        """Returns the index of the pair of dimensions that makes `turns` full rotations within the original length, as a fractional
        number."""
        return turning * math.log(rope.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, turning - 1)
    width = last - first or 0.001  # a step if both are equal
    return ((torch.arange(turning // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
