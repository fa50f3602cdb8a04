"""Train the demo's three small language models on this Python's own documentation.

    python demo/train.py [--model ember] [--minutes 15] [--epochs 16] [--resume] [--out demo/models]

Needs the `test` extra (transformers). Each model becomes a folder in the Hugging Face layout with bf16 weights. The
order of the data and the first weights come from a fixed seed; floating-point sums differ between machines, and a run
that `--minutes` cuts short ends its learning-rate schedule early. Ctrl-C ends a run in good order: the weights so far
are written. The text is a function of the Python release; the committed models were trained with the one that
demo/models/README.md names.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers.utils import logging as transformers_logging

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `python demo/train.py` puts only demo/ on the path

from demo import corpus

SEED = 20261120
VOCAB_SIZE = 1024
CONTEXTS = (256, 512, 256, 1024)  # by turns, an epoch each: short ones show many beginnings, as chats do, long ones all positions
MAX_CONTEXT = max(CONTEXTS)
BATCH_TOKENS = 4096
PEAK_LR, WARMUP_STEPS = 5e-3, 80
MUON_LR = 0.02
RESUMED_LR = 0.5  # of those peaks, when a run goes on from trained weights
IGNORED = -100  # label of a token the model is not trained to produce

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{%- if message.role == 'assistant' %}{{- '<|assistant|>' }}"
    "{%- elif message.role in ['system', 'developer'] %}{{- '<|system|>' }}"
    "{%- else %}{{- '<|user|>' }}{%- endif %}"
    "{%- if message.content is string %}{{- message.content | trim }}"
    "{%- elif message.content %}{%- for part in message.content %}{{- part.text }}{%- endfor %}{%- endif %}"
    "{{- '<|end|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)

SAMPLE_PROMPTS = (
    "Hello!",
    "Tell me about exceptions.",
    "What is the threading module?",
    "How do files work?",
    "What does close do?",
)


@dataclass(frozen=True, slots=True)
class Shape:
    """One model's architecture; head_dim is 32 everywhere."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int


SHAPES = {
    "ember": Shape("LlamaForCausalLM", 128, 352, 4, 4, 2),
    "birch": Shape("Qwen3ForCausalLM", 160, 416, 4, 6, 2),
    "oak": Shape("LlamaForCausalLM", 192, 448, 4, 6, 2),
}


# ---- files of a checkpoint ------------------------------------------------------------------------------------------


