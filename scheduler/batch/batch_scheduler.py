"""Plans which tokens of one model run in the next step: continuous batching with chunked prefill.

A step is {sequence: tokens}. Sequences with one token to compute (decode) come first, then prefill chunks up to the token budget. A
request is admitted when a slot is free and the KV of all its tokens fits. When a decoding sequence finds no block, the newest
sequence of the lowest priority is preempted and computed again later. The state of sequences lives in the arrays of a
`SequenceTable`; a decode step runs no Python per sequence.
"""

from __future__ import annotations

import numpy as np

from scheduler.batch.adapters import Adapters
from scheduler.batch.batch_limits import BatchLimits as BatchLimits
from scheduler.batch.drafting import Drafter, Drafts, Verified, with_drafts
from scheduler.batch.kv_cache import KVCache
from scheduler.batch.outcomes import Outcomes
from scheduler.batch.plan import (
    BatchPlan,
    BoolArray,
    IntArray,
    SequenceTable,
    StepOutcome,
    make_sequence_table,
    write_sampling,
)
from scheduler.batch.prefix_cache import extend_keys, prefix_seed
from scheduler.batch.proposals import Proposals
from scheduler.batch.request import BatchRequest, WaitingQueue
from scheduler.batch.running import Running
from scheduler.batch.same_prompts import SamePrompts
from scheduler.batch.sequence_blocks import Admission, SequenceBlocks
from scheduler.batch.step_limits import most_running
from scheduler.batch.step_room import StepRoom
from scheduler.batch.steps_ahead import StepsAhead, TokensNeeded
from scheduler.batch.tenant_time import TenantTime


