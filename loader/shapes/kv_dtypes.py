"""Lists the types in which keys and values can be held: the model's own dtype, or one of KV_CACHE_DTYPES. CONTRIBUTING.md says how
to add one.
"""

from __future__ import annotations

from dataclasses import dataclass

from loader.shapes.dtypes import DTYPES, ITEM_BYTES


@dataclass(slots=True, frozen=True)
class KVDtype:
    """A type in which keys and values can be held.

    name: a dtype of models, or a value of the setting `kv_cache_dtype`. item_bytes: bytes of an element. scale_bytes: bytes of the
    scale that the elements of one token in one head share; 0: there is no scale. device_kinds: the kinds of devices (cuda, cpu)
    that have kernels for the type; (): all. capability: the lowest compute capability of a GPU that can compute with it; (8, 9)
    means 8.9."""

    name: str
    item_bytes: int
    scale_bytes: int = 0
    device_kinds: tuple[str, ...] = ()
    capability: tuple[int, int] = (0, 0)

    def head_bytes(self, head_dim: int) -> int:
        """Returns the bytes of one token's keys, or of its values, in one KV head of head_dim dimensions."""
        return head_dim * self.item_bytes + self.scale_bytes

    def runs_on(self, kind: str) -> bool:
        """Returns whether devices of the given kind (cuda, cpu) have kernels for this type of keys and values."""
        return not self.device_kinds or kind in self.device_kinds

    @property
    def about_devices(self) -> str:
        """A clause for messages that says which kinds of devices have kernels for this type. Only for a type that has kernels for
        some kinds of devices, not for all."""
        return f"{self.name} is built for {' and '.join(self.device_kinds)} devices only"


KV_FP8 = "fp8"  # float8_e4m3fn, and one power of two for each head of a token (engine/cuda/kernels/triton_fp8.py)
FP8_CAPABILITY = (8, 9)  # of the first GPUs that convert float8_e4m3

KV_CACHE_DTYPES = {KV_FP8: KVDtype(KV_FP8, 1, 1, ("cuda",), FP8_CAPABILITY)}
_OWN = {dtype: KVDtype(dtype, ITEM_BYTES[dtype]) for dtype in DTYPES}


def kv_dtype_named(name: str) -> KVDtype:
    """Returns the type of keys and values with the name `name`. Raises KeyError if there is none."""
    return KV_CACHE_DTYPES.get(name) or _OWN[name]


def asked_kv_cache_dtype(setting: str) -> str:
    """Returns the name in KV_CACHE_DTYPES that the setting `kv_cache_dtype` asks for; "": it asks for the model's dtype."""
    return setting if setting in KV_CACHE_DTYPES else ""


def kv_dtype_of(dtype: str, kv_cache_dtype: str) -> str:
    """Returns the name of the type in which keys and values are held. dtype: the model's dtype. kv_cache_dtype: a name in
    KV_CACHE_DTYPES; "": keys and values have the model's dtype."""
    return kv_cache_dtype or dtype
