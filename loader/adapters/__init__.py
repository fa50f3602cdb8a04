"""Opens LoRA adapters (https://huggingface.co/docs/peft) for a base model: their tensors, and how they lie in memory. What an
adapter's files say is in loader/adapter.py, and which products of a model adapters may change in loader/adapter_matrices.py."""
