"""Computes the identities of keys and values: KV of one load may be used in another only if its identities are the same."""

from __future__ import annotations

from engine.protocol import AdapterSource, LoadModel


def weights_identity(spec: LoadModel) -> str:
    """Returns a name of the files and the weight format, because weights in another format give different keys and values."""
    return spec.fingerprint + spec.quantize


def kv_identity(spec: LoadModel) -> str:
    """Returns a name of the dtypes in which keys and values are computed and stored, and of whether a predictor's are among
    them."""
    return spec.dtype + spec.kv_cache_dtype + (spec.speculator if spec.predicts else "")


def adapter_identity(source: AdapterSource) -> str:
    """Returns a name of an adapter's files, because rows with another adapter have different keys and values."""
    return f"{source.name}\0{source.fingerprint}"


def adapter_name(identity: str) -> str:
    """Returns the adapter's name from the result of adapter_identity."""
    return identity.partition("\0")[0]
