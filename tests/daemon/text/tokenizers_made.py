"""Small tokenizers of the kinds that are supported, made on the spot."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from daemon.models.entry import ModelEntry
from tests.daemon.api.fakes import entry

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 10 o'clock; the café is naïve, isn't it?",
    "def f(x):\n    return x ** 2  # Grüße aus Köln, ça va? привет мир, 你好，世界 😀🎉",
    '{"key": "value", "list": [1, 2, 3]}\t\ttabs  and   spaces',
] * 4
CHATML = (
    "{% for message in messages %}{{ '<|start|>' + message['role'] + '\\n' + message['content'] + '<|end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"
)


def byte_level(vocab_size: int = 400) -> Tokenizer:
    """GPT-2's and Llama 3's kind."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=["<|start|>", "<|end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.add_tokens(["plain added", AddedToken("éclair"), "\n\n\n", "日本"])
    tokenizer.add_special_tokens(["<|late|>"])
    return tokenizer


def byte_fallback(strip: bool = True) -> Tokenizer:
    """Llama 2's kind (with `strip`), Gemma's without."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256))]
    pieces += ["▁", "▁The", "▁fox", "a", "b", "c", "é", "▁▁", "▁a", ".", "x", "<0x", "你"]
    vocab = {piece: at for at, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "a"), ("▁", "▁")], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.add_tokens(["added one", " spaced "])
    return tokenizer


def metaspace(prepend_scheme: str = "always") -> Tokenizer:
    """T5's kind."""
    pieces = [("<unk>", 0.0), ("▁", -2.0), ("▁The", -1.0), ("▁fox", -1.5), ("a", -3.0), ("▁a", -2.5), ("é", -4.0), ("a▁b", -5.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme)
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.add_tokens([" with spaces ", "x▁y z"])
    return tokenizer


def checkpoint(folder: Path, tokenizer: Tokenizer, **config: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def model(folder: Path, **changes: object) -> ModelEntry:
    """The entry of a checkpoint's folder, for texts of any length that tests encode."""
    return entry(folder.name, path=str(folder), aliases=(), **{"max_model_len": 1 << 26, **changes})
