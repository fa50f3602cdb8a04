"""LoRA adapters on the GPU's model, with its kernels interpreted: rows of several adapters and of the base share steps, and each
has the logits of transformers with merged weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine.contracts.steps import NoWorkSpace
from engine.cuda import graphs, mixed_steps, sequences
from engine.cuda.model import CudaModel
from engine.protocol import AdapterSource, SamplingParams
from loader.models.catalog import scan_one
from scheduler.batch.plan import write_sampling
from tests.engine.cuda_bench import INTERPRETED, OTHER, PROMPT, close, expected, load_cuda_model
from tests.engine.embedder_checkpoint import expected as expected_vector
from tests.engine.embedder_checkpoint import make_embedder
from tests.engine.model_bench import CASES, MAX_LEN, make_checkpoint, make_table, plan, put
from tests.engine.stand_in_graphs import remember_steps, stand_in_graphs
from tests.loader import fp8
from tests.loader.adapters import Tensors, adapter_tensors, modules_of, write_adapter

pytest.importorskip("triton")
pytestmark = INTERPRETED
__all__ = ["stand_in_graphs"]  # a fixture

FIRST_BYTE = 3 << 20  # of the arena, behind all blocks of a table
ALPHA = 40
SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}  # interpreted, each head takes its time


@dataclass(slots=True)
class Made:
    """An adapter: its files, and transformers' model with its weights merged."""

    source: AdapterSource
    merged: Any


def make_adapter(folder: Path, base: Path, whole: Any, rank: int, adapts: Callable[[str], bool] = lambda name: True) -> Made:
    """Makes an adapter of those modules of the base that `adapts`. whole: transformers' model of the base."""
    shape = scan_one(base).shape
    assert shape is not None
    modules = {name: size for name, size in modules_of(shape).items() if adapts(name)}
    tensors = adapter_tensors(modules, rank, seed=rank)
    write_adapter(folder, tensors, r=rank, lora_alpha=ALPHA)
    merged = copy.deepcopy(whole)
    parameters = dict(merged.named_parameters())
    for name in modules:
        parameters[f"{name}.weight"].data += ALPHA / rank * (numbers(tensors, name, "lora_B") @ numbers(tensors, name, "lora_A"))
    return Made(AdapterSource(folder.name, str(folder), scan_one(folder).fingerprint), merged)


def numbers(tensors: Tensors, module: str, half: str) -> torch.Tensor:
    _, size, data = tensors[f"base_model.model.{module}.{half}.weight"]
    return torch.frombuffer(bytearray(data), dtype=torch.float32).view(size)


def put_adapters(model: CudaModel, adapters: Iterable[Made], numbers: Iterable[int]) -> None:
    """Puts adapters into the arena and makes them known under these numbers."""
    at = FIRST_BYTE
    for adapter, number in zip(adapters, numbers, strict=True):
        read = model.adapter_memory.read(adapter.source)
        model.adapter_memory._held.memory.view(torch.uint8)[at : at + read.layout.num_bytes] = torch.from_numpy(read.data)
        model.adapter_memory.set(number, at, read.layout)
        at += read.layout.num_bytes


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, list[Made]]:
    """Returns a model of one layer, transformers' copy of it, and three adapters: of everything, of some matrices, of a larger
    rank."""
    folder = tmp_path_factory.mktemp("llama")
    whole = make_checkpoint(folder / "base", **CASES["llama"] | SMALL)
    some = ("q_proj", "v_proj", "gate_proj")
    return (
        folder / "base",
        whole,
        [
            make_adapter(folder / "all", folder / "base", whole, 4),
            make_adapter(folder / "some", folder / "base", whole, 8, lambda name: name.endswith(some)),
            make_adapter(folder / "large", folder / "base", whole, 20),
        ],
    )