def train_tokenizer(texts: Sequence[str]) -> Tokenizer:
    """A byte-level BPE of `VOCAB_SIZE` entries, the special tokens first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(corpus.SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def model_config(shape: Shape) -> dict[str, object]:
    """config.json, with the keys both older and newer readers know."""
    qwen = shape.architecture.startswith("Qwen3")
    return {
        "architectures": [shape.architecture],
        "model_type": "qwen3" if qwen else "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": 32,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": MAX_CONTEXT,
        "attention_bias": False,
        "attention_dropout": 0.0,
        **({"use_sliding_window": False} if qwen else {"mlp_bias": False}),
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "bos_token_id": None,
        "eos_token_id": [1, 0],
        "pad_token_id": 0,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


def write_settings(folder: Path, shape: Shape, tokenizer: Tokenizer) -> None:
    """Writes all files of the checkpoint but the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_CONTEXT,
        "eos_token": corpus.END_OF_TURN,
        "pad_token": corpus.END_OF_TEXT,
        "additional_special_tokens": [corpus.BEGIN_USER, corpus.BEGIN_ASSISTANT, corpus.BEGIN_SYSTEM],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    generation = {"do_sample": True, "temperature": 0.5, "top_p": 0.9, "eos_token_id": [1, 0], "pad_token_id": 0}
    contents = (
        ("config.json", model_config(shape)),
        ("tokenizer_config.json", tokenizer_config),
        ("generation_config.json", generation),
    )
    for name, value in contents:
        (folder / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_weights(folder: Path, model: transformers.PreTrainedModel) -> None:
    """model.safetensors in bf16 with the names Hugging Face gives; tied weights once."""
    from safetensors.torch import save_file

    tensors = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    partial = folder / "model.safetensors.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.replace(folder / "model.safetensors")


# ---- data -----------------------------------------------------------------------------------------------------------


def encode(tokenizer: Tokenizer, conversations: Sequence[Sequence[corpus.Segment]]) -> list[tuple[list[int], list[int]]]:
    """(token ids, labels) of each conversation; labels are `IGNORED` where the user speaks."""
    flat = [segment.text for conversation in conversations for segment in conversation]
    encoded = iter(tokenizer.encode_batch_fast(flat, add_special_tokens=False))
    result = []
    for conversation in conversations:
        ids: list[int] = []
        labels: list[int] = []
        for segment in conversation:
            piece = next(encoded).ids
            ids += piece
            labels += piece if segment.learned else [IGNORED] * len(piece)
        result.append((ids, labels))
    return result


def windows(encoded: Sequence[tuple[list[int], list[int]]], context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels [num_windows, context + 1]. A window starts with a conversation, as a request does."""
    all_ids, all_labels = [], []
    ids: list[int] = []
    labels: list[int] = []
    for more_ids, more_labels in encoded:
        ids += more_ids
        labels += more_labels
        if len(ids) > context:
            all_ids.append(ids[: context + 1])
            all_labels.append(labels[: context + 1])
            ids, labels = [], []
    return torch.tensor(all_ids), torch.tensor(all_labels)


# ---- training -------------------------------------------------------------------------------------------------------


def loss_of(model: transformers.PreTrainedModel, ids: torch.Tensor, labels: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    """Cross entropy in nats of each next token, over the learned ones. ids, labels: [batch, context + 1]."""
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
        targets = labels[:, 1:].flatten()
        learned = targets != IGNORED
        logits = model.lm_head(hidden.flatten(0, 1)[learned])
    return torch.nn.functional.cross_entropy(logits.float(), targets[learned], reduction=reduction)


@torch.no_grad()
def held_out_loss(
    model: transformers.PreTrainedModel, tokenizer: Tokenizer, documents: Sequence[corpus.Document]
) -> tuple[float, float]:
    """(nats per token, nats per character) on documents never trained on."""
    rng = random.Random(SEED)
    chats = [corpus.chat([d], rng) for d in documents if d.kind != "plain"]
    num_chars = sum(len(s.text) for c in chats for s in c if s.learned)
    total, num_tokens = 0.0, 0
    for ids, labels in encode(tokenizer, chats):
        ids, labels = ids[: MAX_CONTEXT + 1], labels[: MAX_CONTEXT + 1]
        total += loss_of(model, torch.tensor([ids]), torch.tensor([labels]), reduction="sum").item()
        num_tokens += sum(label != IGNORED for label in labels[1:])
    return total / num_tokens, total / num_chars


def optimizers_of(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for the embedding and the norms."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n and "lm_head" not in n]
    others = [p for p in model.parameters() if not any(p is m for m in matrices)]
    return [
        torch.optim.Muon(matrices, lr=MUON_LR, weight_decay=0.1, momentum=0.95),
        torch.optim.AdamW(others, lr=PEAK_LR, betas=(0.9, 0.97), weight_decay=0.0, fused=True),
    ]


def batches(
    documents: Sequence[corpus.Document], tokenizer: Tokenizer, name: str, schedule: Schedule
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of `BATCH_TOKENS`, the questions and the order drawn anew in every epoch."""
    rng = random.Random(SEED)
    while True:
        encoded = encode(tokenizer, corpus.conversations(documents, name, rng))
        context = CONTEXTS[schedule.epoch % len(CONTEXTS)]
        ids, labels = windows(encoded, context)
        size = BATCH_TOKENS // context
        for start in range(0, len(ids) - size + 1, size):
            yield ids[start : start + size], labels[start : start + size]
        schedule.epoch += 1


class Schedule:
    """The progress of a run: by steps, or by the clock when `minutes` are given and run out first."""

    def __init__(self, num_steps: int, minutes: float | None) -> None:
        self.num_steps, self.seconds = num_steps, minutes * 60 if minutes else math.inf
        self.started = time.monotonic()
        self.step = self.epoch = 0
        self.stopped = False

    def elapsed(self) -> float:
        return time.monotonic() - self.started

    def progress(self) -> float:
        return 1.0 if self.stopped else min(1.0, max(self.step / self.num_steps, self.elapsed() / self.seconds))

    def lr_factor(self) -> float:
        """Returns the factor of the learning rate: it rises for WARMUP_STEPS, and falls to nothing in the last 85 % of the run."""
        return min(1.0, (self.step + 1) / WARMUP_STEPS, max(0.0, 1 - self.progress()) / 0.85)


class Learner:
    """Optimizers of a module, with learning rates that follow a schedule. share: how much of their usual rates."""

    def __init__(self, module: torch.nn.Module, schedule: Schedule, share: float = 1.0) -> None:
        self._module, self._schedule, self._optimizers = module, schedule, optimizers_of(module)
        self._peaks = [optimizer.param_groups[0]["lr"] * share for optimizer in self._optimizers]

    def learn(self, loss: torch.Tensor) -> None:
        """Changes the module by one step of the schedule, against the gradient of its loss."""
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._module.parameters(), 1.0)
        for optimizer, peak in zip(self._optimizers, self._peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * self._schedule.lr_factor()
            optimizer.step()
            optimizer.zero_grad()
        self._schedule.step += 1


def train(name: str, out: Path, minutes: float | None, epochs: int, resume: bool) -> None:
    """Train one model, write its folder, print its held-out loss and samples."""
    torch.manual_seed(SEED)
    shape = SHAPES[name]
    documents, held_out = corpus.hold_out(corpus.build_documents())
    first_epoch = corpus.conversations(documents, name, random.Random(SEED))
    folder = out / name
    if resume:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    else:
        tokenizer = train_tokenizer([segment.text for c in first_epoch for segment in c])
    num_tokens = sum(len(ids) for ids, _ in encode(tokenizer, first_epoch))
    write_settings(folder, shape, tokenizer)
    if resume:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    else:
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder), dtype=torch.float32)
    num_parameters = sum(p.numel() for p in model.parameters())
    schedule = Schedule(num_steps=epochs * num_tokens // BATCH_TOKENS, minutes=minutes)
    print(f"{name}: {num_parameters:,} parameters, {len(documents):,} documents, {num_tokens:,} tokens an epoch", flush=True)

    def stop(_signal: int, _frame: FrameType | None) -> None:
        schedule.stopped = True

    signal.signal(signal.SIGINT, stop)
    learner = Learner(model, schedule, RESUMED_LR if resume else 1.0)
    mean, reported = 0.0, 0.0
    model.train()
    for ids, labels in batches(documents, tokenizer, name, schedule):
        if schedule.progress() >= 1.0:
            break
        loss = loss_of(model, ids, labels)
        learner.learn(loss)
        mean += (loss.item() - mean) / min(schedule.step, 50)
        if schedule.elapsed() - reported > 60:
            reported = schedule.elapsed()
            speed = schedule.step * BATCH_TOKENS / reported
            nats, _ = held_out_loss(model, tokenizer, held_out)
            print(
                f"{name}: {reported:4.0f} s  {schedule.progress():4.0%}  epoch {schedule.epoch:2d}  "
                f"loss {mean:.3f}  held out {nats:.3f}  {speed:,.0f} tokens/s",
                flush=True,
            )
            write_weights(folder, model)
    write_weights(folder, model)
    evaluate(name, folder, tokenizer, documents, held_out)


# ---- what came of it ------------------------------------------------------------------------------------------------


@torch.no_grad()
def answer(
    model: transformers.PreTrainedModel, tokenizer: Tokenizer, prompt: str, temperature: float = 0.5
) -> tuple[str, int, bool]:
    """(text, number of tokens, whether it ended by itself) of one chat turn."""
    text = f"{corpus.BEGIN_USER}{prompt}{corpus.END_OF_TURN}{corpus.BEGIN_ASSISTANT}"
    ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False).ids])
    sampling = {"temperature": temperature, "top_p": 0.9, "do_sample": True} if temperature else {"do_sample": False}
    output = model.generate(ids, max_new_tokens=300, eos_token_id=[0, 1], pad_token_id=0, **sampling)[0, ids.shape[1] :]
    return tokenizer.decode(output.tolist()), len(output), int(output[-1]) in (0, 1)


