"""Reads from config.json to which sizes a model's vectors may be shortened (Matryoshka embeddings)."""

from __future__ import annotations

from loader.shapes.config_fields import Fields

MAX_CUT_SIZES = 4096


def cut_sizes(fields: Fields, hidden_size: int) -> tuple[tuple[int, ...], bool]:
    """Returns (sizes to which a model's vectors may be shortened, whether they may be shortened to any size). The sizes are those
    of `matryoshka_dimensions`, ascending; any size is allowed if that list is absent or empty and `is_matryoshka` is true. Raises
    CheckpointError, which names the key, for a list that is not valid."""
    if not fields.has("matryoshka_dimensions"):
        return (), fields.boolean("is_matryoshka")
    sizes = fields.values["matryoshka_dimensions"]
    if not isinstance(sizes, list) or not all(type(size) is int and 1 <= size <= hidden_size for size in sizes):
        raise fields.fail("matryoshka_dimensions", f"{sizes!r} is not a list of sizes from 1 to hidden_size {hidden_size}")
    if len(sizes) > MAX_CUT_SIZES:
        raise fields.fail("matryoshka_dimensions", f"holds {len(sizes)} sizes (at most {MAX_CUT_SIZES})")
    return tuple(sorted(sizes)), not sizes and fields.boolean("is_matryoshka")
