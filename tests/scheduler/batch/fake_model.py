"""A model whose next token is a hash of every token before it, read back through the KV blocks.

It stores each new token's id, with a check sum of all tokens up to it, in the token's block of each KV group, as a real model
stores keys and values, and looks at nothing else when it samples. A window group shows it the last tokens only. In a state group it
keeps a digest of all tokens, which it can only update by the next one. A wrong block table, a block freed too early or a wrong
prefix hit fails a check or changes the text.

A predictor beside it drafts what the model will sample, and errs now and then. It stores the same check sums of the tokens it has
seen in an arena of its own, at the model's places, and checks all those before a draft: a token that it was not shown, or whose
block is another's, fails.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import Counter
from collections.abc import Sequence
from itertools import islice, repeat

import numpy as np

from scheduler.batch.batch_scheduler import BatchLimits, BatchScheduler, StepOutcome
from scheduler.batch.block_pool import BlockPool
from scheduler.batch.chunk_pool import ChunkPool
from scheduler.batch.compaction import Compaction
from scheduler.batch.drafting import Drafter
from scheduler.batch.group_cache import GroupCache
from scheduler.batch.kv_cache import KVCache
from scheduler.batch.plan import BatchPlan, IntArray, SequenceTable
from scheduler.batch.request import BatchRequest
from scheduler.batch.step_limits import StepLimits
from scheduler.batch.step_room import StepRoom
from tests.scheduler.batch.params import Params

VOCAB = 97
EOS = 96
BLOCK_TOKENS = 4
STATE, SNAPSHOT_TOKENS = 1 << 20, 16  # the "window" of a state group, and where prompts leave states behind


def next_token(tokens: list[int], vocab: int = VOCAB) -> int:
    digest = hashlib.sha256(np.array(tokens, np.int32).tobytes()).digest()
    return int.from_bytes(digest[:4], "little") % vocab


def in_sight(tokens: list[int], windows: tuple[int, ...]) -> list[int]:
    """What the last token attends to, group by group. A window below 0 is a chunk's length."""
    seen = []
    for window in windows:
        if window == STATE:
            seen.append(state_after(0, tokens))
        else:
            seen += tokens[first_seen(len(tokens) - 1, window) :]
    return seen


def state_after(state: int, tokens: Sequence[int]) -> int:
    """The digest after more tokens, above 0."""
    for token in tokens:
        state = zlib.crc32(int(token).to_bytes(2, "little"), state) & 0x7FFFFFFF | 1
    return state


def first_seen(position: int, window: int) -> int:
    """The first position that a query attends to."""
    if window < 0:
        return position // -window * -window
    return max(0, position + 1 - window) if window else 0


def expected_output(
    prompt: list[int], params: Params, max_model_len: int, eos: tuple[int, ...] = (EOS,), windows: tuple[int, ...] = (0,)
) -> list[int]:
    """What a request must give, however it is scheduled."""
    tokens = list(prompt)
    while len(tokens) < min(len(prompt) + params.max_tokens, max_model_len):
        token = next_token(in_sight(tokens, windows))
        num_before = len(tokens) - len(prompt)
        tokens.append(token)
        ends = (token in eos and not params.ignore_eos) or token in params.stop_token_ids
        if ends and num_before >= params.min_tokens:
            break
    return tokens[len(prompt) :]


def stored(tokens: IntArray, position: int) -> int:
    """What a block holds for a token."""
    return int(tokens[position]) + VOCAB * (zlib.crc32(tokens[: position + 1].tobytes()) % (1 << 23))


Proposed = tuple[IntArray, IntArray, IntArray]  # slots, counts and tokens, as BatchScheduler.take_proposals takes them