def test_rows_of_three_adapters_and_of_the_base_share_steps(llama: tuple[Path, Any, list[Made]]) -> None:
    """In steps of prompts, mixed ones and such that only decode; a slot that had an adapter is the base's afterwards."""
    folder, whole, adapters = llama
    model = load_cuda_model(folder)
    put_adapters(model, adapters, (5, 0, 63))
    table = make_table(groups=model.kv_groups)
    texts = [PROMPT, OTHER, PROMPT, OTHER]
    for slot, (number, text) in enumerate(zip((5, 0, -1, 63), texts, strict=True)):
        table.adapter[slot] = number
        put(table, slot, text)
    models = (adapters[0].merged, adapters[1].merged, whole, adapters[2].merged)
    wanted = [expected((folder, one), text) for one, text in zip(models, texts, strict=True)]
    assert min(np.abs(wanted[0] - wanted[2]).max(), np.abs(wanted[1] - wanted[3]).max()) > 0.5, "adapters change nothing"

    def computed(*rows: tuple[int, int, int]) -> None:
        own = np.concatenate([wanted[slot][at : at + num] for slot, at, num in rows])
        close(model.logits(plan(*rows), table, True), own)

    computed((0, 0, 12), (1, 0, 3), (2, 0, 5), (3, 0, 7))
    computed((1, 3, 1), (2, 5, 1), (0, 12, 4), (3, 7, 10))
    computed((0, 16, 1), (1, 4, 1), (2, 6, 1), (3, 17, 1))
    table.adapter[0] = -1
    wanted[0] = wanted[2]
    computed((1, 5, 1), (0, 0, 4))
    model.adapter_memory.clear(0)
    model.adapter_memory.clear(63)
    table.adapter[1] = 0  # forgotten adapters change nothing
    wanted[1] = expected((folder, whole), OTHER)
    computed((1, 0, 2))


def decoded(model: CudaModel, adapters: tuple[int, ...]) -> list[list[int]]:
    """Returns the tokens of a step with prompts and of one that decodes, which takes the last tokens from the device alone, for
    rows with these adapters."""
    table, rows = make_table(groups=model.kv_groups), range(len(adapters))
    for slot, number in enumerate(adapters):
        table.adapter[slot] = number
        put(table, slot, PROMPT[slot : slot + 5])
        write_sampling(table, slot, SamplingParams(max_tokens=9, temperature=0.8 * (slot % 2), top_p=0.9, seed=slot), 5, MAX_LEN)
    steps = plan(*((slot, 0, 5) for slot in rows)), plan(*((slot, 5, 1) for slot in rows))
    return [model.execute(step, table).ids.tolist() for step in steps]


