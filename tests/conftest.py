"""Triton reads this when it is first imported, which may be in any test module: without a GPU its kernels are interpreted."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
