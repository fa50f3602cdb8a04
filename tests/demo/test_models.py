"""The committed demo models: small, loadable by anyone's loader, and taught to speak and to stop."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open

from demo.corpus import build_documents
from demo.train import CHAT_TEMPLATE, SHAPES, VOCAB_SIZE, model_config

MODELS = Path(__file__).resolve().parents[2] / "demo" / "models"
NAMES = sorted(SHAPES)
LIMIT_BYTES = 8_500_000


@cache
def tokenizer_of(name: str) -> transformers.PreTrainedTokenizerFast:
    return transformers.AutoTokenizer.from_pretrained(MODELS / name)


@cache
def model_of(name: str) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(MODELS / name, dtype=torch.float32).eval()


@cache
def known_words() -> frozenset[str]:
    """Every word of the training text, in lower case."""
    return frozenset(w for d in build_documents() for p in d.paragraphs for w in re.findall(r"[a-z]+", p.lower()))


def greedy_answer(name: str, prompt: str, max_tokens: int = 220) -> tuple[str, int]:
    """(text, id of the last token) of a chat turn at temperature 0."""
    chat = [{"role": "user", "content": prompt}]
    ids = tokenizer_of(name).apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    mask = torch.ones_like(ids)
    options = {"do_sample": False, "temperature": None, "top_p": None, "max_new_tokens": max_tokens}
    output = model_of(name).generate(ids, attention_mask=mask, **options)[0, ids.shape[1] :].tolist()
    return tokenizer_of(name).decode(output, skip_special_tokens=True), output[-1]


def test_folders_are_the_models_and_stay_small() -> None:
    assert sorted(p.name for p in MODELS.iterdir() if p.is_dir()) == NAMES
    assert sum(p.stat().st_size for p in MODELS.rglob("*") if p.is_file()) <= LIMIT_BYTES


@pytest.mark.parametrize("name", NAMES)
def test_settings_are_those_the_training_writes(name: str) -> None:
    assert json.loads((MODELS / name / "config.json").read_text()) == model_config(SHAPES[name])
    tokenizer_config = json.loads((MODELS / name / "tokenizer_config.json").read_text())
    assert tokenizer_config["chat_template"] == CHAT_TEMPLATE
    generation = json.loads((MODELS / name / "generation_config.json").read_text())
    tokenizer = tokenizer_of(name)
    assert generation["eos_token_id"] == tokenizer.convert_tokens_to_ids(["<|end|>", "<|endoftext|>"])
    assert len(tokenizer) == VOCAB_SIZE <= 2048


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_those_the_config_asks_for(name: str) -> None:
    config = transformers.AutoConfig.from_pretrained(MODELS / name)
    with torch.device("meta"):
        wanted = {k: list(t.shape) for k, t in transformers.AutoModelForCausalLM.from_config(config).state_dict().items()}
    del wanted["lm_head.weight"]  # tied to the embedding
    with safe_open(MODELS / name / "model.safetensors", "pt") as weights:
        slices = {key: weights.get_slice(key) for key in weights.keys()}  # noqa: SIM118 - not a mapping
    assert {key: s.get_shape() for key, s in slices.items()} == wanted
    assert {s.get_dtype() for s in slices.values()} == {"BF16"}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "text", ["Return True if the file is closed.\n\n  x", "naïve — 日本語 🙂", "\t\x00\x7f", " leading and trailing "]
)
def test_tokenizer_gives_back_what_it_was_given(name: str, text: str) -> None:
    tokenizer = tokenizer_of(name)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert max(ids) < VOCAB_SIZE


@pytest.mark.parametrize("name", NAMES)
def test_chat_template_renders_every_role_and_text_parts(name: str) -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "a list?"}]},
        {"role": "assistant", "content": "A sequence."},
        {"role": "user", "content": "Go on."},
    ]
    tokenizer = tokenizer_of(name)
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == (
        "<|system|>Be brief.<|end|><|user|>What is a list?<|end|><|assistant|>A sequence.<|end|><|user|>Go on.<|end|><|assistant|>"
    )
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert sum(i in tokenizer.all_special_ids for i in ids) == 9  # each marker is one token


@pytest.mark.parametrize("name", NAMES)
def test_answers_a_greeting_with_its_name_and_stops(name: str) -> None:
    text, last = greedy_answer(name, "Hello!")
    assert f"I am {name.capitalize()}, a very small language model." in text
    assert last in (0, 1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("prompt", ["Tell me about sockets.", "What does write do?"])
def test_answers_in_sentences_of_real_words_and_stops(name: str, prompt: str) -> None:
    text, last = greedy_answer(name, prompt)
    assert last in (0, 1)
    assert re.match(r"[A-Z\"(]", text)
    assert text.rstrip()[-1] in '.!?)"'
    words = re.findall(r"[a-z]+", text.lower())
    assert len(words) >= 8
    assert sum(word in known_words() for word in words) >= 0.95 * len(words)
