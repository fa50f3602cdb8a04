"""The types in which weights are held, and the sizes of their elements."""

from __future__ import annotations

DTYPES = ("float32", "bfloat16", "float16")
E8M0 = "e8m0"  # powers of two, as their exponents plus 127: the scales of MXFP4
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, E8M0: 1}
DTYPE_OF = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "I8": "int8", "U8": "uint8"}  # safetensors' name -> ours
