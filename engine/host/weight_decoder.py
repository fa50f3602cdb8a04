"""Picks the implementation that decodes packed weight files on this host, whatever device the weights are for."""

from __future__ import annotations

import importlib.util

from engine.host import compiled
from loader.reading.unpack import Decoder


def weight_decoder(cache_dir: str) -> Decoder:
    """Returns the decoder of packed weights: Numba's, compiled once per machine and kept below cache_dir ("": the user's cache), if
    Numba is installed; else numpy's."""
    if importlib.util.find_spec("numba") is None:
        return Decoder()
    compiled.keep_in(cache_dir)
    from engine.host import unpack_kernels

    return Decoder("numba", unpack_kernels.decode, unpack_kernels.sum_of)
