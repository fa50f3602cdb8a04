"""A model on the `cpu` device: its weights in one address range, its view of the KV arena, and its steps, one at a time.

Shapes: R rows, T tokens, N sampling rows, V vocabulary."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.contracts.stages import Stages
from engine.contracts.steps import StepResult
from engine.cpu.adapters import HostAdapterMemory
from engine.cpu.batch import GroupMemory, HostBatch, build_batch, padded_rows
from engine.cpu.ops import CpuOps
from engine.cpu.predicting import CpuPredicting
from engine.cpu.programs.program import Scratch
from engine.cpu.programs.replay import DecodeProgram
from engine.cpu.ranks import SharedRanks
from engine.cpu.recording.inputs import StepInputs
from engine.cpu.recording.recorded import RecordedSteps
from engine.cpu.sliced import in_slices, slices
from engine.grammar.row_masks import RowMasks
from engine.layers.expert_counts import ExpertCounts, has_counts
from engine.layers.rope import rotaries_of
from engine.layers.weights import Weights
from engine.memory.arena import kv_views, state_view
from engine.memory.chunk_memory import ChunkMemory
from engine.memory.weight_gate import WeightGate
from engine.memory.weight_range import WeightRange
from engine.models.registry import CausalLM, build_model
from engine.ops.ops import BatchAdapters, Rotary
from engine.protocol import LoadModel
from engine.sampling.logprobs import OwedPrompts, owed_prompt_rows
from engine.sampling.outputs import sampled_outputs
from engine.sampling.sampler import SamplingRows, constrain, sampling_rows
from engine.sampling.vectors import scaled_vectors, vectors_result
from loader.configs.kernel_needs import needed_kernels
from loader.configs.kernel_sets import SAMPLING, KernelSet
from loader.formats.registry import FORMATS
from loader.shapes import kv_layout
from loader.shapes.kv_layout import KVGroupSpec
from loader.shapes.model_shape import ModelShape
from loader.sizes import work_space
from loader.sizes.work_space import MAX_RECORDED_ROWS, MAX_RECORDED_TOKENS
from scheduler.batch.plan import BatchPlan, FloatArray, LongArray, SequenceTable


class CpuModel:
    """A decoder on the `cpu` device, which generates tokens or embeds texts. Implements engine.contracts.steps.HostedModel,
    SplitModel and StreamedModel. Only one thread may use an object at a time."""

    def __init__(
        self,
        ops: CpuOps,
        spec: LoadModel,
        shape: ModelShape,
        weights: WeightRange,
        memory: ChunkMemory,
        scratch: Scratch,
        block_tokens: int,
        num_threads: int,
        need_kernels: Callable[[Sequence[KernelSet]], None] = lambda sets: None,
        ranks: SharedRanks | None = None,
        kv_memory: Tensor | None = None,
        stages: Stages | None = None,
    ) -> None:
        """memory: the device's chunks, whose arena holds the KV.
        scratch: memory for the intermediate results of recorded steps.
        num_threads: threads that share the operations of a step.
        need_kernels: starts the compilation of the sets of kernels with which it is called, unless they are compiled already.
        ranks, stages: in a share of a split model (shape.split), the connections to the other ranks of its stage and to the other
        pipeline stages; None: there are none.
        kv_memory: uint8, the model's own KV memory, in which block numbers count from 0; None: the KV is in the arena."""
        self._ops = ops
        self.name = spec.model
        self.vocab_size, self.embeds = shape.vocab_size, bool(shape.pooling)
        self.weights_bytes = weights.num_bytes
        self.shape = shape
        self.kv_groups = kv_layout.kv_groups(shape, spec.kv_dtype, block_tokens)
        self.num_threads = self._step_threads = num_threads  # _step_threads: those that share the steps now
        self._eos_token_ids = spec.eos_token_ids
        self._weights = weights
        self._logits_rows = work_space.logits_rows(shape, spec.dtype, spec.max_sequences)
        self.expert_counts = ExpertCounts(shape, torch.device("cpu")) if has_counts(shape) else None
        held = Weights(shape, spec.dtype, weights, FORMATS[spec.quantize], self.expert_counts)
        self._model: CausalLM[HostBatch] = build_model(ops, shape, held, ranks, stages)
        self._ranks, self._stages = ranks, stages
        self._is_share = ranks is not None or stages is not None
        self._released = False
        rotary, local = rotaries_of(shape, spec.max_model_len)
        self._kv_dtype = spec.kv_dtype
        self._padded = spec.dtype != "float32"  # float32 needs no padding: MKL, which computes it, has no set-up per row count
        turns = {layer: local if window else rotary for layer, window in enumerate(shape.layer_windows)}
        turns[shape.num_layers] = rotary if shape.eagle is None else rotaries_of(shape.eagle.layer, spec.max_model_len)[0]
        own_kv = memory.arena if kv_memory is None else kv_memory
        # a stage without layers of a group (NO_LAYER) rotates none, so any rotary embedding will do
        self._kv = [self._group_memory(own_kv, group, turns.get(group.layers[0], rotary)) for group in self.kv_groups]
        places = {layer: (number, place) for number, group in enumerate(self.kv_groups) for place, layer in enumerate(group.layers)}
        own = (*shape.own_layers, *range(shape.num_layers, shape.num_computed_layers))
        self._layer_places = {layer: places[shape.kv_layer(layer)] for layer in own}
        max_rows, max_blocks = min(spec.max_sequences, MAX_RECORDED_ROWS), -(-spec.max_model_len // block_tokens)
        self._inputs = StepInputs(ops, self._kv, self._layer_places, max_rows, MAX_RECORDED_TOKENS, max_blocks, self._padded)
        self._max_rows, self._scratch = max_rows, scratch
        self._dtype, self._quantize, self._need_kernels = spec.dtype, spec.quantize, need_kernels
        self._adapters: BatchAdapters | None = None  # None: the model's steps do not compute adapters
        self.adapter_memory = HostAdapterMemory(shape, spec.dtype, self._use_adapters)
        self._predicting = None
        if shape.predicts:
            self._predicting = CpuPredicting(ops, self._model, self._batch, self._logits_rows)
        self._kept: list[Tensor] | None = None  # the latest step's states for the predictor (StepBatch.kept)
        self.arena = memory.arena
        self._awaited = self._needed_kernels()
        self._steps = self._recorded_steps()

    def _needed_kernels(self) -> list[KernelSet]:
        """Starts compiling the sets of kernels that the model's steps call, without waiting, and returns those of them that are not
        in use yet."""
        further = (self._ranks is not None, self._adapters is not None)
        needed = needed_kernels(self.shape, self._dtype, FORMATS[self._quantize], *further)
        self._need_kernels(needed)
        return self._ops.awaited(needed)

    def _recorded_steps(self) -> RecordedSteps:
        """Returns a new, empty store of recorded steps. While kernels that steps need are not in use, the store records nothing:
        its steps would go on calling the slower code that replaces these kernels. If only kernels for sampling are missing, it
        records steps, but not the sampling from their logits."""
        self._num_late = self._ops.num_late
        max_rows = self._max_rows if all(one.name == SAMPLING for one in self._awaited) else 0
        max_decodes = min(max_rows, self._logits_rows)
        sizes = (max_decodes, max_rows, MAX_RECORDED_TOKENS)
        title = f"{self.name} in {self._dtype}"
        return RecordedSteps(self._ops, self._model, self._inputs, self._scratch, *sizes, title)

    def _use_adapters(self) -> None:
        """Makes steps compute LoRA adapters from now on. Called when an adapter is set; does nothing after the first one. Drops the
        recorded steps, because they do not compute adapters."""
        if self._adapters is not None:
            return
        tables, dtype = self.adapter_memory, getattr(torch, self._dtype)
        memory = self.arena[: len(self.arena) // dtype.itemsize * dtype.itemsize].view(dtype)
        self._adapters = BatchAdapters(np.empty(0, np.int32), tables.places, tables.ranks, memory)
        self._inputs.use_adapters(self._adapters)
        self._awaited = self._needed_kernels()
        self._steps = self._recorded_steps()

    def _group_memory(self, arena: Tensor, group: KVGroupSpec, rotary: Rotary) -> GroupMemory:
        if group.kind == "state":
            states = state_view(arena, group)
            return GroupMemory(states, states.view(-1).numpy(), rotary, group.reach)
        kv, scales = kv_views(arena, group, kv_layout.group_token_dims(self.shape, group), self._kv_dtype)
        flat = arena[:0] if scales is not None else kv.view(-1)  # no CPU kernel reads fp8
        kv_flat = flat.view(torch.uint16).numpy() if kv.dtype is torch.bfloat16 else flat.numpy()
        return GroupMemory(kv, kv_flat, rotary, group.reach, scales)

    @torch.inference_mode()
    def execute_behind(self, gate: WeightGate, plan: BatchPlan, table: SequenceTable, max_tokens: int) -> StepResult:
        """Runs a step while the model's weights are still being loaded: computes each layer once `gate` reports that its weights
        have arrived. Returns the step's result. A step of more than max_tokens tokens is cut into slices of its tokens, and each
        layer computes all slices before the next layer begins."""
        with gate.step():  # entered first, because a failed load withdraws the gate before it releases the model
            model = self._loaded()
            layers = model.layers
            gate.wait(0)
            waited_s = gate.waited_s
            model.layers = gate.behind(layers)
            if plan.num_new.sum() > max_tokens:
                parts = [self._batch(part, table) for part in slices(plan, max_tokens)]
                model.layers = in_slices(model.layers, parts)
            try:
                result = self._execute(plan, table, None, recorded=False)  # recorded programs share memory for one step at a time
                result = self._with_proposals(result, plan, table, max_tokens)
            finally:
                model.layers = layers
        result.seconds -= gate.waited_s - waited_s
        return result

    @property
    def dtype(self) -> str:
        """The dtype of weights and hidden states."""
        return self._dtype

    def execute(self, plan: BatchPlan, table: SequenceTable, masks: RowMasks | None = None) -> StepResult:
        """Runs one step and returns its result: stores the new tokens' KV, and samples one id, or computes one vector, for each
        sampling row. masks: the tokens that constrained rows may sample; None: all rows may sample any token. In a split model only
        rank 0 calls this; the other ranks call `follow` for the same step. The result's seconds do not include waits for other
        pipeline stages. Raises GroupBroken if a device of the split model has been lost."""
        stages, ranks = self._stages, self._ranks
        waited_s = 0.0 if stages is None else stages.waited_s
        if ranks is not None:
            ranks.begins.note()
        result = self._run(plan, table, masks)
        if stages is not None:
            result.seconds -= stages.waited_s - waited_s
        elif ranks is not None:  # with stages, others may have begun a later step by now
            result.waited_s = min(ranks.begins.waited_s(), result.seconds)
        return result

    def _run(self, plan: BatchPlan, table: SequenceTable, masks: RowMasks | None) -> StepResult:
        begin = time.perf_counter()
        if masks is None and not self.embeds:
            self._prepare()
            if self._is_share:
                self._count(plan, int(plan.samples.sum()))
            drawn = self._steps.draw(plan, table)
            if drawn is not None:
                self._check_ranks()
                self._kept = self._steps.kept
                return self._with_proposals(StepResult(*drawn, time.perf_counter() - begin), plan, table)
        with torch.inference_mode():
            return self._with_proposals(self._execute(plan, table, masks, recorded=True), plan, table)

    @torch.inference_mode()
    def follow(self, plan: BatchPlan, table: SequenceTable) -> None:
        """Computes this rank's part of a step of a split model, up to the logits, while rank 0 computes its own part by `execute`.
        `table` is read only at the beginning. Raises GroupBroken if a device of the split model has been lost."""
        if self._ranks is not None:
            self._ranks.begins.note()
        if not self._loaded().makes_logits:
            if self._decode(plan, table) is None:
                self._forward(plan, table, every_token=True)
            self._check_ranks()
            return
        owed = owed_prompt_rows(plan, table)
        if owed is not None or self._decode(plan, table) is None:
            hidden, num_sampling = self._forward(plan, table, every_token=False, also=None if owed is None else owed.tokens)
            logits = self._logits_in_parts(plan, num_sampling, owed)
            for first, _ in self._parts(num_sampling, owed):
                logits(hidden[first : first + self._logits_rows])
        self._check_ranks()

    def has_ended(self) -> bool:
        """Returns whether the step that `follow` was called for has ended: always True, because `follow` returns only after the
        step."""
        return True

    def _with_proposals(
        self, result: StepResult, plan: BatchPlan, table: SequenceTable, max_tokens: int | None = None
    ) -> StepResult:
        """Returns `result`, with drafts of the model's predictor if the plan asks for them. The predictor reads the hidden states
        that the step has kept for it. max_tokens: the most tokens of a slice in which the predictor reads the step; None: it reads
        the step as a whole."""
        if self._predicting is not None and self._sees(plan):
            assert self._kept is not None
            with torch.inference_mode():
                result.proposed = self._predicting.after(plan, table, self._kept, result.ids, max_tokens)
        self._kept = None
        return result

    def _execute(self, plan: BatchPlan, table: SequenceTable, masks: RowMasks | None, recorded: bool) -> StepResult:
        begin = time.perf_counter()
        if self.embeds:
            hidden, num_sampling = self._forward(plan, table, every_token=False, recorded=recorded)
            return vectors_result(scaled_vectors(hidden[:num_sampling]).numpy(), time.perf_counter() - begin)
        owed = owed_prompt_rows(plan, table)
        step = self._decode(plan, table) if recorded and owed is None else None
        if step is not None:
            hidden, num_sampling, logits = step.hidden, len(plan.slots), lambda hidden: step.logits
            self._kept = self._steps.kept
        else:
            also = None if owed is None else owed.tokens
            hidden, num_sampling = self._forward(plan, table, every_token=False, also=also, recorded=recorded)
            logits = self._logits_in_parts(plan, num_sampling, owed)
        self._check_ranks()  # before any row is sampled
        rows: SamplingRows | None = None
        if num_sampling:
            rows = sampling_rows(plan, table, self._eos_token_ids, self.vocab_size)
            if masks is not None:
                constrain(rows, masks)
        return sampled_outputs(self._ops, hidden, num_sampling, rows, owed, plan, table, logits, self._logits_rows, begin)

    def _logits_in_parts(self, plan: BatchPlan, num_sampling: int, owed: OwedPrompts | None) -> Callable[[Tensor], Tensor]:
        """Returns a function that computes the logits of hidden states, for one part of a step's rows at a time: at most
        _logits_rows rows. It must be called for all parts in order: first those of the sampling rows, then those of the prompt
        tokens whose log-probabilities were asked for (`owed`; None: there are none). In a split model the ranks exchange only rows
        that are not padding."""
        model, ranks = self._loaded(), self._ranks
        if ranks is None:
            return model.logits
        parts = iter(self._parts(num_sampling, owed))

        def logits(hidden: Tensor) -> Tensor:
            _, num_rows = next(parts)
            self._count(plan, num_rows)
            made = model.logits(hidden)
            ranks.check()
            return made

        return logits

    def _parts(self, num_sampling: int, owed: OwedPrompts | None) -> list[tuple[int, int]]:
        """Returns the parts in which the logits of a step's rows are computed, in order, each as (first row, number of rows).
        num_sampling: number of sampling rows. owed: the prompt tokens whose log-probabilities were asked for; their rows follow the
        sampling rows. None: there are none."""
        kinds = ((0, num_sampling), (num_sampling, 0 if owed is None else len(owed.tokens)))
        step = self._logits_rows
        return [(begin + first, min(step, num - first)) for begin, num in kinds for first in range(0, num, step)]

    def _count(self, plan: BatchPlan, num_rows: int) -> None:
        """Tells the connections to other ranks and stages how many tokens of a step, and how many rows of logits, are not padding.
        num_rows: number of rows of logits that are computed next."""
        if not self._is_share:
            return
        num_tokens = int(plan.num_new.sum())
        if self._ranks is not None:
            self._ranks.count(num_tokens, num_rows)
        if self._stages is not None:
            self._stages.count(num_tokens)

    def _check_ranks(self) -> None:
        if self._ranks is not None:
            self._ranks.check()

    @torch.inference_mode()
    def logits(self, plan: BatchPlan, table: SequenceTable, every_token: bool = False) -> FloatArray:
        """Runs a step without sampling, for tests, and returns float32 logits: [N, V] of the sampling rows, or [T, V] of all tokens
        if every_token."""
        step = self._decode(plan, table)
        if step is not None:
            return step.logits[: len(plan.slots)].float().numpy().copy()
        hidden, num = self._forward(plan, table, every_token)
        self._count(plan, num)
        return self._loaded().logits(hidden)[:num].float().numpy()

    def _loaded(self) -> CausalLM[HostBatch]:
        if self._released:
            raise RuntimeError(f"model {self.name} was released")
        return self._model

    def _decode(self, plan: BatchPlan, table: SequenceTable) -> DecodeProgram | None:
        """Runs the plan as a recorded decode step, and returns the program that holds its results. Returns None, with nothing run,
        if the plan cannot be run as a recorded decode step; the caller then uses `_forward`."""
        self._prepare()
        self._count(plan, len(plan.slots))
        return self._steps.decode(plan, table)

    def _prepare(self) -> CausalLM[HostBatch]:
        model = self._loaded()
        awaited, num_threads = self._ops.awaited(self._awaited), self.num_threads
        if awaited and self._ops.beside_compilers():  # more threads than free cores would mostly wait for one another
            num_threads = max(1, num_threads // 2)
        self._ops.set_num_threads(num_threads)
        has_changed = len(awaited) < len(self._awaited) or num_threads != self._step_threads
        if has_changed or self._ops.num_late > self._num_late:
            self._awaited, self._step_threads = awaited, num_threads
            self._steps = self._recorded_steps()
        return model

    def _forward(
        self, plan: BatchPlan, table: SequenceTable, every_token: bool, also: LongArray | None = None, recorded: bool = True
    ) -> tuple[Tensor, int]:
        """Runs a step up to its hidden states, and returns (states, n). The first n rows of states are those of the sampling rows'
        last tokens, or of all tokens if every_token. Then come the states of the tokens with the indices `also` (into T; None:
        there are none), then padding. recorded: whether recorded steps may be run."""
        model, num_tokens = self._prepare(), int(plan.num_new.sum())
        self._count(plan, 0)  # no logits are computed here
        wanted: Tensor | None = None
        num_wanted = num_tokens
        if not every_token and (also is not None or not plan.samples.all() or num_tokens > len(plan.slots)):
            indices = (np.cumsum(plan.num_new, dtype=np.int64) - 1)[plan.samples]
            num_wanted = len(indices)
            if also is not None:
                indices = np.concatenate((indices, also))
            if self._padded:
                indices = np.concatenate((indices, np.zeros(padded_rows(len(indices)) - len(indices), np.int64)))
            wanted = torch.from_numpy(indices)
        hidden = self._steps.hidden(plan, table) if recorded else None
        if hidden is not None:
            self._kept = self._steps.kept
            return hidden if wanted is None else hidden[wanted], num_wanted
        batch = self._batch(plan, table)
        if self._sees(plan):
            batch.kept = self._kept = [model.state_memory(len(batch.input_ids)) for _ in range(model.num_kept)]
        return model.forward(batch, wanted), num_wanted

    def _sees(self, plan: BatchPlan) -> bool:
        """Returns whether the model's predictor must read the hidden states of the plan's step: the model has a predictor, and the
        plan asks for drafts."""
        return self._predicting is not None and plan.to_propose is not None

    def _batch(self, plan: BatchPlan, table: SequenceTable) -> HostBatch:
        return build_batch(plan, table, self._kv, self._layer_places, self._ops.cos_sin, self._padded, self._adapters)

    @property
    def num_uncaptured(self) -> int:
        """The number of steps with prompt chunks, one for each number of tokens, that can be recorded ahead and are not yet; 0
        after `release`."""
        return 0 if self._released else len(self._steps.missing)

    @torch.inference_mode()
    def capture_next(self) -> None:
        """Records one of the steps that num_uncaptured counts. This takes the interpreter some 10 ms and computes nothing."""
        self._prepare()
        self._steps.record_next()

    def release(self) -> None:
        """Unmaps the weights, and removes all adapters. Idempotent. Until `restore` is called, any step raises RuntimeError."""
        self._released = True
        self.adapter_memory.clear_all()
        self._steps.forget_table()
        self._weights.unmap()

    def restore(self, spec: LoadModel) -> None:
        """Makes a released model usable again, for weights that have been loaded, or are being loaded, to the same address range.
        Recorded steps stay valid."""
        self._eos_token_ids = spec.eos_token_ids
        self._released = False