class BatchScheduler:
    """Plans one model's steps and keeps its sequences, waiting and running. Not thread-safe. Each step is planned by `plan` and
    ended by `finish_step`. After `start_step` the next step may be planned although the tokens of the started one are not known
    yet. Between `start_step` and `finish_step` no other methods may be called than `plan`, `start_step` and `submit`."""

    def __init__(
        self,
        model: str,
        kv: KVCache,
        limits: BatchLimits,
        drafter: Drafter | None = None,
        has_predictor: bool = False,
        table: SequenceTable | None = None,
    ) -> None:
        """drafter: drafts tokens for sequences that decode; None: only tokens that a grammar forces are drafted. With a drafter,
        the model must not have recurrent states (KV groups that keep states instead of KV), because a state cannot be rolled back.
        has_predictor: whether the model has a layer for multi-token prediction (proposals.py); its drafts are preferred to the
        drafter's. table: an empty sequence table to use, of the sizes that the limits call for; None: the scheduler makes one."""
        self.model = model
        self.kv = kv
        self.limits = limits
        self.block_tokens = kv.block_tokens
        slots = limits.max_sequences
        max_blocks = -(-limits.max_model_len // kv.block_tokens)
        self._max_tokens = limits.max_tokens
        self.table = make_sequence_table(slots, self._max_tokens, max_blocks, len(kv.groups)) if table is None else table
        self.blocks = SequenceBlocks(kv, self.table.block_tables, limits.max_num_batched_tokens)
        self.waiting = WaitingQueue()
        self.adapters = Adapters(kv.chunks)
        self.tenants = TenantTime(slots)
        self.num_preemptions = 0
        self.failed: list[tuple[int, str]] = []  # (request id, why) of requests that can never run; the engine takes them from here
        self._free_slots = list(range(slots - 1, -1, -1))
        # Columns of decode rows that all plans share: one new token each, and each samples.
        self._ones: IntArray = np.ones(slots, np.int32)
        self._trues: BoolArray = np.ones(slots, np.bool_)
        self._requests: list[BatchRequest | None] = [None] * slots
        self.running = Running(self.table, self._requests)
        self._slot_of: dict[int, int] = {}
        self._ahead = StepsAhead(self.table, limits.num_stages > 1)
        self._outcomes = Outcomes(limits.eos_token_ids, self.table, self._requests)
        self._held: BoolArray = np.zeros(slots, np.bool_)  # constrained rows that may not have their next token yet
        self._num_constrained = 0  # constrained rows
        goes_back = not any(group.snapshot_tokens for group in kv.groups)
        proposals = Proposals(self.table, kv.block_tokens) if has_predictor else None
        self._drafts = Drafts(self.table, drafter, proposals) if goes_back else None
        self._same_prompts = SamePrompts(self._slot_of, self.table.num_computed, self._held, kv.block_tokens)
        self._taken_in: IntArray = np.zeros(0, np.int32)  # slots of the step whose results were taken in last
        self._next_order = 0
        self._blocked_version = -1  # chunk pool's version when the head of the queue last found no memory
        self._passed_over = 0  # steps since the last admission that had no room for one sequence more
        self._now_s = 0.0  # the time given to the latest plan

    # ---- requests

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for a slot, for memory or for their adapter."""
        return len(self.waiting) + self.adapters.num_without_room

    @property
    def num_drawn_chunks(self) -> int:
        """Number of chunks that the model's KV and adapters have taken from the lease, the chunks that all models share
        (chunk_pool.py)."""
        return self.kv.num_drawn_chunks + self.adapters.num_chunks

    @property
    def num_decoding(self) -> int:
        """Number of running sequences that have exactly one token to compute, once all started steps have run."""
        return len(self.running.split(self.running.slots, self._ahead.computed(), self._ahead.total())[0])

    @property
    def runnable(self) -> bool:
        """Returns whether `plan` may find work. This is so if a running sequence may have its next token computed (it is not held,
        see `hold`). It is also so if a request waits and a slot is free, unless the first waiting request has found no room and no
        memory has become free since then."""
        if len(self.running) > self._num_held:
            return True
        return len(self.waiting) > 0 and len(self._free_slots) > 0 and self._blocked_version != self.kv.chunks.version

    def submit(self, request: BatchRequest) -> None:
        """Queues a request. A request whose adapter is not resident waits for `adapter_arrived` first. The caller must have checked
        that 0 < len(tokens) < limits.max_tokens and that no other request has this id."""
        request.order = self._next_order
        self._next_order += 1
        request.has_first_token = request.resubmitted = len(request.tokens) > request.num_prompt
        self._queue(request)

    def _queue(self, request: BatchRequest) -> None:
        if request.adapter and not self.adapters.is_resident(request.adapter):
            self.adapters.wait(request)
            return
        self.waiting.push(request)
        self._blocked_version = -1

    def adapter_arrived(self, key: str) -> None:
        """Queues the requests that waited for this adapter, which has become resident."""
        waiting = self.adapters.take_waiting(key)
        self.adapters.resident[key].is_new = bool(waiting)
        for request in waiting:
            self._queue(request)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._slot_of or request_id in self.waiting or self.adapters.get(request_id) is not None

    def abort(self, request_id: int) -> bool:
        """Removes a request; returns False if it is not known."""
        if (request := self.waiting.get(request_id)) is not None:
            self.waiting.withdraw(request_id)
            self.adapters.gone(request)
            self._blocked_version = -1
            return True
        if self.adapters.withdraw(request_id):
            return True
        slot = self._slot_of.get(request_id)
        if slot is None:
            return False
        self._leave(slot)
        self.running.drop_gone()
        return True

    def hold(self, request_id: int, held: bool) -> None:
        """Sets whether a request with a grammar is held. held: True: its next token must not be computed yet, because it is not
        known which tokens the grammar allows; False: it may be. Does nothing if the request is not known."""
        request = self.waiting.get(request_id) or self.adapters.get(request_id)
        if request is not None:
            request.held = held
        elif (slot := self._slot_of.get(request_id)) is not None:
            self._held[slot] = held

    @property
    def drafts_masked(self) -> bool:
        """Returns whether tokens may be drafted for sequences with a grammar, allowed_token_ids or bad_words (`propose`); False for
        a model with recurrent states (KV groups that keep states instead of KV), which cannot be rolled back."""
        return self._drafts is not None

    def guess(self, request_id: int) -> IntArray | None:
        """Returns tokens that may follow those of a running request with a grammar, allowed_token_ids or bad_words. Returns None if
        the request does not run, or if drafting for it is suspended because earlier drafts were not worth their cost."""
        slot = self._slot_of.get(request_id)
        return None if slot is None or self._drafts is None else self._drafts.guess(slot)

    def propose(self, request_id: int, tokens: IntArray, sure: BoolArray, guessed: bool) -> None:
        """Sets the drafted tokens that the next step of a request with a grammar, allowed_token_ids or bad_words verifies. The
        caller has made the masks for these tokens. sure: for each token whether the grammar allows no other at its place. guessed:
        True if tokens from `guess` were tried when the draft was made, even if the grammar allowed none of them; False if the draft
        has only tokens that the grammar forces. Does nothing if the request does not run."""
        slot = self._slot_of.get(request_id)
        if slot is not None and self._drafts is not None:
            self._drafts.propose(slot, tokens, sure, guessed)

    def preempt_one(self) -> bool:
        """Preempts the newest sequence of the lowest priority; returns False if none runs. Must be called between steps."""
        if not len(self.running):
            return False
        self._preempt(self.running.victim(self.waiting.shares.crowding()))
        return True

    # ---- for saving KV (kv_saving.py)

    def seed_of(self, request: BatchRequest) -> bytes:
        parts = (request.tenant, request.cache_salt, self.limits.fingerprint, self.limits.kv_dtype)
        return prefix_seed(*parts, request.adapter) if request.adapter else prefix_seed(*parts)

    def learn_computed(self, slot: int) -> None:
        """Computes the keys of those full blocks of a slot's sequence whose KV is stored, and adds these blocks to the prefix
        cache."""
        self._learn(slot, int(self.table.num_computed[slot]))

    def close(self) -> None:
        """Removes every request and gives back all chunks of KV and adapters. The scheduler must not be used afterwards."""
        self.waiting = WaitingQueue()
        self.table.request_id[self.running.slots] = 0
        self.running.drop_gone()
        self._slot_of.clear()
        self.adapters.give_up_all()
        self.kv.close()

    # ---- a step

    def plan(
        self, step_id: int, room: StepRoom | None = None, max_tokens: int | None = None, now_s: float = 0.0
    ) -> BatchPlan | None:
        """Returns the plan of the next step, which gets the id `step_id`; None if nothing can run now. Raises TokensNeeded if the
        next step depends on tokens that a started step has not reported yet.

        max_tokens: the most tokens of the step. If it is None, or if a KV group has windows or states, max_num_batched_tokens is
        the limit instead. room: what limits the step's rows and prompt tokens (StepRoom); None: no limits. now_s: the time, which
        is reported for requests that this step admits (StepOutcome.began_s); 0: it is not reported.

        Requests are admitted while fewer sequences run than the step has rows for. If the head of the queue has waited for many
        steps, more sequences are admitted, which then alternate in steps (step_limits.most_running)."""
        room = room or StepRoom()
        self._now_s = now_s
        plan = self._plan(step_id, room, max_tokens)
        if plan is None or self._drafts is None:
            return plan
        return self._drafts.ask(plan, self.blocks, self.limits.max_sequences, room)

    def _plan(self, step_id: int, room: StepRoom, max_tokens: int | None) -> BatchPlan | None:
        """Returns the plan of the next step, without the numbers of tokens that the model's predictor is to draft after it; None if
        nothing can run now. Raises TokensNeeded if the plan depends on tokens that a started step has not reported yet."""
        table = self.table
        budget = self.limits.max_num_batched_tokens if max_tokens is None or self.blocks.windowed else max_tokens
        running = self._ahead.going_on(self.running.slots)
        computed = self._ahead.computed()
        max_rows = room.rows(budget, computed, running, len(self.waiting))
        if self._num_constrained and self._held.any():
            running = running[~self._held[running]]
        prefill: IntArray = running[:0]
        if len(running):
            decode, prefill = self.running.split(running, computed, self._ahead.total())
            most = max_rows if self.limits.num_stages == 1 else min(max_rows, self._rows_of_stage())
            if self.tenants.several:
                loads = self.tenants.loads(decode, prefill, self.waiting.by_tenant())
                most = room.rows_beside(loads, max_rows, computed[decode])
            self._note_passed_over(max_rows)
            if len(prefill) or self._may_admit(max_rows):
                most = room.rows_beside_prompt(most, computed[decode])
            decode, first = self._give_blocks(self.tenants.choose(decode, most), computed)
            if len(prefill):  # a preemption may have taken some away
                prefill = self.tenants.in_order(prefill[table.request_id[prefill] != 0])
        else:
            decode, first = running, computed[running]
        if len(prefill) or len(self.waiting):
            room.open(budget, computed[decode], self.tenants.loads(decode, prefill, self.waiting.by_tenant()))
            decode, chunk_slots, chunk_tokens = self._plan_prefill(decode, prefill, computed, room, max_rows)
            if len(chunk_slots):
                # A chunk of one token that ends its sequence is a decode row like any other; decode rows may be in any order.
                rows, new = np.concatenate((decode, chunk_slots)), np.concatenate((self._ones[: len(decode)], chunk_tokens))
                order = np.argsort(new > 1, kind="stable")
                rows, new = rows[order], new[order]
                first = self._ahead.computed()[rows]  # rows were admitted since
                return BatchPlan(step_id, self.model, rows, first, new, first + new == self._ahead.total()[rows])
            first = computed[decode]  # rows may have been preempted
        num = len(decode)
        if not num:
            return None
        plan = BatchPlan(step_id, self.model, decode, first, self._ones[:num], self._trues[:num], True)
        return plan if self._drafts is None else self._drafted(plan, self._drafts, room)

    def start_step(self, plan: BatchPlan) -> None:
        """Records that a planned step has started, so that the next one may be planned. `finish_step` must be called for started
        steps in the same order; it drops what they computed for sequences that have ended meanwhile."""
        self._ahead.start(plan)

    def finish_step(self, plan: BatchPlan, ids: IntArray, bad: BoolArray) -> StepOutcome:
        """Records the results of a step, ends the sequences that are finished and returns what each request got. ids[k]: the token
        that the k-th sampling row of the plan sampled. bad[k]: whether the logits of this row were not finite; its request then
        ends without a further token."""
        table = self.table
        if self._ahead:
            plan, ids, bad = self._ahead.finish(plan, ids, bad)
        self._taken_in = plan.slots
        verified: Verified | None = None
        if plan.drafted and self._drafts is not None:
            verified = self._drafts.verify(plan, ids, bad, self._outcomes.endings)
            plan, ids, bad = verified.plan, verified.ids, verified.bad
        if plan.all_decode:
            slots, position = plan.slots, plan.num_computed + 1
            table.num_computed[slots] = position
        else:
            slots = self._note_computed(plan)
            position = table.num_tokens[slots]
        told: list[int] = ids.tolist()
        failed: list[int] = []
        if True in bad.tolist():
            failed = table.request_id[slots[bad]].tolist()
            for slot in slots[bad].tolist():
                self._leave(slot, poisoned=True)
            slots, position, ids = slots[~bad], position[~bad], ids[~bad]
            told = ids.tolist()
        table.tokens[slots, position] = ids
        table.num_tokens[slots] = position + 1
        if self._num_constrained:
            self._held[slots] = table.constrained[slots]
        outcome = self._outcomes.of(slots, told, failed, self.running.slots, 1 if verified is None else verified.most)
        if verified is not None:
            verified.complete(outcome)
        for slot, finish in zip(slots.tolist(), outcome.finish, strict=True) if outcome.finish else ():
            if finish:
                self._leave(slot)
        if outcome.finish or failed:
            self.running.drop_gone()
        return outcome

    def take_proposals(self, slots: IntArray, counts: IntArray, tokens: IntArray) -> None:
        """Takes the tokens that the model's predictor drafted after the step for which `finish_step` was called last: for the
        sequence in slots[q] the first counts[q] tokens of tokens[q]. tokens: [Q, K], at most K for each of Q sequences. Tokens for
        a sequence that ended while the step ran are dropped."""
        if self._drafts is not None and self._drafts.proposals is not None:
            there = np.isin(slots, self._taken_in)
            self._drafts.proposals.take(slots[there], counts[there], tokens[there])

    # ---- inside a step

    def _drafted(self, plan: BatchPlan, drafts: Drafts, room: StepRoom) -> BatchPlan:
        """Returns the plan, which has only decode rows, with drafted tokens added as further rows, as far as they are worth the
        time that these rows take. Raises TokensNeeded if that depends on tokens that a started step has not reported yet. room: the
        limits of the step, by which the worth is judged."""
        slots, first = plan.slots, plan.num_computed
        if drafts.are_none:
            return plan
        drafts.count_plan()
        if len(slots) >= self.limits.max_sequences or not drafts.may_come(slots):  # the former: no row is left for a drafted token
            return plan
        if self._ahead and not self._ahead.apart:
            if drafts.wanted(slots):
                raise TokensNeeded
            return plan
        if not self.blocks.windowed:  # a sequence whose last block is full gets another one for its drafts, if a block is free
            held = self.blocks.capacity[slots]
            full = slots[(first + 1 >= held) & (held < self.table.max_total_tokens[slots])]
            if len(full) and drafts.wanted(full):
                self.blocks.extend(full, self.blocks.capacity)
        counts = drafts.draft(slots, first, self.blocks.capacity[slots], self.limits.max_sequences, room)
        return plan if counts is None else with_drafts(plan, counts)

    def _rows_of_stage(self) -> int:
        """Returns how many sequences may decode in one step of a model with several pipeline stages: the running sequences divided
        by the number of stages, rounded up, so that each stage can compute a step of its own. Sequences whose next token must not
        be computed yet (`hold`) do not count."""
        return -(-(len(self.running) - self._num_held) // self.limits.num_stages)

    @property
    def _num_held(self) -> int:
        return int(np.count_nonzero(self._held)) if self._num_constrained else 0

    def _note_computed(self, plan: BatchPlan) -> IntArray:
        """Counts the tokens of a finished step with chunks of prompts as computed, and adds the blocks that they fill to the prefix
        cache. Returns the slots that sampled a token."""
        num_computed = self.table.num_computed
        num_computed[plan.slots] += plan.num_new
        for slot in plan.slots[plan.num_new > 1].tolist():
            self._learn(slot, int(min(num_computed[slot], self.table.num_prompt[slot])))
            if self.blocks.windowed:
                self.blocks.free_behind(slot, int(num_computed[slot]))
        return plan.slots[plan.samples]

    def _give_blocks(self, decode: IntArray, computed: IntArray) -> tuple[IntArray, IntArray]:
        """Allocates a block for each decoding sequence whose next token begins a new block, and preempts sequences until there are
        enough blocks. decode: slots of the sequences. computed: by slot, each sequence's number of computed tokens. Returns the
        slots of `decode` that still run, and the number of computed tokens of each."""
        ended = self.table.num_computed if self._ahead.apart else None  # steps under way still read the blocks behind the window
        while True:
            first = computed[decode]
            wanting = decode[first >= self.blocks.capacity[decode]]
            if not len(wanting) or self.blocks.extend(wanting, computed, ended):
                return decode, first
            self._preempt(self.running.victim(self.waiting.shares.crowding()))
            decode = decode[self.table.request_id[decode] != 0]

    def _cover(self, slot: int, num_tokens: int) -> bool:
        """Allocates the blocks that a slot's first num_tokens tokens need in the KV groups whose layers have sliding windows or
        recurrent states, and preempts sequences until there are enough blocks. Returns False if the slot's own sequence had to be
        preempted."""
        self.blocks.free_behind(slot, int(self.table.num_computed[slot]))
        while not self.blocks.cover(slot, num_tokens):
            victim = self.running.victim(self.waiting.shares.crowding())
            self._preempt(victim)
            if victim == slot:
                return False
        return True

    def _plan_prefill(
        self, decode: IntArray, prefill: IntArray, computed: IntArray, room: StepRoom, max_rows: int
    ) -> tuple[IntArray, IntArray, IntArray]:
        """Plans prefill chunks for running sequences with more than one token to compute, and for waiting requests, which it
        admits. Returns the slots of `decode` that still run (others were preempted to make room), then the slots of the chunks and
        their numbers of tokens.

        decode, prefill: slots of the running sequences with one token to compute, and with more. computed: by slot, each sequence's
        number of computed tokens. room: counts how many tokens of prompts still fit the step. max_rows: how many sequences fit one
        step; it limits how many requests are admitted."""
        table = self.table
        slots: list[int] = []
        tokens: list[int] = []
        windowed = self.blocks.windowed
        if len(prefill) and (head := self.waiting.head()) is not None and self.tenants.comes_before(head.tenant, prefill[0]):
            self._let_in(room, max_rows, slots, tokens, 1)  # otherwise it would wait until the others' prompts have ended
        for slot in prefill.tolist():
            first = int(computed[slot])
            num = room.take(first, int(table.num_tokens[slot]) - first) if table.request_id[slot] else 0
            if not num or (windowed and not self._cover(slot, first + num)):
                continue
            slots.append(slot)
            tokens.append(num)
        if windowed:  # some rows may have been preempted to make room for others
            decode = decode[table.request_id[decode] != 0]
            left = [(slot, num) for slot, num in zip(slots, tokens, strict=True) if table.request_id[slot]]
            slots, tokens = [slot for slot, _ in left], [num for _, num in left]
        self._let_in(room, max_rows, slots, tokens, len(self._free_slots))
        return decode, np.array(slots, np.int32), np.array(tokens, np.int32)

    def _may_admit(self, max_rows: int) -> bool:
        """Returns whether a request may be admitted now. This requires a waiting request, a free slot, and fewer running sequences
        than step_limits.most_running allows; sequences whose next token must not be computed yet (`hold`) do not count. If the
        first waiting request has found no room, memory must have become free since then. max_rows: how many sequences fit one
        step."""
        if not len(self.waiting) or not self._free_slots or self._blocked_version == self.kv.chunks.version:
            return False
        return self.num_running - self._num_held < most_running(max_rows, self._passed_over)

    def _note_passed_over(self, max_rows: int) -> None:
        """Adds 1 to the number of steps in which waiting requests were passed over, if a request waits and the running sequences
        fill a step of max_rows rows. Sets this number to 0 if no request waits."""
        if not len(self.waiting):
            self._passed_over = 0
        elif self.num_running - self._num_held >= max_rows:
            self._passed_over += 1

    def _let_in(self, room: StepRoom, max_rows: int, slots: list[int], tokens: list[int], most: int) -> None:
        """Admits at most `most` waiting requests while the step has room and `_may_admit` allows it. Appends the slot of each
        admitted request to `slots`, and the number of tokens of its first chunk to `tokens`. max_rows: how many sequences fit one
        step."""
        for _ in range(most):
            slot = None if room.is_full or not self._may_admit(max_rows) else self._admit()
            if slot is None:
                return
            if self._held[slot]:
                continue
            first = int(self.table.num_computed[slot])
            num = room.take(first, int(self.table.num_tokens[slot]) - first)
            if self.blocks.windowed and not self.blocks.cover(slot, first + num):
                raise RuntimeError(f"model {self.model}: KV blocks seen at admission are gone")
            if num:
                slots.append(slot)
                tokens.append(num)

    # ---- joining and leaving

    def _admit(self) -> int | None:
        """Moves the head of the queue into a slot and returns the slot. Returns None if no request waits, if its KV does not fit
        now, or if another sequence is computing the same prompt. A request that can never fit is moved to `failed`."""
        while (request := self.waiting.head()) is not None:
            if request.adapter and not self.adapters.is_resident(request.adapter):  # it has left since
                self.waiting.withdraw(request.request_id)
                self.adapters.wait(request)
                continue
            num_tokens = len(request.tokens)
            num_full = request.num_shareable_blocks(self.block_tokens)
            seed = self.seed_of(request)
            extend_keys(request.keys, seed, request.tokens, self.block_tokens, num_full)
            if self._same_prompts.must_wait(request, num_full):
                return None
            # Running sequences will grow: a quarter as many blocks stay free, or the newest sequence would be preempted at once.
            tail_key = request.tail_key(seed, self.block_tokens)
            adapter = self.adapters.take(request.adapter) if request.adapter else None  # else its KV could displace it
            admission = self.blocks.admit(request.keys[:num_full], num_tokens, self.num_running // 4, tail_key)
            if admission is not None:
                self.waiting.pop()
                return self._join(request, admission, -1 if adapter is None else adapter.number)
            chunks, own = self.kv.chunks, self.kv.num_drawn_chunks
            if adapter is not None:
                self.adapters.undo(request.adapter)
                own += len(adapter.chunks)
            if self.num_running or chunks.num_drawn > own or chunks.num_leaving or chunks.num_kept:
                self._blocked_version = chunks.version
                return None
            # It is alone on the engine and still too large, so waiting does not help.
            self.waiting.ended(self.waiting.pop())
            self.failed.append((request.request_id, f"model {self.model}: {self.blocks.why_too_long(num_tokens)}"))
        return None

    def _join(self, request: BatchRequest, admission: Admission, adapter: int) -> int:
        table, params = self.table, request.params
        slot = self._free_slots.pop()
        self._passed_over = 0
        request.began_s = self._now_s
        num_tokens = len(request.tokens)
        table.request_id[slot] = request.request_id
        table.tokens[slot, :num_tokens] = request.tokens
        table.num_tokens[slot] = num_tokens
        table.num_prompt[slot] = request.num_prompt
        num_cached = table.num_computed[slot] = admission.num_shared * self.block_tokens + admission.num_tail_tokens
        self.blocks.join(slot, admission)
        write_sampling(table, slot, params, request.num_prompt, self._max_tokens)
        table.prompt_logprobs[slot] = params.prompt_logprobs >= 0 and not request.has_first_token
        table.constrained[slot] = request.constrained
        table.adapter[slot] = adapter
        self._num_constrained += request.constrained
        self._held[slot] = request.held
        self._ahead.join(slot)
        self._outcomes.join(slot, request, params)
        if self._drafts is not None:
            self._drafts.join(slot, request.prediction, request.keys[: admission.num_shared])
        if request.resubmitted:
            request.num_cached, request.num_recomputed = num_cached, num_tokens - num_cached
        elif not request.has_first_token:
            request.num_cached = min(num_cached, request.num_prompt)
        self._requests[slot] = request
        self.tenants.join(slot, request.tenant, request.weight)
        self._slot_of[request.request_id] = slot
        self.running.join(slot)
        return slot

    def _learn(self, slot: int, num_tokens: int) -> None:
        """Adds the full blocks among the first `num_tokens` tokens of a slot's sequence to the prefix cache. All of these tokens
        must be computed."""
        request = self._requests[slot]
        assert request is not None
        full = num_tokens // self.block_tokens
        if full > self.blocks.num_learned[slot]:
            extend_keys(request.keys, self.seed_of(request), self.table.tokens[slot], self.block_tokens, full)
            first = int(self.blocks.num_learned[slot])
            self.blocks.learn(slot, request.keys[:full])
            if self._drafts is not None:
                self._drafts.learned(slot, first, request.keys[:full], self.kv.groups[0].prefixes)

    def _leave(self, slot: int, poisoned: bool = False) -> None:
        """Frees a slot and releases its blocks; the caller must then call `running.drop_gone`. poisoned: whether the sequence's
        logits were not finite; contents that no other sequence holds are then removed from the prefix cache."""
        request = self._requests[slot]
        assert request is not None
        if poisoned:
            self.blocks.leave_poisoned(slot, request.keys)
        else:
            self._learn(slot, int(self.table.num_computed[slot]))
            self.blocks.leave(slot)
        del self._slot_of[request.request_id]
        self.waiting.ended(request)
        self.tenants.leave(request.tenant)
        self._requests[slot] = None
        self.table.request_id[slot] = 0
        self.table.params[slot] = None
        self._held[slot] = False
        self._num_constrained -= request.constrained
        if request.adapter:
            self.adapters.leave(request.adapter)
            self.table.adapter[slot] = -1
        self._ahead.leave(slot)
        self._outcomes.leave(slot)
        if self._drafts is not None:
            self._drafts.leave(slot)
        self._free_slots.append(slot)
        self._blocked_version = -1

    def _preempt(self, slot: int) -> None:
        """Preempts the sequence in a slot: its request, with all tokens so far, waits in the queue again. Raises TokensNeeded while
        a started step has not reported its tokens."""
        if self._ahead:
            raise TokensNeeded
        request = self._requests[slot]
        assert request is not None
        request.held = bool(self._held[slot])
        request.tokens = self.table.tokens[slot, : self.table.num_tokens[slot]].copy()
        self._leave(slot)
        self.running.drop_gone()
        self._queue(request)
        self.num_preemptions += 1
