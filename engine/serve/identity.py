"""Makes texts that are a part of the keys of cached KV. KV that one load of a model has computed may be used in another load only
if these texts are the same."""

from __future__ import annotations

from engine.protocol import AdapterSource, LoadModel


def weights_identity(spec: LoadModel) -> str:
    """Returns a text that is the same for two loads of a model if the model's files and the weight format are the same. Weights in
    another format give other keys and values."""
    return spec.fingerprint + spec.quantize


def kv_identity(spec: LoadModel) -> str:
    """Returns a text that identifies what is stored as KV: the dtype in which keys and values are computed, the dtype in which they
    are stored, and the predictor, if there is one, whose keys and values are stored, too."""
    return spec.dtype + spec.kv_cache_dtype + (spec.speculator if spec.predicts else "")


def adapter_identity(source: AdapterSource) -> str:
    """Returns an adapter's name, fingerprint and folder as one text, which is the adapter's key in the engine. The text is also a
    part of the keys of cached prefixes, because the same tokens have other keys and values with another adapter."""
    return f"{source.name}\0{source.fingerprint}\0{source.path}"


def adapter_source(identity: str) -> AdapterSource:
    """Returns the name, folder and fingerprint of the adapter whose key, made by adapter_identity, is `identity`."""
    name, fingerprint, path = identity.rsplit("\0", 2)  # neither a path nor a fingerprint contains a zero
    return AdapterSource(name, path, fingerprint)
