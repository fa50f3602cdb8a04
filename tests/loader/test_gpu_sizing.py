from __future__ import annotations

from dataclasses import replace

from loader.gpu_sizing import LIBRARY_BYTES, gpu_work_space_bytes
from loader.work_space import work_space_bytes
from tests.loader.checkpoints import shape


def test_it_grows_with_tokens_sequences_and_item_size() -> None:
    model = shape(vocab_size=512, intermediate_size=4096)
    base = gpu_work_space_bytes(model, "bfloat16", 512, 64)
    assert LIBRARY_BYTES < base < gpu_work_space_bytes(model, "bfloat16", 4096, 64)
    assert base < gpu_work_space_bytes(shape(vocab_size=200_000), "bfloat16", 512, 64)
    assert base < gpu_work_space_bytes(model, "float32", 512, 64)
    predicting = gpu_work_space_bytes(replace(model, predicts=True), "bfloat16", 512, 64)
    assert predicting > base + 3 * 512 * model.hidden_size * 2, "hidden states of all tokens, and what the predictor makes of them"
    in_gptq, ordered = (replace(model, stored_format=name) for name in ("gptq by 32", "gptq by 32, desc_act"))
    assert base < gpu_work_space_bytes(in_gptq, "bfloat16", 512, 64) < gpu_work_space_bytes(ordered, "bfloat16", 512, 64)
    assert gpu_work_space_bytes(model, "bfloat16", 16, 64) == gpu_work_space_bytes(model, "bfloat16", 64, 64)


def test_a_large_model_with_a_long_context_needs_a_fraction_of_the_cpus() -> None:
    """Llama 3.1 8B: 32 heads of 128, 8 KV heads, 131,072 positions."""
    llama = shape(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=128256,
        max_position_embeddings=131072,
    )
    needed = gpu_work_space_bytes(llama, "bfloat16", 4096, 256)
    # the MLP's arrays of 4,096 tokens, or logits of 256 rows
    assert 4096 * 14336 * 3 * 2 < needed < 1 << 30
    assert work_space_bytes(llama, "bfloat16", 4096, 256, 131072) > 4 << 30
