"""Lists the dtypes of weights in files and in memory, and the bytes of an element of each."""

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
    """Returns the dtype in which a model is computed: the value of the setting `dtype` or, if that is "auto", the dtype that the
    checkpoint stores. There is one exception to "auto": a float16 model becomes bfloat16 if only cpu devices may hold it, because
    they have no kernels for float16. asked: the value of the setting. stored: the dtype that the checkpoint stores. kinds: the
    kinds (cuda, cpu) of the devices that may hold the model."""
    if asked != "auto":
        return asked
    return "bfloat16" if stored == "float16" and set(kinds) == {"cpu"} else stored
