"""The GPU's model, with its kernels interpreted, gives every logit as transformers does, also with sampled tokens that stay on the
device. What only a GPU can show (graphs, streams, page-locked memory) is tested in tests/gpu.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.contracts.steps import NoWorkSpace
from engine.cuda.kernels import entry, linear_choice, tiles, triton_decode
from engine.cuda.model import CudaModel
from engine.cuda.ops import CudaOps
from engine.grammar.row_masks import RowMasks
from engine.grammar.token_limits import TokenLimits
from engine.protocol import LoadModel, SamplingParams
from engine.serve.kv_caches import make_kv_cache
from scheduler.batch.batch_scheduler import BatchLimits, BatchScheduler
from scheduler.batch.chunk_pool import ChunkPool
from scheduler.batch.plan import BatchPlan, write_sampling
from scheduler.batch.request import BatchRequest
from tests.engine.cpu_ops import compute_with
from tests.engine.cuda_bench import INTERPRETED, KINDS, OTHER, PROMPT, close, expected, load_cuda_model
from tests.engine.model_bench import (
    CASES,
    CHUNK_BYTES,
    MAX_LEN,
    load,
    make_checkpoint,
    make_memory,
    make_runner,
    make_table,
    plan,
    put,
)
from tests.loader import compressed as int_quantized
from tests.loader import fp8, gptq, int4, nvfp4

pytest.importorskip("triton")
pytestmark = INTERPRETED


# what they have the others have, too; on a GPU all are computed
SLOW = {"llama", "qwen3", "olmo2", "gemma3", "phi3-partial-window", "qwen2-moe", "glm4-moe"}

# what takes long to interpret, with a layer of each kind
SMALLER: dict[str, dict[str, Any]] = {
    "gemma4": {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "num_kv_shared_layers": 1,
        "num_experts": 4,
        "top_k_experts": 2,
    },
    "gemma2": {"num_hidden_layers": 3},
    "cohere2": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    "deepseek-v3": {"num_hidden_layers": 2},
    "llama4": {"num_hidden_layers": 2, "moe_layers": [1], "no_rope_layers": [1, 0]},
}


@pytest.fixture(scope="module", params=[kind for kind in KINDS if kind not in SLOW])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, make_checkpoint(folder, **(CASES[request.param] | SMALLER.get(request.param, {})))


def test_prefill_in_chunks_then_a_mixed_batch(made: tuple[Path, Any]) -> None:
    """Logits are right when three rows prefill, and in a mixed step where one row decodes, one has a short chunk and one a long
    chunk."""
    model = load_cuda_model(made[0])
    table = make_table(groups=model.kv_groups)
    for slot, tokens in ((0, PROMPT), (1, OTHER), (4, PROMPT)):
        put(table, slot, tokens)
    first, second = expected(made, PROMPT), expected(made, OTHER)
    close(model.logits(plan((0, 0, 17), (1, 0, 9), (4, 0, 3)), table, True), np.concatenate((first[:17], second[:9], first[:3])))
    mixed = plan((0, 17, 1), (4, 3, 4), (1, 9, 14))
    close(model.logits(mixed, table, True), np.concatenate((first[17:18], first[3:7], second[9:23])))
    following = plan((0, 18, 1), (4, 7, 2), (1, 23, 3), samples=(True, False, True))
    close(model.logits(following, table), np.stack((first[18], second[25])))


@pytest.mark.parametrize("kind", ["gemma2", "gpt-oss"])
def test_attention_that_joins_pieces_gives_the_same_logits(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model computes as on a GPU that has chosen this form. gemma2 has windows in some layers, gpt-oss has sinks; decode rows
    come beside rows with new tokens."""
    monkeypatch.setattr(triton_decode, "SPLIT_TOKENS", 16)
    made = tmp_path, make_checkpoint(tmp_path, **(CASES[kind] | SMALLER.get(kind, {})))
    shape, own = load_cuda_model(tmp_path).shape, triton_decode._piece_kernel
    joined: list[bool] = []

    class Noting:
        def __getitem__(self, grid: Any) -> Any:
            def launch(*arguments: Any, **options: Any) -> None:
                joined.append(options["JOINS"])
                own[grid](*arguments, **options)

            return launch

    monkeypatch.setattr(triton_decode, "_piece_kernel", Noting())
    chosen = []
    for heads in shape.kinds_of_heads:
        place = (tiles.DECODE_KERNEL, tiles.padded(heads.head_dim), 4, False)
        tile = tiles.entry_of(*place).tile._replace(joins=True)
        chosen.append(tiles.MeasuredTile(*place, shape.num_heads // heads.num_kv_heads, tile))
    try:
        tiles.use(chosen)
        model = load_cuda_model(tmp_path)
        table = make_table(groups=model.kv_groups)
        for slot, tokens in ((0, PROMPT), (1, OTHER)):
            put(table, slot, tokens)
        model.logits(plan((0, 0, 58), (1, 0, 9)), table, True)
        first, second = expected(made, PROMPT), expected(made, OTHER)
        close(model.logits(plan((0, 58, 1), (1, 9, 14)), table, True), np.concatenate((first[58:59], second[9:23])))
        close(model.logits(plan((0, 59, 1), (1, 23, 1)), table), np.stack((first[59], second[23])))
    finally:
        tiles.use([])
    assert joined
    assert all(joined)


def test_fp8_weights_give_the_logits_of_what_they_stand_for(tmp_path: Path) -> None:
    made = make_checkpoint(tmp_path / "plain", "qwen3", hidden_size=144, num_hidden_layers=1, tie_word_embeddings=False)
    meant = fp8.quantize(tmp_path / "plain", tmp_path / "fp8", fp8.KINDS["fine-grained"])
    made.load_state_dict(made.state_dict() | meant)
    model = load_cuda_model(tmp_path / "fp8")
    table = make_table(groups=model.kv_groups)
    for slot in (0, 1):
        put(table, slot, PROMPT)
    wanted = expected((tmp_path, made), PROMPT)
    close(model.logits(plan((0, 0, 40)), table, True), wanted[:40])
    close(model.logits(plan((0, 40, 1), (1, 0, 2)), table, True), np.concatenate((wanted[40:41], wanted[:2])))


LATENT = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "moe_intermediate_size": 32, "q_lora_rank": 32}
LATENT |= {"kv_lora_rank": 32, "v_head_dim": 32}
DENSE = {"hidden_size": 96, "intermediate_size": 32, "num_hidden_layers": 1}
SPARSE = {"hidden_size": 32, "moe_intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16, "decoder_sparse_step": 1}
SPARSE |= {"num_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("case", "changes", "quantize"),
    [
        ("deepseek-v3", LATENT, partial(int4.quantize, config=int4.compressed())),
        ("llama", DENSE, partial(gptq.quantize, config=gptq.gptq(sym=False, desc_act=True))),
        ("qwen3-moe", SPARSE, partial(nvfp4.quantize, config=nvfp4.compressed())),
        ("deepseek-v3", LATENT, int_quantized.quantize),
        ("llama", DENSE | {"hidden_size": 72}, int_quantized.quantize),
        ("qwen3-moe", SPARSE, int_quantized.quantize),
    ],
    ids=["compressed", "gptq", "nvfp4", "int8-latent", "int8", "int8-experts"],
)
def test_weights_of_four_bits_and_int8_give_the_logits_of_what_they_stand_for(
    tmp_path: Path, case: str, changes: dict[str, Any], quantize: Callable[[Path, Path], Any]
) -> None:
    """In dense layers, experts and latent attention, against the plain checkpoint with the weights of the definition."""
    make_checkpoint(tmp_path / "plain", **CASES[case] | changes)
    meant = quantize(tmp_path / "plain", tmp_path / "small")
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    save_file(tensors | meant, tmp_path / "plain" / "model.safetensors")
    found = [logits_of(load_cuda_model(tmp_path / folder)) for folder in ("plain", "small")]
    for own, wanted in zip(found[1], found[0], strict=True):
        close(own, wanted)


@pytest.mark.parametrize(("case", "changes"), [("llama", DENSE), ("qwen3-moe", SPARSE), ("deepseek-v3", LATENT)])
def test_weights_rounded_to_int8_give_the_logits_of_what_they_stand_for(tmp_path: Path, case: str, changes: dict[str, Any]) -> None:
    make_checkpoint(tmp_path / "plain", **CASES[case] | changes)
    rounded = int_quantized.quantize(tmp_path / "plain", tmp_path / "small")
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    found = [logits_of(load_cuda_model(tmp_path / "plain", quantize="int8"))]
    save_file(tensors | rounded, tmp_path / "plain" / "model.safetensors")
    found.append(logits_of(load_cuda_model(tmp_path / "plain")))
    for own, wanted in zip(*found, strict=True):
        close(own, wanted)


def logits_of(model: CudaModel) -> list[np.ndarray]:
    """Returns the logits of a prompt of 20 tokens, and of a step with a next token and two of another prompt."""
    table = make_table(groups=model.kv_groups)
    for slot in (0, 1):
        put(table, slot, PROMPT)
    return [model.logits(plan((0, 0, 20)), table, True), model.logits(plan((0, 20, 1), (1, 0, 2)), table, True)]


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_tokens_go_from_step_to_step_on_the_device(tmp_path: Path, kind: str) -> None:
    """Six steps launched before the first is read give the right text: sampled tokens reach the next step without passing through
    the host."""
    made = make_checkpoint(tmp_path, **CASES[kind])
    model = load_cuda_model(tmp_path)
    table = make_table(groups=model.kv_groups)
    put(table, 2, PROMPT[:10])
    put(table, 5, OTHER[:3])
    with torch.inference_mode():
        wanted = made.generate(torch.tensor([PROMPT[:10]]), max_new_tokens=6, do_sample=False, eos_token_id=None)[0].tolist()
    steps = [model.launch(plan((2, 0, 10), (5, 0, 3), samples=(True, False)), table)]
    steps += [model.launch(plan((2, 10 + at, 1)), table) for at in range(5)]
    results = [step.wait() for step in steps]
    assert PROMPT[:10] + [int(result.ids[0]) for result in results] == wanted
    assert not any(result.bad.any() for result in results)


def test_settings_of_rows_give_the_tokens_of_the_cpu(tmp_path: Path) -> None:
    """A step with seeded, cut, penalised, biased, masked and greedy rows samples the CPU sampler's tokens. Log-probabilities, of
    some rows and of a prompt, are equal too."""
    make_checkpoint(tmp_path, **CASES["llama"] | {"num_hidden_layers": 1})
    settings = [
        SamplingParams(max_tokens=20, temperature=0.9, seed=4),
        SamplingParams(
            max_tokens=20, temperature=1.3, top_p=0.7, top_k=20, seed=5, logprobs=3, prompt_logprobs=2, prompt_ranks=True
        ),
        SamplingParams(max_tokens=20, temperature=0.0, frequency_penalty=0.8, presence_penalty=0.5, logit_bias={7: 4.0}),
        SamplingParams(max_tokens=20, temperature=0.7, min_p=0.02, seed=6, repetition_penalty=1.3, min_tokens=30),
        SamplingParams(max_tokens=20, temperature=0.0),
        SamplingParams(max_tokens=20, temperature=0.0, allowed_token_ids=[5, 11, 40], bad_words=[[11]]),
    ]

    def run(num_rows: int, on_gpu: bool) -> Any:
        model = load_cuda_model(tmp_path)
        table = make_table(groups=model.kv_groups)
        for slot in range(num_rows):
            put(table, slot, PROMPT[slot : slot + 14])
            write_sampling(table, slot, settings[slot], 8, MAX_LEN)
            table.num_prompt[slot], table.prompt_logprobs[slot] = 8, settings[slot].prompt_logprobs >= 0
        step = plan(*((slot, 0, 14) for slot in range(num_rows)))
        masks = None
        if num_rows == len(settings):
            bits = TokenLimits("tiny", settings[-1], model.vocab_size, []).bits
            masks = RowMasks([1], np.array([num_rows - 1]), [bits])
        if on_gpu:
            return model.execute(step, table, masks)
        runner = compute_with(make_runner(make_memory()), use_kernels=False)
        return load(runner, tmp_path).execute(step, table, masks)

    for num_rows in (1, 6):
        ours, wanted = run(num_rows, True), run(num_rows, False)
        assert ours.ids.tolist() == wanted.ids.tolist()
        assert not ours.bad.any()
        if num_rows == 6:
            assert ours.ids[5] in (5, 40)
            (of_prompt,), (as_wanted,) = ours.prompt_logprobs, wanted.prompt_logprobs
            assert len(of_prompt.ranks) == 7
            assert (of_prompt.ranks, of_prompt.top_ids) == (as_wanted.ranks, as_wanted.top_ids)
            assert np.abs(np.array(of_prompt.chosen) - np.array(as_wanted.chosen)).max() < 1e-3
            assert ours.logprobs.top_ids == wanted.logprobs.top_ids
            assert np.abs(np.array(ours.logprobs.top) - np.array(wanted.logprobs.top)).max() < 1e-3


def test_a_row_that_is_not_finite_is_bad_and_no_other(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, **CASES["llama"])
    model = load_cuda_model(tmp_path)
    table = make_table(groups=model.kv_groups)
    put(table, 0, PROMPT)
    put(table, 1, OTHER)
    model.execute(plan((0, 0, 12), (1, 0, 12)), table)
    model._memory[0].kv[table.block_tables[0][1, 2]] = torch.nan
    assert model.execute(plan((0, 12, 1), (1, 12, 1)), table).bad.tolist() == [False, True]


NO_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.\nMore of it"),
    torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in the documentation."),
    RuntimeError("Triton Error [CUDA]: out of memory"),
]


@pytest.mark.parametrize("error", NO_MEMORY, ids=["torch", "page-locked", "triton"])
def test_a_step_that_finds_no_memory_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: RuntimeError) -> None:
    """A step that finds no memory, whose ever that is, raises NoWorkSpace, and the model's next step runs as usual."""
    make_checkpoint(tmp_path, kind="qwen2", num_hidden_layers=1)
    model = load_cuda_model(tmp_path)
    table = make_table(groups=model.kv_groups)
    put(table, 0, PROMPT)
    wanted = model.execute(plan((0, 0, 9)), table).ids.tolist()

    def refuse(*_: Any) -> Any:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(model, "_forward", refuse)
        with pytest.raises(NoWorkSpace, match=r"a step of 9 tokens of 1 requests .* work space: (CUDA|Triton) .*out of memory"):
            model.launch(plan((0, 0, 9)), table)
    assert model.execute(plan((0, 0, 9)), table).ids.tolist() == wanted


