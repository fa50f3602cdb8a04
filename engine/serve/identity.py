"""Computes the identities of keys and values: KV of one load of a model may be used in another load only if the identities are the
same."""

from __future__ import annotations

from engine.protocol import AdapterSource, LoadModel


def weights_identity(spec: LoadModel) -> str:
    """Returns an identity of a model's files and its weight format, because weights in another format give other keys and
    values."""
    return spec.fingerprint + spec.quantize


def kv_identity(spec: LoadModel) -> str:
    """Returns an identity of the dtypes in which a model's keys and values are computed and stored, and of whether its predictor's
    keys and values are among them."""
    return spec.dtype + spec.kv_cache_dtype + (spec.speculator if spec.predicts else "")


def adapter_identity(source: AdapterSource) -> str:
    """Returns an identity of an adapter's name and files, because rows with another adapter have other keys and values."""
    return f"{source.name}\0{source.fingerprint}\0{source.path}"


def adapter_source(identity: str) -> AdapterSource:
    """Returns where the adapter with this adapter_identity is read from."""
    name, fingerprint, path = identity.rsplit("\0", 2)  # neither a path nor a fingerprint contains a zero
    return AdapterSource(name, path, fingerprint)
