"""Lists the types in which weights are held, and the bytes of an element of each."""

from __future__ import annotations

from collections.abc import Collection

DTYPES = ("float32", "bfloat16", "float16")
E8M0 = "e8m0"  # powers of two, stored as exponents plus 127: the scales of MXFP4
FP8 = "float8_e4m3fn"  # only for weights, which are held as codes
SCALES_IN = {"bfloat16": "bfloat16 scales", "float16": "float16 scales"}  # scales of INT4 weights: finite numbers, held unchanged
FLOAT_OF = {name: name for name in DTYPES} | {target: name for name, target in SCALES_IN.items()}  # the dtype of the numbers
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, FP8: 1, E8M0: 1, "int64": 8} | dict.fromkeys(SCALES_IN.values(), 2)
# safetensors' name of a dtype -> hearthd's
DTYPE_OF = {
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "I8": "int8",
    "I32": "int32",
    "I64": "int64",
    "U8": "uint8",
    "F8_E4M3": FP8,
}


def computed_dtype(asked: str, stored: str, kinds: Collection[str]) -> str:
    """Returns the dtype in which a model is computed. asked: the value of the setting `dtype`. "auto" means the dtype that the
    checkpoint stores; but a float16 model becomes bfloat16 if every device that may hold it is a cpu device, which has no kernels
    for float16. kinds: the kinds of these devices (cuda, cpu)."""
    if asked != "auto":
        return asked
    return "bfloat16" if stored == "float16" and set(kinds) == {"cpu"} else stored