def test_warming_up_writes_no_kv(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, **CASES["gemma2"] | {"num_hidden_layers": 2})
    model = load_cuda_model(tmp_path)
    model.warm()
    assert all(memory.kv.isnan().all() for memory in model._memory)


def test_released_weights_are_not_used(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, **CASES["llama"])
    model = load_cuda_model(tmp_path)
    table = make_table(groups=model.kv_groups)
    put(table, 0, PROMPT)
    model.release()
    model.release()
    with pytest.raises(RuntimeError, match="released"):
        model.execute(plan((0, 0, 5)), table)


def scheduled(model: CudaModel, ahead: bool, stop: Sequence[int] = ()) -> dict[int, list[int]]:
    """Returns the texts of three requests with seeds and chunked prompts, one of them with stop ids. ahead: each step is launched
    before the last one is read; otherwise steps run one after the other."""
    block_bytes = model.kv_groups[0].block_bytes
    chunks = ChunkPool(len(model._memory[0].kv) * block_bytes // CHUNK_BYTES, CHUNK_BYTES, lease_chunks=40)
    spec = LoadModel(1, "tiny", "", "float32", "f", 0, 8, 40, MAX_LEN, 8, [1])
    kv = make_kv_cache(spec, model.kv_groups, chunks, 16)
    scheduler = BatchScheduler("tiny", kv, BatchLimits(8, MAX_LEN, 16, (1,), "f", "float32"))
    texts: dict[int, list[int]] = {1: [], 2: [], 3: []}
    for request_id, prompt in ((1, PROMPT[:9]), (2, OTHER[:13]), (3, PROMPT[:4])):
        params = SamplingParams(max_tokens=4 + request_id, temperature=0.9 * (request_id - 1), seed=request_id, ignore_eos=True)
        if request_id == 2:
            params = msgspec.structs.replace(params, stop_token_ids=list(stop))
        scheduler.submit(BatchRequest(request_id, np.array(prompt, np.int32), len(prompt), params))
    under_way: deque[tuple[BatchPlan, Any]] = deque()
    while True:
        step = scheduler.plan(0)
        if step is not None:
            under_way.append((step, model.launch(step, scheduler.table)))
            if ahead:
                scheduler.start_step(step)
        if not under_way:
            return texts
        if step is None or not ahead or len(under_way) > 1:
            oldest, launched = under_way.popleft()
            result = launched.wait()
            outcome = scheduler.finish_step(oldest, result.ids, result.bad)
            for request_id, token in zip(outcome.request_ids, outcome.ids, strict=True):
                texts[request_id].append(token)


def test_steps_planned_before_the_last_is_read_give_the_same_texts(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, kind="qwen2", num_hidden_layers=1)
    whole = scheduled(load_cuda_model(tmp_path), False)
    assert [len(text) for text in whole.values()] == [5, 6, 7]
    stop = whole[2][3]
    plain = whole | {2: whole[2][: whole[2].index(stop) + 1]}
    assert scheduled(load_cuda_model(tmp_path), True, [stop]) == plain


def test_every_product_of_few_rows_is_launched_before_it_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Warming up launches our kernel for each weight, with its bias and, as it is measured, without, for one to four rows, and for
    gates and ups with the activation as well: which kernel a step takes is decided later."""
    make_checkpoint(tmp_path, **CASES["llama-biases-linear"])
    launched: set[tuple[int, int, bool, bool | None]] = set()
    multiplied: set[tuple[int, bool, bool | None]] = set()
    ops_linear, ops_gated_linear = CudaOps.linear, CudaOps.gated_linear

    def ours(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, gelu: bool | None) -> None:
        launched.add((len(x), weight.data_ptr(), bias is not None, gelu))

    def linear(self: CudaOps, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        multiplied.add((weight.data_ptr(), bias is not None, None))
        return ops_linear(self, x, weight, bias)

    def gated_linear(self: CudaOps, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, gelu: bool) -> torch.Tensor:
        multiplied.update((weight.data_ptr(), bias is not None, with_activation) for with_activation in (None, gelu))
        return ops_gated_linear(self, x, weight, bias, gelu)

    monkeypatch.setattr(linear_choice, "ours", ours)
    monkeypatch.setattr(CudaOps, "linear", linear)
    monkeypatch.setattr(CudaOps, "gated_linear", gated_linear)
    monkeypatch.setattr(entry, "INTERPRETED", False)
    monkeypatch.setattr(entry, "MANY_ROWS", 5)  # interpreting more takes long
    model = load_cuda_model(tmp_path)
    model.warm()
    assert sum(has_bias for _, has_bias, _ in multiplied) == 3 * 5
    assert {gelu for *_, gelu in multiplied} == {None, False}
    kinds = {(weight, kind, gelu) for weight, has_bias, gelu in multiplied for kind in {has_bias, False}}
    assert launched == {(num_rows, *kind) for num_rows in (1, 2, 3, 4) for kind in kinds}
    launched.clear()
    table = make_table(groups=model.kv_groups)
    put(table, 0, PROMPT)
    model.execute(plan((0, 0, 3)), table)
    assert not launched
