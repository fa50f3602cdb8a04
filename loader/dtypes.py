"""The types in which weights are held, and the sizes of their elements."""

from __future__ import annotations

DTYPES = ("float32", "bfloat16", "float16")
FP8 = "float8_e4m3fn"  # weights only, as codes
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, FP8: 1}
DTYPE_OF = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "I8": "int8", "F8_E4M3": FP8}  # safetensors' name -> ours
