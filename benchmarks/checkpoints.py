"""Seeded checkpoints to measure on: random weights, a real byte-level BPE trained on the standard library, Hugging Face layout.

`feather` (1 layer, 64 wide, vocabulary 32,000) makes device time negligible, so that what is left is the cost of serving;
`mid` has 125 M parameters, `one-b` 1.1 G; `mixture` has 1.1 G, in 16 experts, of which a token passes through 2 and reads 185 M.
NAME-int4 is checkpoint NAME with its layers' matrices in INT4, with a scale for each 128 inputs.
usage: python -m benchmarks.checkpoints OUT [name ...]
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import sysconfig
from typing import Any

SHAPES: dict[str, dict[str, int]] = {
    "feather": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
    "mid": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
    },
    "one-b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "mixture": {
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 10,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "num_local_experts": 16,
        "num_experts_per_tok": 2,
    },
}
INT4, INT4_GROUP = "-int4", 128
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]


def train_tokenizer(vocab_size: int = 32000) -> Any:
    """A byte-level BPE over the standard library's sources."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    files = [str(p) for p in sorted(root.glob("*.py"))[:200]]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train(files, trainer)
    return tokenizer


def write_tokenizer(folder: pathlib.Path, tokenizer: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "bos_token": SPECIAL[0], "eos_token": SPECIAL[1]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 1}))


def write_model(folder: pathlib.Path, shape: dict[str, int], vocab_size: int, tied: bool) -> None:
    """Weights of a Llama of that shape, or of a Mixtral if it has experts, seeded, in bfloat16."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    torch.manual_seed(7)
    has_experts = "num_local_experts" in shape
    config = (MixtralConfig if has_experts else LlamaConfig)(
        vocab_size=vocab_size,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        tie_word_embeddings=tied,
        **shape,
    )
    (MixtralForCausalLM if has_experts else LlamaForCausalLM)(config).to(torch.bfloat16).save_pretrained(folder)


def make(out: pathlib.Path, name: str) -> pathlib.Path:
    """The folder of checkpoint `name` below `out`, built if it is not there yet."""
    folder = out / name
    if (folder / "done").exists():
        return folder
    if name.endswith(INT4):
        from tests.loader.int4 import compressed, quantize

        source = make(out, name.removesuffix(INT4))
        quantize(source, folder, compressed({"group_size": INT4_GROUP}))
        return folder
    tokenizer = train_tokenizer()
    write_model(folder, SHAPES[name], tokenizer.get_vocab_size(), tied=name == "feather")
    write_tokenizer(folder, tokenizer)
    (folder / "done").write_text("")
    return folder


def link_models(models: pathlib.Path, checkpoint: pathlib.Path, *names: str) -> None:
    """Makes a model of each of these names below `models`, all of hard links to one checkpoint that `make` has built, so that the
    page cache holds its files once."""
    for name in names:
        (models / name).mkdir(parents=True)
        for file in checkpoint.iterdir():
            if file.name != "done":
                os.link(file, models / name / file.name)


def make_large_tokenizer(folder: pathlib.Path, source: pathlib.Path, vocab_size: int = 128_000) -> None:
    """Copies checkpoint `source` but with a vocabulary of `vocab_size` entries: added merges over random byte pairs, so that
    parsing it costs what a real tokenizer of that size costs."""
    import random
    import shutil

    shutil.copytree(source, folder, dirs_exist_ok=True)
    data = json.loads((source / "tokenizer.json").read_text())
    vocab: dict[str, int] = data["model"]["vocab"]
    merges = data["model"]["merges"]
    rng, known = random.Random(11), [t for t in vocab if t not in SPECIAL]
    while len(vocab) < vocab_size:
        left, right = rng.choice(known), rng.choice(known)
        if left + right not in vocab and len(left + right) < 16:
            vocab[left + right] = len(vocab)
            merges.append([left, right])
    (folder / "tokenizer.json").write_text(json.dumps(data))


if __name__ == "__main__":
    for wanted in sys.argv[2:] or ["feather", "mid"]:
        print(make(pathlib.Path(sys.argv[1]), wanted))
