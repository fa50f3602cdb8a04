from __future__ import annotations

from loader.sizes.work_space import logits_rows, work_space_bytes
from tests.loader.checkpoints import shape


def test_logits_of_all_sequences_are_computed_at_once_where_they_fit() -> None:
    """Rows are padded to a multiple of 8, so logits have room for as many."""
    rows = [logits_rows(shape(), "bfloat16", num) for num in (1, 7, 8, 9, 30, 32)]
    assert rows == [1, 7, 8, 16, 32, 32]
    large = shape(vocab_size=300_000)
    assert [logits_rows(large, "bfloat16", num) for num in (9, 30)] == [8, 8]


def test_work_space_grows_with_what_it_depends_on() -> None:
    model = shape(vocab_size=32000, max_position_embeddings=4096)
    base = work_space_bytes(model, "bfloat16", 512, 64, 1024)
    assert base < work_space_bytes(model, "bfloat16", 4096, 64, 1024)
    assert base < work_space_bytes(model, "float32", 512, 256, 1024)
    assert work_space_bytes(model, "bfloat16", 512, 64) == work_space_bytes(model, "bfloat16", 512, 64, 4096)
    assert base < 64 << 20