def evaluate(
    name: str,
    folder: Path,
    tokenizer: Tokenizer,
    documents: Sequence[corpus.Document],
    held_out: Sequence[corpus.Document],
) -> None:
    """Measure the files just written: held-out loss, how many words are real, how answers end; print samples."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    nats, nats_per_char = held_out_loss(model, tokenizer, held_out)
    known = {w for d in [*documents, *held_out] for w in re.findall(r"[a-z]+", " ".join(d.paragraphs).lower())}
    torch.manual_seed(SEED)
    rng = random.Random(SEED)
    asked = [corpus.question(d, rng) for d in rng.sample(documents, 40) if d.kind != "plain"]
    answers = [answer(model, tokenizer, prompt) for prompt in asked]
    words = [w for text, _, _ in answers for w in re.findall(r"[a-z]+", text.lower())]
    lengths = sorted(n for _, n, _ in answers)
    print(
        f"{name}: held out {nats:.3f} nats a token, {nats_per_char / math.log(2):.3f} bits a character; "
        f"{sum(w in known for w in words) / len(words):.1%} of {len(words)} words are real; "
        f"{sum(ended for _, _, ended in answers)} of {len(answers)} answers end by themselves, "
        f"median {lengths[len(lengths) // 2]} tokens"
    )
    for prompt in SAMPLE_PROMPTS:
        print(f"--- {prompt}\n{answer(model, tokenizer, prompt)[0]}", flush=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(SHAPES), action="append", help="default: all three")
    parser.add_argument("--minutes", type=float, help="end each model's run after so long, learning rate and all")
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--resume", action="store_true", help="go on from the weights in the model's folder")
    parser.add_argument("--threads", type=int, default=1, help="one a model is best: train the three side by side")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "models")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    transformers_logging.disable_progress_bar()
    for name in arguments.model or SHAPES:
        train(name, arguments.out, arguments.minutes, arguments.epochs, arguments.resume)


if __name__ == "__main__":
    main()
