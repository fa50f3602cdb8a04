"""Picks the implementation that decodes packed weight files on the host, for weights of any device."""

from __future__ import annotations

import importlib.util

from engine.host import compiled
from loader.reading.unpack import Decoder


def weight_decoder(cache_dir: str) -> Decoder:
    """Returns the decoder of packed weights: Numba's if Numba is installed, else numpy's. cache_dir: the folder below which Numba's
    decoder is kept once it is compiled; "": the user's cache."""
    if importlib.util.find_spec("numba") is None:
        return Decoder()
    compiled.keep_in(cache_dir)
    from engine.host import unpack_kernels

    return Decoder("numba", unpack_kernels.decode, unpack_kernels.sum_of)