def test_steps_with_adapters_have_graphs_of_their_own(
    llama: tuple[Path, Any, list[Made]], stand_in_graphs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs of either form are captured when a step needs them, those with adapters in idle time only once there was such a step,
    and anew when an adapter of a larger rank comes. Tokens are those of steps without graphs."""
    folder, _, adapters = llama
    for name, value in (("TOKENS", (10,)), ("ROWS", (2,)), ("PROMPTS", 2)):  # interpreted, larger sizes take long
        monkeypatch.setattr(mixed_steps, name, value)
    monkeypatch.setattr(graphs, "WARM_UP_STEPS", 1)
    plain = load_cuda_model(folder)
    put_adapters(plain, adapters[:1], (1,))
    wanted = decoded(plain, (-1, 1))
    model = load_cuda_model(folder, max_graph_rows=2, max_graph_tokens=10)
    remember_steps(model)
    put_adapters(model, adapters[:1], (1,))
    for _ in range(2):  # a graph is captured when it is needed for the second time
        assert decoded(model, (-1, -1)) != wanted
    assert (list(model.graphs.captured), list(model.adapted_graphs.captured)) == ([2], [])
    assert model.num_uncaptured == 2, "graphs with adapters before any step needs them"
    for _ in range(2):
        assert decoded(model, (-1, 1)) == wanted
    assert (list(model.graphs.captured), list(model.adapted_graphs.captured)) == ([2], [2])
    assert model.num_uncaptured == 4
    model.capture_next()
    assert list(model.graphs.captured) == [2, 1], "graphs with adapters before those of all other steps"
    (size,) = model.adapted_mixed_graphs.missing()
    assert model.capture_mixed(size, adapted=True)
    with monkeypatch.context() as patched:
        patched.setattr(CudaModel, "_forward", lambda *_: pytest.fail("a step without a graph"))
        assert decoded(model, (-1, 1)) == wanted
    put_adapters(model, adapters[2:], (7,))
    assert model.adapter_memory.bound == 32
    kinds = (model.graphs, model.mixed_graphs, model.adapted_graphs, model.adapted_mixed_graphs)
    assert [len(one.captured) for one in kinds] == [2, 0, 0, 0]
    assert model.num_uncaptured == 4


def test_log_probabilities_are_those_of_the_adapter(llama: tuple[Path, Any, list[Made]]) -> None:
    """Those of a prompt are right, and those of a token whose logits the host edits."""
    folder, whole, adapters = llama
    model = load_cuda_model(folder)
    put_adapters(model, adapters[:1], (3,))
    table = make_table(groups=model.kv_groups)
    params = SamplingParams(max_tokens=9, temperature=0.0, logprobs=2, prompt_logprobs=1, prompt_ranks=True, presence_penalty=0.1)
    for slot, number in ((0, 3), (1, -1)):
        table.adapter[slot] = number
        put(table, slot, PROMPT[:8])
        write_sampling(table, slot, params, 8, MAX_LEN)
        table.num_prompt[slot], table.prompt_logprobs[slot] = 8, True
    result = model.execute(plan((0, 0, 8), (1, 0, 8)), table)
    assert result.prompt_logprobs is not None
    for own, one in zip(result.prompt_logprobs, (adapters[0].merged, whole), strict=True):
        wanted = torch.from_numpy(expected((folder, one), PROMPT[:8])).log_softmax(1)
        assert np.abs(np.array(own.chosen) - wanted[range(7), PROMPT[1:8]].numpy()).max() < 1e-3
    again = model.execute(plan((0, 8, 1), (1, 8, 1)), table)
    assert again.logprobs is not None
    assert result.ids.tolist() != again.ids.tolist() or again.logprobs.top[0] != again.logprobs.top[1]


def test_fp8_weights_take_adapters(tmp_path: Path) -> None:
    whole = make_checkpoint(tmp_path / "plain", "qwen3", hidden_size=144, tie_word_embeddings=False, **SMALL)
    meant = fp8.quantize(tmp_path / "plain", tmp_path / "fp8", fp8.KINDS["fine-grained"])
    whole.load_state_dict(whole.state_dict() | meant)
    adapter = make_adapter(tmp_path / "adapter", tmp_path / "fp8", whole, 12)
    model = load_cuda_model(tmp_path / "fp8")
    put_adapters(model, [adapter], (9,))
    table = make_table(groups=model.kv_groups)
    put(table, 0, PROMPT)
    put(table, 1, PROMPT)
    table.adapter[1] = 9
    own, base = (expected((tmp_path, one), PROMPT[:12]) for one in (adapter.merged, whole))
    close(model.logits(plan((0, 0, 3), (1, 0, 11)), table, True), np.concatenate((base[:3], own[:11])))
    close(model.logits(plan((0, 3, 1), (1, 11, 1)), table, True), np.concatenate((base[3:4], own[11:12])))


def test_vectors_of_an_adapter(tmp_path: Path) -> None:
    whole = make_embedder(tmp_path / "base", "qwen3", **SMALL)
    adapter = make_adapter(tmp_path / "adapter", tmp_path / "base", whole, 8)
    model = load_cuda_model(tmp_path / "base")
    put_adapters(model, [adapter], (0,))
    table = make_table(groups=model.kv_groups)
    for slot in (0, 1):
        put(table, slot, PROMPT[:9])
    table.adapter[0] = 0
    model.execute(plan((0, 0, 8), (1, 0, 8), samples=(False, False)), table)
    vectors = model.execute(plan((0, 8, 1), (1, 8, 1)), table).vectors
    assert vectors is not None
    wanted = np.stack([expected_vector(one, PROMPT[:9]) for one in (adapter.merged, whole)])
    assert np.abs(vectors - wanted).max() < 1e-4
    assert np.abs(wanted[0] - wanted[1]).max() > 0.05


def test_a_step_that_finds_no_memory_leaves_nothing_unsaid(
    llama: tuple[Path, Any, list[Made]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What such a step could not tell the device of its slots' blocks and adapters, a later step tells. An adapter comes and goes
    without new memory on the device."""
    folder, _, adapters = llama
    model = load_cuda_model(folder)
    table = make_table(groups=model.kv_groups)
    put(table, 0, PROMPT[:9])
    table.adapter[0] = 3
    num_left = 0  # allocations before there is no memory

    def empty(*arguments: Any, **options: Any) -> torch.Tensor:
        nonlocal num_left
        num_left -= 1
        if num_left < 0:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return torch.empty(*arguments, **options)

    with monkeypatch.context() as patches:
        patches.setattr(sequences, "torch", SimpleNamespace(empty=empty, zeros=torch.zeros, int32=torch.int32))
        put_adapters(model, adapters[1:2], [5])
        num_left = 0
        with monkeypatch.context() as no_buffer:
            no_buffer.setattr(model._staging, "send", lambda *_: empty())
            model.adapter_memory.clear(5)
        put_adapters(model, adapters[:1], [3])
        for num in (0, 1):  # at the block table, and at the slot's adapter
            num_left = num
            with pytest.raises(NoWorkSpace):
                model.execute(plan((0, 0, 9)), table)
            assert num_left == -1
    close(model.logits(plan((0, 0, 9)), table, True), expected((folder, adapters[0].merged), PROMPT)[:9])
