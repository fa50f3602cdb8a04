"""Computes the identities of keys and values: KV of one load of a model may be used in another load only if the identities are the
same."""

from __future__ import annotations

from engine.protocol import AdapterSource, LoadModel


def weights_identity(spec: LoadModel) -> str:
    """Returns a text that is the same for two loads if the model's files and weight format are: weights in another format give
    other keys and values."""
    return spec.fingerprint + spec.quantize


def kv_identity(spec: LoadModel) -> str:
    """Returns a text that is the same for two loads if the dtypes in which keys and values are computed and stored are, and if both
    or neither have the predictor's keys and values among them."""
    return spec.dtype + spec.kv_cache_dtype + (spec.speculator if spec.predicts else "")


def adapter_identity(source: AdapterSource) -> str:
    """Returns an adapter's name, fingerprint and folder as one text, the key of the adapter. It is a part of the keys of cached
    prefixes, because the same tokens have other keys and values with another adapter."""
    return f"{source.name}\0{source.fingerprint}\0{source.path}"


def adapter_source(identity: str) -> AdapterSource:
    """Returns the adapter's name, folder and fingerprint that adapter_identity has made into `identity`."""
    name, fingerprint, path = identity.rsplit("\0", 2)  # neither a path nor a fingerprint contains a zero
    return AdapterSource(name, path, fingerprint)
