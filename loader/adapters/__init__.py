"""Opens LoRA adapters (https://huggingface.co/docs/peft) for a base model: their tensors, and how they lie in memory. What an
adapter's files say is in loader/models/adapter.py, and which matrix multiplications of a model adapters may change in
loader/configs/adapter_matrices.py."""
