"""The committed head drafts tokens for its model, and most of them hold."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from config.schema import ModelConfig
from daemon.models.speculators import EAGLE3, Choice
from demo.corpus import BEGIN_ASSISTANT, BEGIN_USER, END_OF_TURN
from demo.train_head import FOLDER, head_config
from engine.contracts.loads import LoadTask
from engine.cpu.backend import CpuBackend
from engine.cpu.memory import CpuMemory
from engine.loading.runner import TorchRunner
from engine.protocol import Configure, LoadModel, SamplingParams
from engine.serve.kv_caches import make_kv_cache
from loader.models.catalog import scan
from scheduler.batch.batch_scheduler import BatchLimits, BatchScheduler
from scheduler.batch.chunk_pool import ChunkPool
from scheduler.batch.prompt_lookup import looked_up
from scheduler.batch.request import BatchRequest
from scheduler.batch.step_room import StepRoom
from tests.kernel_cache import CACHE_DIR

MODELS = Path(__file__).resolve().parents[2] / "demo" / "models"
NAME = "ember"
CHUNKS, CHUNK_BYTES, BLOCK_TOKENS, LENGTH = 64, 256 << 10, 16, 256  # the last 32 chunks hold weights
ROWS = 16  # of a step: four sequences with three drafted tokens each
PROMPTS = ("Tell me about exceptions.", "What does close do?", "What is the threading module?", "Explain sockets and streams.")


class ChainsOfThree(StepRoom):
    """Room for three drafted tokens, whatever they cost."""

    def worth_proposing(self, *of_step: object) -> int:
        return 3


def test_settings_are_those_the_training_writes() -> None:
    assert json.loads((MODELS / NAME / FOLDER / "config.json").read_text()) == head_config(NAME)


def test_catalog_has_it_draft_for_its_model() -> None:
    found = scan(MODELS)
    heads = {name: one for name, one in found.items() if one.head is not None}
    assert list(heads) == [f"{NAME}/{FOLDER}"]
    model = found[NAME]
    assert model.shape is not None
    speculator = Choice(ModelConfig(), model, model.shape, {"cpu"}, model, heads).chosen()
    assert (speculator.name, speculator.head, speculator.why_not) == (EAGLE3, heads[f"{NAME}/{FOLDER}"], "")


@pytest.mark.parametrize(("temperature", "least"), [(0.0, 1.8), (0.5, 1.8)])
def test_steps_give_nearly_two_tokens_in_chains_of_three(temperature: float, least: float) -> None:
    found = scan(MODELS)
    model, head = found[NAME], found[f"{NAME}/{FOLDER}"]
    assert model.shape is not None
    fingerprint = Choice(ModelConfig(), model, model.shape, {"cpu"}, model, {head.name: head}).chosen().fingerprint
    memory, weights = CpuMemory(CHUNKS, CHUNK_BYTES), np.arange(CHUNKS // 2, CHUNKS, dtype=np.int32)
    configure = Configure("cpu:0", CHUNKS, CHUNK_BYTES, 0, 512, BLOCK_TOKENS, 10.0, 1, cache_dir=CACHE_DIR)
    paths = {"speculator": EAGLE3, "head_path": head.path}
    spec = LoadModel(1, NAME, model.path, "float32", fingerprint, len(weights), 4, 4, LENGTH, ROWS, [0, 1], **paths)
    runner = TorchRunner(CpuBackend(memory, configure), configure)
    loaded = runner.load(LoadTask(spec, weights, lambda done, total: None, lambda: False))
    kv = make_kv_cache(spec, loaded.kv_groups, ChunkPool(CHUNKS // 2, CHUNK_BYTES, CHUNKS // 2), 512)
    scheduler = BatchScheduler(NAME, kv, BatchLimits(ROWS, LENGTH, 512, (0, 1), "f", "float32"), looked_up, has_predictor=True)
    tokenizer = Tokenizer.from_file(str(MODELS / NAME / "tokenizer.json"))
    for number, prompt in enumerate(PROMPTS, 1):
        ids = tokenizer.encode(f"{BEGIN_USER}{prompt}{END_OF_TURN}{BEGIN_ASSISTANT}", add_special_tokens=False).ids
        params = SamplingParams(150, temperature=temperature, top_p=0.9, seed=number)
        scheduler.submit(BatchRequest(number, np.array(ids, np.int32), len(ids), params))
    num_steps = num_tokens = 0  # of each sequence
    while (plan := scheduler.plan(0, ChainsOfThree())) is not None:
        result = loaded.execute(plan, scheduler.table)
        outcome = scheduler.finish_step(plan, result.ids, result.bad)
        if result.proposed is not None:
            scheduler.take_proposals(result.proposed.slots, result.proposed.counts, result.proposed.tokens)
        if plan.all_decode:
            num_steps += len(outcome.request_ids)
            num_tokens += len(outcome.ids)
    loaded.release()
    assert num_tokens > 100
    assert num_tokens / num_steps >= least
