"""Checks that a device still computes correctly, by a token that is known in advance."""

from __future__ import annotations

import torch

_NUM_IDS = 64


def probe_token(number: int, device: torch.device) -> tuple[int, int]:
    """Returns the token that the device computes for `number`, and the correct token. The device computes the greedy choice of a
    model of 64 ids whose embeddings and weights are the identity, so number % 64 is correct. Waits for the device, and raises the
    device's errors. No library for matrix multiplication is called, because that would take work space."""
    ids = torch.arange(_NUM_IDS, device=device)
    embedding = (ids == number % _NUM_IDS).to(torch.float32)
    logits = (torch.eye(_NUM_IDS, device=device) * embedding).sum(-1)
    return int(logits.argmax()), number % _NUM_IDS
