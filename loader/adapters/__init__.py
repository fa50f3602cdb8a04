"""LoRA adapters in the format of PEFT (https://huggingface.co/docs/peft): what their files say, which matrices of a base model they
change, and how an adapter lies in memory."""
