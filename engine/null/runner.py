"""Makes null models, which produce tokens without computing anything, to measure and test all code around a model.

A null model reads its shape and its sliding windows from the checkpoint's config.json, and holds no weights. The ids that it
samples follow from (seed, position) by `null_tokens`, so that a test can predict them. Steps are paced: on average each takes
exactly `null_step_ms`.

For tests of failures, config.json may hold an object `"hearthd_null"` with these keys:
load_s: seconds that a load takes.
load_error, load_error_permanent: the text with which a load fails, and whether the failure counts as permanent, so that the load is
not tried again (true if left out).
nan_token: a token id; a step reports NaN logits for each sequence that contains it.
crash_token: a token id; a step with a sequence that contains it raises an error.
no_memory_token: a token id; a step with a sequence that contains it finds no memory (only with launches_ahead).
launches_ahead: whether steps are launched ahead, as on a GPU.
token_ms: milliseconds that each token of a step adds to the step.
crash_rank: in a split model, whose ranks wait for each other in every step, the only rank to which crash_token applies; if left
out, it applies to all ranks.
crash_late_s: makes a rank that does not lead report the error of crash_token late, as GPUs do. Its step returns at once, and the
other ranks go on waiting for it. From that many seconds later on, the rank raises the error when it is asked whether the step has
ended."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.contracts.group_share import GroupShare
from engine.contracts.loads import LoadCancelled, LoadTask
from engine.contracts.ranks import GroupBroken
from engine.contracts.steps import NoWorkSpace, StepResult
from engine.exchange import Exchange
from engine.grammar.row_masks import LockedMasks, RowMasks
from engine.host.rank_memory import LINE_BYTES
from engine.memory.group_region import open_region
from engine.memory.host_tier import HostTier
from engine.protocol import Configure, LoadModel, PromptLogprobs, SamplingParams, TokenLogprobs
from loader.configs.hf_config import parse_config
from loader.errors import CheckpointError
from loader.files.regular_file import read_regular
from loader.models.catalog import MAX_CONFIG_BYTES
from loader.shapes import kv_layout
from loader.shapes.kv_dtypes import kv_dtype_named
from loader.shapes.kv_layout import KVGroupSpec
from scheduler.batch.plan import BatchPlan, IntArray, SequenceTable

PROGRESS_EVERY_S = 0.05
MEET_EVERY_S = 5e-5


class NullLoadError(CheckpointError):
    """Raised if a null model's config.json cannot be read, or contains `load_error`."""


def null_candidates(vocab_size: int, eos_token_ids: list[int]) -> IntArray:
    """Returns the ids that a null model may sample: at most 512. They contain no end ids, and not the first ids, which in most
    vocabularies stand for single bytes. Raises ValueError if no id is left."""
    first = 256 if vocab_size >= 512 else vocab_size // 4
    ids = np.setdiff1d(np.arange(first, min(vocab_size, first + 512), dtype=np.int32), np.array(eos_token_ids, np.int32))
    if not len(ids):
        raise ValueError(f"vocab_size {vocab_size}: no id is left beside the end ids {eos_token_ids}")
    return ids


def null_tokens(seeds: npt.NDArray[np.uint64], positions: IntArray, candidates: IntArray) -> IntArray:
    """Returns the ids [N] int32 that a null model samples. Each is chosen from `candidates` by a hash (SplitMix64) of the
    sequence's seed and the token's position. seeds [N]: the seed of each sequence. positions [N]: the index of each token among the
    tokens of prompt and output."""
    # numpy's integer arrays wrap around without a warning
    x = seeds + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return candidates[(x % np.uint64(len(candidates))).astype(np.intp)]


class Pacer:
    """Paces the steps of null models: makes consecutive steps take `step_s` seconds each on average, by sleeping. Time that passes
    between steps does not make later steps shorter."""

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self._due = 0.0

    def wait(self, more_s: float = 0.0) -> None:
        """Sleeps until the running step has taken as long as it should. more_s: seconds that this step takes in addition to
        step_s."""
        step_s = self.step_s + more_s
        if step_s <= 0:
            return
        now = time.monotonic()
        # If late by less than one step, the schedule is kept, so that sleeping too long does not add up.
        self._due = self._due + step_s if now - self._due < step_s else now + step_s
        if self._due > now:
            time.sleep(self._due - now)


