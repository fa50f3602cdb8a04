"""Train a head that drafts tokens for one of the demo's models (EAGLE-3, https://arxiv.org/abs/2503.01840).

    python demo/train_head.py [--model ember] [--passes 6] [--minutes 15] [--out demo/models]

Needs the `test` extra (transformers). The head becomes a folder in the model's own, in the form that SpecForge publishes. It learns
the model's distributions, of answers that the model gives to questions about the documents it was trained on. As in use, it reads
its own states and drafts further on: each window is read once with the model's states and then with the head's own, as often as it
is to draft further. The questions, the answers and the order come from a fixed seed; see demo/train.py for what differs
nevertheless.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional
from transformers.utils import logging as transformers_logging

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `python demo/train_head.py` puts only demo/ on the path

from demo import corpus
from demo.train import IGNORED, SEED, SHAPES, VOCAB_SIZE, Learner, Schedule, model_config, windows

FOLDER = "eagle3"  # in the model's
INTERMEDIATE_SIZE = 256
READ = (1, 2, 4)  # layers before which the model's states are read; 4 is behind the last
STEPS, DECAY = 3, 0.8  # tokens drafted in a row while training, and the weight of each beside that of the one before
TEMPERATURE, TOP_P = 0.5, 0.9  # of the answers, as the models' generation_config.json has them
NUM_QUESTIONS, ANSWER_TOKENS, ANSWERS_AT_ONCE = 2048, 160, 128
CONTEXT, WINDOWS_AT_ONCE = 512, 4


class Head(nn.Module):
    """One layer of the model's kind whose queries, keys and values read a state beside a token's embedding. Its parameters have the
    names that SpecForge gives them."""

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        super().__init__()
        config = model.config
        width, dim, eps = config.hidden_size, config.head_dim, config.rms_norm_eps
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        query, key, inner = self.num_heads * dim, self.num_kv_heads * dim, INTERMEDIATE_SIZE

        def linear(inputs: int, outputs: int) -> nn.Linear:
            made = nn.Linear(inputs, outputs, bias=False)
            nn.init.normal_(made.weight, std=config.initializer_range)
            return made

        self.fc = linear(len(READ) * width, width)
        parts = {
            "input_layernorm": nn.RMSNorm(width, eps),
            "hidden_norm": nn.RMSNorm(width, eps),
            "self_attn": nn.ModuleDict(
                {
                    "q_proj": linear(2 * width, query),
                    "k_proj": linear(2 * width, key),
                    "v_proj": linear(2 * width, key),
                    "o_proj": linear(query, width),
                }
            ),
            "post_attention_layernorm": nn.RMSNorm(width, eps),
            "mlp": nn.ModuleDict(
                {"gate_proj": linear(width, inner), "up_proj": linear(width, inner), "down_proj": linear(inner, width)}
            ),
        }
        self.midlayer = nn.ModuleDict(parts)
        self.norm, self.lm_head = nn.RMSNorm(width, eps), linear(width, config.vocab_size)
        with torch.no_grad():  # it begins with what the model ends with
            self.fc.weight[:, -width:] += torch.eye(width)
            self.norm.weight.copy_(model.model.norm.weight)
            self.lm_head.weight.copy_(model.lm_head.weight)
        self.rotary = model.model.rotary_emb

    def forward(self, kept: Sequence[Tensor], embedded: Tensor, num_steps: int) -> Iterator[Tensor]:
        """Yields its states [B, T, W] after each of num_steps drafts. kept: the model's states, [B, T, W] each. embedded [B, T, W]:
        of the tokens that follow. In step k the state of position t stands for a token drafted behind k others, all of which are
        the text's own: those before position t - k were read with the model's states, the others with the head's."""
        states = self.fc(torch.cat(tuple(kept), dim=-1))
        turns = self.rotary(states, torch.arange(states.shape[1])[None])
        tokens = self.midlayer["input_layernorm"](embedded)
        seen: list[tuple[Tensor, Tensor]] = []
        for step in range(num_steps):
            if step:
                states = _later(states, 1)
            both = torch.cat((tokens, self.midlayer["hidden_norm"](states)), dim=-1)
            states = states + self._attended(both, turns, seen)
            normed = self.midlayer["post_attention_layernorm"](states)
            mlp = self.midlayer["mlp"]
            states = states + mlp["down_proj"](functional.silu(mlp["gate_proj"](normed)) * mlp["up_proj"](normed))
            yield states

    def logits(self, states: Tensor) -> Tensor:
        """Returns logits [..., V] of its states [..., W]."""
        logits: Tensor = self.lm_head(self.norm(states))
        return logits

    def _attended(self, inputs: Tensor, turns: tuple[Tensor, Tensor], seen: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Adds the step's keys and values to those `seen`, and returns what attention adds to the states."""
        attention, step = self.midlayer["self_attn"], len(seen)
        query, key, value = (
            attention[name](inputs).unflatten(-1, (num, -1)).transpose(1, 2)
            for name, num in (("q_proj", self.num_heads), ("k_proj", self.num_kv_heads), ("v_proj", self.num_kv_heads))
        )
        query, group = _turned(query, turns), self.num_heads // self.num_kv_heads
        seen.append((_turned(key, turns).repeat_interleave(group, 1), value.repeat_interleave(group, 1)))
        (keys, values), own = seen[0], [(_later(k, step - at), _later(v, step - at)) for at, (k, v) in enumerate(seen) if at]
        masked = torch.full((query.shape[2],) * 2, -torch.inf).triu(1 - step)
        scores = [query @ keys.transpose(2, 3) + masked, *((query * k).sum(-1, keepdim=True) for k, _ in own)]
        shares = functional.softmax(torch.cat(scores, dim=-1) * query.shape[-1] ** -0.5, dim=-1)
        attended = shares[..., : keys.shape[2]] @ values
        for at, (_, v) in enumerate(own):
            attended = attended + shares[..., keys.shape[2] + at, None] * v
        out: Tensor = attention["o_proj"](attended.transpose(1, 2).flatten(2))
        return out


def _later(x: Tensor, num: int) -> Tensor:
    """Returns x [..., T, D] moved by num positions, zeros first."""
    return functional.pad(x, (0, 0, num, 0))[..., : x.shape[-2], :]


def _turned(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Returns x [B, heads, T, D] with the rotary embedding."""
    cos, sin = (one[:, None] for one in turns)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


# ---- data -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def answers(
    model: transformers.PreTrainedModel, tokenizer: Tokenizer, questions: Sequence[str], temperature: float = TEMPERATURE
) -> list[tuple[list[int], list[int]]]:
    """Returns (token ids, labels) of one chat each; labels are `IGNORED` where the user speaks."""
    result = []
    sampling = {"temperature": temperature, "top_p": TOP_P, "top_k": 0, "do_sample": True} if temperature else {"do_sample": False}
    for first in range(0, len(questions), ANSWERS_AT_ONCE):
        part = questions[first : first + ANSWERS_AT_ONCE]
        texts = [f"{corpus.BEGIN_USER}{one}{corpus.END_OF_TURN}{corpus.BEGIN_ASSISTANT}" for one in part]
        prompts = [one.ids for one in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(one)) + one for one in prompts])
        mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in prompts])
        made = model.generate(
            ids, attention_mask=mask, max_new_tokens=ANSWER_TOKENS, eos_token_id=[0, 1], pad_token_id=0, **sampling
        )
        for prompt, row in zip(prompts, made[:, longest:].tolist(), strict=True):
            ends = [at for at, token in enumerate(row) if token in (0, 1)]
            answer = row[: ends[0] + 1] if ends else row
            result.append((prompt + answer, [IGNORED] * len(prompt) + answer))
    return result


def questions_about(documents: Sequence[corpus.Document], num: int, rng: random.Random) -> list[str]:
    """Returns questions about documents drawn at random."""
    asked = [d for d in documents if d.kind != "plain" and d.num_chars >= corpus.SHORTEST_ANSWER_CHARS]
    return [corpus.question(rng.choice(asked), rng) for _ in range(num)]


@torch.no_grad()
def read(model: transformers.PreTrainedModel, ids: Tensor) -> tuple[list[Tensor], Tensor]:
    """Returns the states that the head reads of ids [B, T], [B, T, W] each, and the model's logits [B, T, V]."""
    kept: dict[int, Tensor] = {}
    hooks = [
        model.model.layers[layer - 1].register_forward_hook(lambda module, inputs, out, layer=layer: kept.__setitem__(layer, out))
        for layer in READ
    ]
    logits = model(ids, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    return [kept[layer] for layer in READ], logits


# ---- training -------------------------------------------------------------------------------------------------------


def loss_of(model: transformers.PreTrainedModel, head: Head, ids: Tensor, labels: Tensor) -> Tensor:
    """Returns the cross entropy in nats between what the model samples from and what the head does, of the answers' tokens."""
    kept, logits = read(model, ids[:, :-1])
    targets = functional.softmax(logits[:, 1:] / TEMPERATURE, dim=-1)
    learned = labels[:, 2:] != IGNORED
    embedded = model.model.embed_tokens(ids[:, 1:-1])
    total, weight = torch.zeros(()), 0.0
    for step, states in enumerate(head([one[:, :-1] for one in kept], embedded, STEPS)):
        counts = learned.clone()
        counts[:, :step] = False
        log_shares = functional.log_softmax(head.logits(states[counts]) / TEMPERATURE, dim=-1)
        total = total - DECAY**step * (targets[counts] * log_shares).sum(-1).mean()
        weight += DECAY**step
    return total / weight


@torch.no_grad()
def agreement(
    model: transformers.PreTrainedModel, head: Head, chats: Sequence[tuple[list[int], list[int]]], num: int = 3
) -> list[float]:
    """Returns, of each of num drafted tokens, how often it and those before it are what the model would say next, greedily."""
    right, total = torch.zeros(num), 0
    for ids, labels in chats:
        tokens = torch.tensor([ids])
        kept, logits = read(model, tokens[:, :-1])
        said = logits[0, 1:].argmax(-1)
        made = list(head([one[:, :-1] for one in kept], model.model.embed_tokens(tokens[:, 1:-1]), num))
        first = next(at for at, label in enumerate(labels) if label != IGNORED) - 1  # its state is the first that is drafted from
        holds = torch.ones(len(said) - first, dtype=torch.bool)
        for step, states in enumerate(made):
            agrees = (head.logits(states[0]).argmax(-1) == said)[first + step :]
            holds = holds[: len(agrees)] & agrees
            right[step] += holds.sum()
        total += len(said) - first
    return [float(one) / total for one in right]


def train(name: str, out: Path, minutes: float | None, passes: int) -> None:
    """Trains the head of one model, writes its folder and prints how often its drafts hold."""
    torch.manual_seed(SEED)
    rng = random.Random(SEED)
    model = transformers.AutoModelForCausalLM.from_pretrained(out / name, dtype=torch.float32).eval().requires_grad_(False)
    tokenizer = Tokenizer.from_file(str(out / name / "tokenizer.json"))
    documents, held_out = corpus.hold_out(corpus.build_documents())
    chats = answers(model, tokenizer, questions_about(documents, NUM_QUESTIONS, rng))
    unseen = questions_about(held_out, 64, rng)
    sampled, greedy = answers(model, tokenizer, unseen), answers(model, tokenizer, unseen, 0.0)
    num_tokens = sum(len(ids) for ids, _ in chats)
    head = Head(model)
    num_parameters = sum(p.numel() for p in head.parameters())
    schedule = Schedule(num_steps=passes * num_tokens // (CONTEXT * WINDOWS_AT_ONCE), minutes=minutes)
    print(f"{name}: {num_parameters:,} parameters, {num_tokens:,} tokens of {len(chats):,} answers", flush=True)
    learner = Learner(head, schedule)
    mean, reported = 0.0, 0.0
    for ids, labels in batches(chats, rng):
        if schedule.progress() >= 1.0:
            break
        loss = loss_of(model, head, ids, labels)
        learner.learn(loss)
        mean += (loss.item() - mean) / min(schedule.step, 50)
        if schedule.elapsed() - reported > 60:
            reported = schedule.elapsed()
            print(f"{name}: {reported:4.0f} s  {schedule.progress():4.0%}  step {schedule.step}  loss {mean:.3f}", flush=True)
            write(out / name / FOLDER, name, head)
    write(out / name / FOLDER, name, head)
    for kind, text in (("greedy", greedy), ("sampled", sampled)):
        shares = agreement(model, head, text)
        each = ", ".join(f"{share:.3f}" for share in shares)
        print(f"{name}: {kind} answers to {len(text)} new questions: {1 + sum(shares):.2f} tokens a step ({each})", flush=True)


def batches(chats: Sequence[tuple[list[int], list[int]]], rng: random.Random) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields batches of windows, in a new order in every pass."""
    order = list(chats)
    while True:
        rng.shuffle(order)
        ids, labels = windows(order, CONTEXT)
        for start in range(0, len(ids) - WINDOWS_AT_ONCE + 1, WINDOWS_AT_ONCE):
            yield ids[start : start + WINDOWS_AT_ONCE], labels[start : start + WINDOWS_AT_ONCE]


def head_config(name: str) -> dict[str, object]:
    """Returns config.json of the head of one model. `eagle_config` counts layers by what they return."""
    return model_config(SHAPES[name]) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "intermediate_size": INTERMEDIATE_SIZE,
        "num_hidden_layers": 1,
        "draft_vocab_size": VOCAB_SIZE,
        "tie_word_embeddings": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in READ], "use_aux_hidden_state": True},
    }


def write(folder: Path, name: str, head: Head) -> None:
    """Writes config.json and model.safetensors, in bf16."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(head_config(name), indent=2) + "\n", encoding="utf-8")
    tensors = {key: tensor.detach().to(torch.bfloat16).contiguous() for key, tensor in head.named_parameters()}
    partial = folder / "model.safetensors.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.replace(folder / "model.safetensors")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(SHAPES), default="ember")
    parser.add_argument("--minutes", type=float, help="end the run after so long, learning rate and all")
    parser.add_argument("--passes", type=int, default=6, help="over the answers")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "models")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    transformers_logging.disable_progress_bar()
    train(arguments.model, arguments.out, arguments.minutes, arguments.passes)


if __name__ == "__main__":
    main()
