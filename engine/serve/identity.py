"""What tells the keys and values of one load from those of another: they may be taken over only where both are the same."""

from __future__ import annotations

from engine.protocol import AdapterSource, LoadModel


def weights_identity(spec: LoadModel) -> str:
    """Names the files and the weight format: weights of another format give other keys and values."""
    return spec.fingerprint + spec.quantize


def kv_identity(spec: LoadModel) -> str:
    """Names what keys and values are computed in, what they are kept in, and whether those of a predictor are among them."""
    return spec.dtype + spec.kv_cache_dtype + (spec.speculator if spec.predicts else "")


def adapter_identity(source: AdapterSource) -> str:
    """Names an adapter's files: rows of others give other keys and values."""
    return f"{source.name}\0{source.fingerprint}"


def adapter_name(identity: str) -> str:
    """Returns the name in what adapter_identity returned."""
    return identity.partition("\0")[0]