class NullModel:
    """Implements HostedModel (engine.contracts.steps) without weights. Its steps compute nothing, and take as long as the pacer
    says. config: the content of the checkpoint's config.json."""

    def __init__(self, spec: LoadModel, config: dict[str, Any], configure: Configure, pacer: Pacer) -> None:
        layers = int(config.get("num_hidden_layers", 2))
        heads = int(config.get("num_attention_heads", 2))
        kv_heads = int(config.get("num_key_value_heads") or heads)
        head_dim = int(config.get("head_dim") or int(config.get("hidden_size", 64)) // heads)
        self.name = spec.model
        self.vocab_size, self.embeds, self.adapter_memory = int(config.get("vocab_size", 1024)), False, None
        self.expert_counts = None
        self.weights_bytes = spec.weights_chunks * configure.chunk_bytes
        block_bytes = 2 * layers * kv_heads * kv_dtype_named(spec.kv_dtype).head_bytes(head_dim) * configure.block_tokens
        self.kv_groups: tuple[KVGroupSpec, ...] = (KVGroupSpec("full", configure.block_tokens, block_bytes, tuple(range(layers))),)
        if any(config.get(key) for key in ("sliding_window", "kv_lora_rank", "linear_num_value_heads")):
            shape = parse_config(json.dumps(config).encode(), f"{spec.path}/config.json")
            self.kv_groups = kv_layout.kv_groups(shape, spec.kv_dtype, configure.block_tokens)
        faults = config.get("hearthd_null", {})
        self._nan_token: int | None = faults.get("nan_token")
        self._crash_token: int | None = faults.get("crash_token")
        self._no_memory_token: int | None = faults.get("no_memory_token")
        self._token_s = float(faults.get("token_ms", 0.0)) / 1e3
        self._candidates = null_candidates(self.vocab_size, spec.eos_token_ids)
        self._pacer = pacer

    def execute(self, plan: BatchPlan, table: SequenceTable, masks: RowMasks | None = None) -> StepResult:
        """Runs one step, sleeps until it has taken as long as the pacer says, and returns its result. Raises RuntimeError if the
        sequence of a row contains `crash_token`."""
        started = time.monotonic()
        result = self._step(plan, table, masks)
        self._pacer.wait(self._tokens_s(plan))
        result.seconds = time.monotonic() - started
        return result

    def _tokens_s(self, plan: BatchPlan) -> float:
        return self._token_s * int(plan.num_new.sum()) if self._token_s else 0.0

    def _step(self, plan: BatchPlan, table: SequenceTable, masks: RowMasks | None) -> StepResult:
        slots = plan.slots[plan.samples]
        positions = (plan.num_computed + plan.num_new)[plan.samples]
        ids = null_tokens(table.seed[slots], positions, self._candidates)
        for at, row in enumerate(masks.rows.tolist() if masks is not None else ()):
            assert masks is not None
            allowed = np.flatnonzero(masks.allowed(slice(at, at + 1), self.vocab_size)[0]).astype(np.int32)
            ids[row] = null_tokens(table.seed[slots[row : row + 1]], positions[row : row + 1], allowed)[0]
        bad = np.zeros(len(slots), np.bool_)
        if self._crash_token is not None and self._holding(self._crash_token, plan.slots, table).any():
            raise RuntimeError(f"{self.name}: crash_token {self._crash_token} met")
        if self._nan_token is not None:
            bad = self._holding(self._nan_token, slots, table)
        result = StepResult(ids, bad, 0.0)
        self._tell_logprobs(result, plan, slots, table)
        return result

    @staticmethod
    def _tell_logprobs(result: StepResult, plan: BatchPlan, slots: IntArray, table: SequenceTable) -> None:
        """Adds to `result` the log-probabilities that requests want, of sampled tokens and of prompt tokens. Each token has
        log-probability 0 (it is certain), and is itself the only most likely token that is reported."""
        asking = np.flatnonzero((table.num_logprobs[slots] >= 0) & ~result.bad)
        if len(asking):
            counts = np.minimum(table.num_logprobs[slots[asking]], 1)
            nothing = [0.0] * len(asking)
            result.logprobs = TokenLogprobs(
                table.request_id[slots[asking]].tolist(),
                nothing,
                counts.tolist(),
                result.ids[asking][counts > 0].tolist(),
                [0.0] * int(counts.sum()),
            )
        for row in np.flatnonzero(table.prompt_logprobs[plan.slots]).tolist():
            slot, first = plan.slots[row], int(plan.num_computed[row]) + 1
            told = table.tokens[slot, first : min(first + int(plan.num_new[row]), int(table.num_prompt[slot]))]
            num_top = min(1, int(table.num_prompt_logprobs[slot]))
            nothing = [0.0] * len(told)
            top_ids, top = (told.tolist(), nothing) if num_top else ([], [])
            params = table.params[slot]
            ranks = [1] * len(told) if isinstance(params, SamplingParams) and params.prompt_ranks else []
            whose = int(table.request_id[slot])
            result.prompt_logprobs.append(PromptLogprobs(whose, first, num_top, nothing, top_ids, top, ranks))

    def release(self) -> None:
        """Does nothing: a null model has no memory to return."""

    @staticmethod
    def _holding(token: int, slots: IntArray, table: SequenceTable) -> npt.NDArray[np.bool_]:
        return np.array([(table.tokens[slot, : table.num_tokens[slot]] == token).any() for slot in slots], np.bool_)


class NullShare(NullModel):
    """One rank's share of a split null model. It begins a step when the previous pipeline stage has ended the step, and ends it
    when all ranks of its own stage have run it."""

    def __init__(
        self, spec: LoadModel, config: dict[str, Any], configure: Configure, pacer: Pacer, exchange: Exchange | None
    ) -> None:
        super().__init__(spec, config, configure, pacer)
        self.region = region = open_region(exchange, spec, configure.block_tokens)
        size = region.stage_size
        self._counters = region.ranks[: size * LINE_BYTES].view(np.int64).reshape(size, -1)[:, 0]
        self._turn = 0
        faults = config.get("hearthd_null", {})
        if faults.get("crash_rank", region.rank) != region.rank:
            self._crash_token = None
        self._crash_late_s: float | None = faults.get("crash_late_s")
        self._late: tuple[float, RuntimeError] | None = None  # an error, and by time.monotonic() when it can be met

    def execute(self, plan: BatchPlan, table: SequenceTable, masks: RowMasks | None = None) -> StepResult:
        self._receive()
        result = super().execute(plan, table, masks)
        self._meet()
        return result

    def follow(self, plan: BatchPlan, table: SequenceTable) -> None:
        self._receive()
        try:
            super().execute(plan, table)
        except RuntimeError as error:
            if self._crash_late_s is None:
                raise
            self._late = time.monotonic() + self._crash_late_s, error
            return
        self._meet()

    def has_ended(self) -> bool:
        """Returns whether the step that `follow` was called for has ended. It always has, because `follow` returns only after the
        step, except in tests with crash_late_s: the result is then False until the error is due; from then on this raises the
        error."""
        if self._late is None:
            return True
        due_s, error = self._late
        if time.monotonic() < due_s:
            return False
        raise error

    def _receive(self) -> None:
        """Waits until the previous stage has ended the step; the first stage does not wait. Raises GroupBroken if a device of the
        split model is lost before that."""
        link = self.region.link
        if link is not None and not link.is_first and link.take() is None:
            raise self._broken()

    def _meet(self) -> None:
        """Waits until all ranks of this stage have run as many steps as this rank, and then signals the next stage that it can
        begin the step. Raises GroupBroken if a device of the split model is lost before that."""
        self._turn += 1
        self._counters[self.region.stage_rank] = self._turn
        while not self.region.is_broken:
            if (self._counters >= self._turn).all():
                if self.region.link is not None and not self.region.link.is_last:
                    self.region.link.send()
                return
            time.sleep(MEET_EVERY_S)
        raise self._broken()

    def _broken(self) -> GroupBroken:
        return GroupBroken(f"rank {self.region.rank}: the group has lost a device")


class AheadNullModel(NullModel):
    """A null model that launches steps ahead (before the tokens of the last step are known) as models on a GPU do, to test how the
    engine handles such models."""

    num_uncaptured = 3

    def capture_next(self) -> None:
        self.num_uncaptured -= 1

    def launch(self, plan: BatchPlan, table: SequenceTable, masks: RowMasks | None = None) -> PacedStep:
        if self._no_memory_token is not None and self._holding(self._no_memory_token, plan.slots, table).any():
            raise NoWorkSpace(f"no_memory_token {self._no_memory_token} met")
        return PacedStep(self._step(plan, table, masks), self._pacer, self._tokens_s(plan))


class PacedStep:
    """A launched step of a null model. `wait` returns the step's result once the step has taken as long as the pacer says.
    tokens_s: seconds that the step's tokens add."""

    def __init__(self, result: StepResult, pacer: Pacer, tokens_s: float) -> None:
        self._result, self._pacer, self._tokens_s = result, pacer, tokens_s

    def wait(self) -> StepResult:
        self._pacer.wait(self._tokens_s)
        self._result.seconds = self._pacer.step_s + self._tokens_s
        return self._result


def _mark(spec: LoadModel, index: int) -> npt.NDArray[np.uint8]:
    """Returns the uint8 [16] that a null model writes to the beginning of slot number `index` among its slots of the host tier. If
    a load finds other bytes there, the slot was also given to another model, or to another share of the model."""
    text = f"{index} {spec.fingerprint} {spec.dtype} {spec.share}".encode()
    return np.frombuffer(hashlib.blake2b(text, digest_size=16).digest(), np.uint8)


def _checksum(spec: LoadModel) -> int:
    return int.from_bytes(_mark(spec, -1)[:8].tobytes(), "little") or 1


class NullRunner:
    """Implements Runner (engine.contracts.loads): loads null models on one device."""

    compute_threads = 1

    def __init__(self, configure: Configure, tier: HostTier | None = None, exchange: Exchange | None = None) -> None:
        self._configure, self._tier, self._exchange = configure, tier, exchange
        self._pacer = Pacer(configure.null_step_ms / 1e3)

    def lock_masks(self, bits: npt.NDArray[np.uint32]) -> None:
        """Returns None: no memory is locked, because null models have no device that copies the masks."""

    def unlock_masks(self, locked: LockedMasks) -> None:
        """Does nothing, because nothing was locked."""

    def probe(self, number: int) -> None:
        """Does nothing. On other devices this tests whether the device still computes correctly, but null models compute
        nothing."""

    def load(self, task: LoadTask) -> NullModel | GroupShare:
        """Loads a null model, or a device's share of one, and returns it. Raises NullLoadError if config.json cannot be read or
        contains `load_error`, and LoadCancelled if the load is cancelled."""
        spec = task.spec
        path = Path(spec.path) / "config.json"
        try:
            config = json.loads(read_regular(path, MAX_CONFIG_BYTES))
        except (OSError, ValueError, RecursionError) as error:
            raise NullLoadError(str(path), None, str(error)) from error
        faults = config.get("hearthd_null", {})
        kind = AheadNullModel if faults.get("launches_ahead") else NullModel
        total_bytes = max(1, spec.weights_chunks * self._configure.chunk_bytes)
        if self._taken(task):
            return self._made(spec, config, kind)
        load_s = float(faults.get("load_s", 0.0))
        started = time.monotonic()
        while (elapsed := time.monotonic() - started) < load_s:
            if task.cancelled():
                raise LoadCancelled(spec.model)
            task.progress(int(total_bytes * elapsed / load_s), total_bytes)
            time.sleep(min(PROGRESS_EVERY_S, load_s - elapsed))
        if "load_error" in faults:
            failure = NullLoadError(str(path), None, str(faults["load_error"]))
            failure.permanent = bool(faults.get("load_error_permanent", True))
            raise failure
        task.progress(total_bytes, total_bytes)
        task.bytes_read = total_bytes
        for index, slot in enumerate(self._slots(spec.keep_slots)):
            slot[:16] = _mark(spec, index)
        if spec.keep_slots:
            task.kept, task.checksum = True, _checksum(spec)
        return self._made(spec, config, kind)

    def _made(self, spec: LoadModel, config: dict[str, Any], kind: type[NullModel]) -> NullModel | GroupShare:
        """Returns a new model, or a share of one if the model is split. kind: the class of the model if it is not split."""
        if spec.group is None:
            return kind(spec, config, self._configure, self._pacer)
        share = NullShare(spec, config, self._configure, self._pacer, self._exchange)
        return GroupShare(share, share.region)

    def _taken(self, task: LoadTask) -> bool:
        """Returns whether the load uses the copy in the host tier (spec.source_slots): there is one, and it is a copy of this
        model. If there is a copy that is not used, sets task.source_rejected to the reason."""
        spec = task.spec
        if not spec.source_slots:
            return False
        try:
            whole = all((slot[:16] == _mark(spec, index)).all() for index, slot in enumerate(self._slots(spec.source_slots)))
        except (ValueError, IndexError) as error:
            task.source_rejected = str(error)
            return False
        if not whole or spec.checksum != _checksum(spec):
            task.source_rejected = f"the copy in the host tier is not that of {spec.model}, checksum {spec.checksum:#x}"
            return False
        task.kept, task.checksum = True, spec.checksum
        return True

    def _slots(self, slots: Sequence[int]) -> list[npt.NDArray[np.uint8]]:
        if slots and self._tier is None:
            raise ValueError("slots given, but this engine was given no host tier")
        return [self._tier.slot(slot) for slot in slots] if self._tier is not None else []