class FakeModel:
    """arena [bytes / 4]: all groups and models see the same one. A block of n bytes holds as many copies of its tokens as fit.
    accuracy: of the predictor at each token; None: there is none."""

    def __init__(self, arena: IntArray, groups: list[tuple[int, int]], accuracy: float | None = None) -> None:
        self.arena = arena
        self.groups = groups  # (block_bytes, window)
        self.num_computed_tokens = 0
        self.accuracy = accuracy
        self.predicted = np.full_like(arena, -1)  # what the predictor has stored, in the blocks of the first group
        self.num_seen_steps = self.num_proposed_tokens = 0
        self._rng = np.random.default_rng(0)

    def copy_blocks(self, block_bytes: int, sources: IntArray, targets: IntArray) -> None:
        """As the device's arena does it. What was there is of no use any more."""
        assert not set(sources.tolist()) & set(targets.tolist())
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            place, old = (slice(block * block_bytes // 4, (block + 1) * block_bytes // 4) for block in (target, source))
            for arena in (self.arena, self.predicted):
                arena[place] = arena[old]
                arena[old] = -1

    def _at(self, group: int, block: int, position: int) -> slice:
        """Where the copies of a token are."""
        assert block >= 0, f"group {group}: the block of position {position} is gone"
        block_bytes = self.groups[group][0]
        first, end = block * block_bytes // 4, (block + 1) * block_bytes // 4
        return slice(first + position % BLOCK_TOKENS, end - (end - first) % BLOCK_TOKENS, BLOCK_TOKENS)

    def execute(self, plan: BatchPlan, table: SequenceTable) -> tuple[IntArray, np.ndarray]:
        assert (np.diff(plan.num_new > 1) >= 0).all() if len(plan.slots) > 1 else True, "rows of one token come first"
        assert plan.drafted or len(np.unique(plan.slots)) == len(plan.slots)
        ids, row_of = [], Counter[int]()
        for slot, computed, num_new, samples in zip(plan.slots, plan.num_computed, plan.num_new, plan.samples, strict=True):
            assert num_new > 0
            assert computed == table.num_computed[slot] + row_of[slot]
            assert computed + num_new <= table.num_tokens[slot] + row_of[slot]
            row_of[slot] += 1
            for position in range(computed, computed + num_new):
                for group, tables in enumerate(table.block_tables):
                    if self.groups[group][1] == STATE:
                        continue
                    block = tables[slot, position // BLOCK_TOKENS]
                    self.arena[self._at(group, block, position)] = stored(table.tokens[slot], position)
            self.num_computed_tokens += int(num_new)
            seen = self._read(table, slot, int(computed), int(computed + num_new))
            if samples:
                ids.append(next_token(seen))
        return np.array(ids, np.int32), np.zeros(len(ids), np.bool_)

    def propose(self, plan: BatchPlan, table: SequenceTable, ids: IntArray, capacity: IntArray) -> Proposed | None:
        """What the predictor drafts behind a step that sampled `ids`; None: it does not see it. capacity [S]: positions that the
        slots' blocks hold."""
        if self.accuracy is None:
            assert plan.to_propose is None
            return None
        is_seen = plan.to_propose is not None
        self.num_seen_steps += is_seen
        for slot, computed, num_new in zip(plan.slots, plan.num_computed, plan.num_new, strict=True):
            for position in range(computed, computed + num_new):
                self.predicted[self._place(table, slot, position)] = stored(table.tokens[slot], position) if is_seen else -1
        if plan.to_propose is None:
            return None
        slots, counts, tokens = [], [], []
        sampled = iter(ids.tolist())
        stopped: set[int] = set()  # slots of which another token was sampled than was drafted
        for row, slot in enumerate(plan.slots.tolist()):
            token = next(sampled) if plan.samples[row] else -1
            end = int(plan.num_computed[row] + plan.num_new[row])
            next_row = row + 1 < len(plan.slots) and plan.slots[row + 1] == slot
            if token < 0 or slot in stopped or (next_row and table.tokens[slot, end] == token):
                continue
            stopped.add(slot)
            num = int(plan.to_propose[row])
            slots.append(slot)
            counts.append(num)
            tokens.append(self._drafts(table, slot, [*table.tokens[slot, :end].tolist(), token], num, int(capacity[slot])))
        width = max(counts, default=0)
        padded = [[*drafted, *[VOCAB] * (width - len(drafted))] for drafted in tokens]
        return np.array(slots, np.int32), np.array(counts, np.int32), np.array(padded, np.int32).reshape(len(slots), width)

    def _drafts(self, table: SequenceTable, slot: int, text: list[int], num: int, capacity: int) -> list[int]:
        if not num:
            return []
        end = len(text) - 1
        for position in range(end):
            copies = self.predicted[self._place(table, slot, position)]
            assert (copies == stored(table.tokens[slot], position)).all(), f"position {position}: not seen"
        drafted: list[int] = []
        for number in range(num):
            if number:  # it reads what it drafted last
                assert end + number - 1 < capacity, f"position {end + number - 1}: no block"
                self.predicted[self._place(table, slot, end + number - 1)] = -2
            token = next_token(text + drafted)
            assert self.accuracy is not None
            drafted.append(token if self._rng.random() < self.accuracy else (token + 1) % VOCAB)
        assert end + 1 + num < table.max_total_tokens[slot], "beyond the text's end"
        self.num_proposed_tokens += num
        return drafted

    def _place(self, table: SequenceTable, slot: int, position: int) -> slice:
        return self._at(0, int(table.block_tables[0][slot, position // BLOCK_TOKENS]), position)

    def _read(self, table: SequenceTable, slot: int, computed: int, num_tokens: int) -> list[int]:
        """Checks what the queries of a chunk attend to; what the last of them does."""
        tokens = []
        for group, (_, window) in enumerate(self.groups):
            if window == STATE:
                tokens.append(self._advance(group, table, slot, computed, num_tokens))
                continue
            for position in range(first_seen(computed, window), num_tokens):
                block = table.block_tables[group][slot, position // BLOCK_TOKENS]
                copies = self.arena[self._at(group, block, position)]
                assert (copies == stored(table.tokens[slot], position)).all(), f"group {group}, position {position}"
                if position >= first_seen(num_tokens - 1, window):
                    tokens.append(int(copies[0]) % VOCAB)
        return tokens

    def _advance(self, group: int, table: SequenceTable, slot: int, computed: int, num_tokens: int) -> int:
        """Reads the state before position `computed`, and writes those up to num_tokens that have a block; returns the last."""
        blocks, state = table.block_tables[group][slot], 0
        if computed:
            state = self._state(group, int(blocks[(computed - 1) // BLOCK_TOKENS]), computed)
        for position in range(computed, num_tokens):
            state = state_after(state, table.tokens[slot, position : position + 1].tolist())
            block, is_last = int(blocks[position // BLOCK_TOKENS]), position + 1 == num_tokens
            if (is_last or (position + 1) % BLOCK_TOKENS == 0) and (is_last or block >= 0):
                assert block >= 0, f"group {group}: the state of position {position} has no block"
                self.arena[self._of_block(group, block)] = state
        assert state == state_after(0, table.tokens[slot, :num_tokens].tolist()), f"group {group}"
        return state

    def _state(self, group: int, block: int, num_tokens: int) -> int:
        assert block >= 0, f"group {group}: the state after {num_tokens} tokens is gone"
        copies = self.arena[self._of_block(group, block)]
        assert (copies == copies[0]).all()
        return int(copies[0])

    def _of_block(self, group: int, block: int) -> slice:
        block_bytes = self.groups[group][0]
        return slice(block * block_bytes // 4, (block + 1) * block_bytes // 4)


def make_group(pool: BlockPool, window: int) -> GroupCache:
    if window == STATE:
        return GroupCache(pool, BLOCK_TOKENS, BLOCK_TOKENS + 1, snapshot_tokens=SNAPSHOT_TOKENS)
    return GroupCache(pool, BLOCK_TOKENS, abs(window), is_chunked=window < 0)


def no_drafts(tokens: IntArray, num: int) -> IntArray:
    return tokens[:0]


class Harness:
    """One batch scheduler with its fake model, and what came out."""

    def __init__(
        self,
        *,
        reserved_chunks: int = 8,
        lease_chunks: int = 0,
        chunks: ChunkPool | None = None,
        block_bytes: int = 16,
        chunk_bytes: int = 64,
        max_sequences: int = 8,
        max_model_len: int = 64,
        max_num_batched_tokens: int = 32,
        fingerprint: str = "f",
        window: int = 0,
        more_groups: Sequence[tuple[int, int, int]] = (),
        arena: IntArray | None = None,
        drafter: Drafter | None = None,
        accuracy: float | None = None,
        limits: StepLimits | None = None,
        num_stages: int = 1,
    ) -> None:
        """more_groups: (window, block_bytes, reserved_chunks) of each KV group after the first. window: below 0 a chunk's, or
        STATE. accuracy: of the model's predictor; None: it has none. limits: of its steps."""
        groups = [(window, block_bytes, reserved_chunks), *more_groups]
        num_chunks = lease_chunks + sum(reserved for _, _, reserved in groups)
        self.chunks = chunks or ChunkPool(num_chunks, chunk_bytes, lease_chunks)
        self.windows = tuple(window for window, _, _ in groups)
        self.kv = KVCache([make_group(BlockPool(self.chunks, size, reserved), window) for window, size, reserved in groups])
        self.limits = limits
        of_model = ((EOS,), fingerprint, "float32", False, num_stages)
        most = BatchLimits(max_sequences, max_model_len, max_num_batched_tokens, *of_model)
        drafter = no_drafts if drafter is None and accuracy is not None else drafter
        self.scheduler = BatchScheduler("m", self.kv, most, drafter, accuracy is not None)
        if arena is None:
            arena = np.full(self.chunks.num_chunks * self.chunks.chunk_bytes // 4, -1, np.int32)
        self.model = FakeModel(arena, [(size, window) for window, size, _ in groups], accuracy)
        self.compaction = Compaction(self.model.copy_blocks)
        self.output: dict[int, list[int]] = {}
        self.finish: dict[int, int] = {}
        self.cached: dict[int, int] = {}
        self.num_steps = 0

    def submit(self, request_id: int, prompt: list[int], params: Params | None = None, **options: object) -> None:
        output = list(options.pop("output", []))  # type: ignore[call-overload]
        self.output[request_id] = list(output)
        tokens = np.array(prompt + output, np.int32)
        self.scheduler.submit(BatchRequest(request_id, tokens, len(prompt), params or Params(), **options))  # type: ignore[arg-type]

    def step(self, max_prompt_tokens: int | None = None) -> StepOutcome | None:
        plan = self.scheduler.plan(self.num_steps, StepRoom(self.limits, max_tokens=max_prompt_tokens))
        if plan is None:
            return None
        self.num_steps += 1
        ids, bad = self.model.execute(plan, self.scheduler.table)
        proposed = self.model.propose(plan, self.scheduler.table, ids, self.scheduler.blocks.capacity)
        return self.take_in(plan, ids, bad, proposed)

    def take_in(self, plan: BatchPlan, ids: IntArray, bad: np.ndarray, proposed: Proposed | None) -> StepOutcome:
        outcome = self.scheduler.finish_step(plan, ids, bad)
        if proposed is not None:
            self.scheduler.take_proposals(*proposed)
        assert not self.finish.keys() & outcome.request_ids, "a token after the end"
        self.deliver(outcome)
        return outcome

    def deliver(self, outcome: StepOutcome) -> None:
        """What clients get of a step."""
        told = iter(outcome.ids)
        for request_id, count in zip(outcome.request_ids, outcome.counts or repeat(1), strict=False):
            self.output[request_id] += islice(told, count)
        assert not list(told)
        pairs = zip(outcome.request_ids, outcome.finish, strict=False)
        self.finish.update({request_id: finish for request_id, finish in pairs if finish})
        self.cached.update(outcome.cached)

    def run(self, max_prompt_tokens: int | None = None) -> None:
        """Until nothing is left to do."""
        for _ in range(10_000):
            if self.step(max_prompt_tokens) is None:
                return
        raise AssertionError("no end after 10,000 steps")

    def check_no_leak(self) -> None:
        """Nothing runs or waits: every block is free or kept, and held by nobody."""
        for group in self.kv.groups:
            group.pool.check()
            assert not group.pool.refcount.any()
        assert self.scheduler.num_running == 0
        assert self.kv.held_bytes == 0
        assert (self.scheduler.table.request_id == 0).all()
        assert len(self.scheduler._free_slots) == self.scheduler.limits.max_sequences
