"""Opens LoRA adapters (https://huggingface.co/docs/peft) for a base model: reads their tensors and computes their layout in memory.
loader/models/adapter.py reads what an adapter's files say; loader/configs/adapter_matrices.py lists the matrix multiplications of a
model that adapters may change.
"""
