"""A model on a GPU. Steps are launched and their tokens read later, so the next step can start before they are known.

Most of a step's inputs are computed on the device (kernels/triton_inputs.py). The host sends a few columns (arrays with one value
for each row); where it does not know a token yet, the device takes it from where the last step left it.

How a step runs: a decode step is one CUDA graph (engine/cuda/graphs.py), and so is a small step with prompt chunks
(mixed_graphs.py). If logits are edited, or log-probabilities of sampled tokens are wanted, the rows concerned are sampled
afterwards from the step's hidden states (edited.py), up to 64 rows by a further graph (edited_graphs.py). A step in which a row has
a LoRA adapter computes adapters, too, and has graphs of its own; all other steps run as if there were no adapters. A model's
predictor (which drafts tokens) runs behind the step without graphs (predicting.py).

Shapes: R rows, T tokens, N sampling rows (those after which a token is sampled), S slots, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from engine.contracts.ranks import Ranks
from engine.contracts.stages import Stages
from engine.contracts.steps import Launched, NoWorkSpace, StepResult
from engine.cuda.adapters import DeviceAdapterMemory
from engine.cuda.batch import DeviceBatch, DeviceGroup, QueryTiles
from engine.cuda.columns import SETTINGS, Columns, ExtendStep, decode_columns, extend_step, padding_columns, sampling_columns
from engine.cuda.edited import NUM_STAGING, EditedSampling
from engine.cuda.edited_graphs import EditedGraphs
from engine.cuda.expert_counts import DeviceExpertCounts
from engine.cuda.graphs import DecodeGraphs, StepOutputs
from engine.cuda.kernels import entry
from engine.cuda.mixed_graphs import MixedGraphs
from engine.cuda.mixed_steps import MixedSize, mixed_columns, mixed_padding, mixed_sizes, num_tiles
from engine.cuda.ops import CudaOps
from engine.cuda.predicting import CudaPredicting, WithProposals
from engine.cuda.sequences import DeviceSequences, Staging
from engine.grammar.row_masks import RowMasks
from engine.layers.expert_counts import has_counts
from engine.layers.rope import rotaries_of
from engine.layers.weights import Weights
from engine.memory.arena import kv_views, state_view
from engine.memory.out_of_memory import lacks_memory
from engine.memory.weight_range import WeightRange
from engine.models.registry import CausalLM, build_model
from engine.ops.ops import Rotary
from engine.protocol import LoadModel, PromptLogprobs
from engine.sampling.logprobs import owed_prompt_rows
from engine.sampling.sampler import SamplingRows, constrain, sampling_rows
from engine.sampling.vectors import scaled_vectors, vectors_result
from loader.formats.registry import FORMATS
from loader.shapes import kv_layout
from loader.shapes.kv_dtypes import KV_FP8
from loader.shapes.model_shape import ModelShape
from loader.sizes.gpu_sizing import LOGITS_ROWS, decode_programs
from scheduler.batch.plan import BatchPlan, FloatArray, LongArray, SequenceTable

DECODE_PIECES_PER_CORE = 8  # contexts are cut into about this many pieces per multiprocessor
TOLD_BYTES = 4096  # least page-locked memory for a step's results on the host: 512 sampled tokens
CPU_CORES = 2  # stands for the number of multiprocessors where the kernels are interpreted


@dataclass(slots=True, frozen=True)
class DeviceGroupMemory:
    """The memory of one of the model's KV groups (the layers that share block tables), and how these layers attend.

    kv, scales: views of the arena, as engine.memory.arena.kv_views returns them; in a group of states, the result of state_view,
    and None.
    rotary: the rotary embedding of the group's layers, on the device.
    reach: how far back a token attends: above 0: to the last `reach` positions, its own included; below 0: within its own chunk of
    -reach adjacent positions (chunked attention); 0: to all.
    num_pieces: the approximate number of split-K parts into which the contexts of a decode step are cut."""

    kv: Tensor
    scales: Tensor | None
    rotary: Rotary
    reach: int
    block_tokens: int
    num_pieces: int


@dataclass(slots=True)
class Marks:
    """A pair of CUDA events, recorded before and after a step, with page-locked memory for the step's results on the host. After
    the results were read, a later step uses the same events and memory again, because making new ones takes longer."""

    started: Any
    done: Any
    memory: Tensor | None = None
    last: Tensor | None = None  # the part of `memory` that was used last

    def room_for(self, told: Tensor) -> Tensor:
        """Returns page-locked host memory of the dtype and shape of `told`, into which `told` is to be copied. Only copies to
        page-locked memory do not make the host wait for the device."""
        if self.last is not None and (self.last.dtype, self.last.shape) == (told.dtype, told.shape):
            return self.last
        if self.memory is None or len(self.memory) < told.nbytes:
            self.memory = torch.empty(max(TOLD_BYTES, 2 * told.nbytes), dtype=torch.uint8, pin_memory=True)
        self.last = self.memory[: told.nbytes].view(told.dtype).view(told.shape)
        return self.last


class IdleTrials(Protocol):
    """Alternatives that an engine compares on its device in idle time, for the next engine to use the best."""

    @property
    def num_open(self) -> int:
        """Returns for how many calls, at least, measure_next still has something to do."""

    def measure_next(self) -> None:
        """Makes the next comparison on the current stream, which takes the device some ten milliseconds. Does nothing if num_open
        is 0."""


class PendingStep:
    """A step that was launched and may still run. `wait` returns its result; it blocks without spinning, and may be called once.

    told: the memory on the host that receives the results. read: makes a StepResult from this memory and the step's seconds.
    marks: the events around the step; None: the step has ended already. taken_back: called with the marks when another step may use
    them.
    began_s: when the step began, by time.perf_counter(); used only if there are no marks."""

    def __init__(
        self,
        told: Tensor,
        read: Callable[[Tensor, float], StepResult],
        marks: Marks | None,
        began_s: float,
        taken_back: Callable[[Marks], None],
    ) -> None:
        self._told, self._read, self._marks, self._taken_back = told, read, marks, taken_back
        self._seconds = time.perf_counter() - began_s  # a step without events has ended

    def wait(self) -> StepResult:
        marks, self._marks = self._marks, None
        if marks is None:
            return self._read(self._told, self._seconds)
        marks.done.synchronize()
        result = self._read(self._told, marks.started.elapsed_time(marks.done) / 1e3)
        self._taken_back(marks)
        return result


class _Begun(NamedTuple):
    """A step that was launched, before its results are copied to the host. outputs: the results on the device. marks: the events
    around the step, of which the second is not recorded yet; None: there is no CUDA device."""

    outputs: StepOutputs
    marks: Marks | None


class CudaModel:
    """A decoder (engine.contracts.steps.HostedModel) on a GPU, or on the CPU with interpreted kernels (for tests). Not safe for two
    threads at a time: a load's thread makes, warms and restores it; all other calls come from the thread that runs steps
    (docs/gpu.md).

    arena: the device's KV memory as uint8.
    max_graph_rows: decode steps of up to this many rows run as CUDA graphs; 0: none do. max_graph_tokens: the same for the number
    of tokens of steps with prompt chunks.
    prepare_adapters: compiles the kernels of adapters; called in the thread that reads an adapter.
    ranks, stages: for a device's share of a split model (engine/cuda/share.py), its connections to the other shares of the same
    layers and to the pipeline stages with other layers; None: there are none."""

    def __init__(
        self,
        ops: CudaOps,
        spec: LoadModel,
        shape: ModelShape,
        weights: WeightRange,
        arena: Tensor,
        block_tokens: int,
        max_graph_rows: int = 0,
        max_graph_tokens: int = 0,
        prepare_adapters: Callable[[], None] = lambda: None,
        ranks: Ranks | None = None,
        stages: Stages | None = None,
    ) -> None:
        self._ops, self._ranks, self._stages = ops, ranks, stages
        self.name, self.vocab_size, self.weights_bytes, self.shape = spec.model, shape.vocab_size, weights.num_bytes, shape
        self.embeds = bool(shape.pooling)
        self.kv_groups = kv_layout.kv_groups(shape, spec.kv_dtype, block_tokens)
        self._device = arena.device
        self._weights = weights
        self._eos_token_ids = spec.eos_token_ids
        max_blocks = -(-spec.max_model_len // block_tokens)
        self._block_tokens = block_tokens
        self._dtype_name, self._format = spec.dtype, FORMATS[spec.quantize]
        dtype: torch.dtype = getattr(torch, spec.dtype)
        self.expert_counts = DeviceExpertCounts(shape, self._device) if has_counts(shape) else None
        model = self._built()
        self._model: CausalLM[DeviceBatch] | None = model
        rotary, local = rotaries_of(shape, spec.max_model_len)
        turns = {layer: local if window else rotary for layer, window in enumerate(shape.layer_windows)}
        turns[shape.num_layers] = rotary if shape.eagle is None else rotaries_of(shape.eagle.layer, spec.max_model_len)[0]
        held = {made: replace(made, inv_freq=made.inv_freq.to(self._device)) for made in {rotary, *turns.values()}}
        cores = CPU_CORES
        if self._device.type == "cuda":
            cores = torch.cuda.get_device_properties(self._device).multi_processor_count
        self._counted_heads = 0  # the most KV heads of a layer, if attention may have to count its pieces
        self._memory = []
        for group in self.kv_groups:
            dims = kv_layout.group_token_dims(shape, group)
            kv: tuple[Tensor, Tensor | None] = (
                (state_view(arena, group), None) if group.kind == "state" else (kv_views(arena, group, dims, spec.kv_dtype))
            )
            if entry.joins_pieces():
                self._counted_heads = max(self._counted_heads, dims[1])
            turning = held[turns.get(group.layers[0], rotary)]
            num_pieces = max(1, cores * DECODE_PIECES_PER_CORE // decode_programs(shape, dims[1]))
            self._memory.append(DeviceGroupMemory(*kv, turning, group.reach, group.block_tokens, num_pieces))
        places = {layer: (number, place) for number, group in enumerate(self.kv_groups) for place, layer in enumerate(group.layers)}
        own = (*shape.own_layers, *range(shape.num_layers, shape.num_computed_layers))
        self._layer_places = {layer: places[shape.kv_layer(layer)] for layer in own}
        self._staging, self._free_marks = Staging(self._device), list[Marks]()
        self._sequences = DeviceSequences(spec.max_sequences, max_blocks, len(self.kv_groups), self._device)
        last_ids, edited_staging = self._sequences.last_ids, Staging(self._device, NUM_STAGING)
        of_logits = (self._logits_of, self.vocab_size, shape.hidden_size, dtype)
        self.edited_graphs = EditedGraphs(*of_logits, last_ids, edited_staging, 0 if self.embeds else max_graph_rows)
        self._edited = EditedSampling(self.vocab_size, spec.max_sequences, last_ids, edited_staging, self.edited_graphs)
        head_dims = {heads.head_dim for heads in shape.kinds_of_heads}
        if shape.eagle is not None:
            head_dims.add(shape.eagle.layer.head_dim)
        self.tile_tokens = entry.tile_tokens(head_dims, dtype, spec.kv_dtype == KV_FP8)
        on_device, sizes = (self._staging, self._device), mixed_sizes(max_graph_tokens, spec.max_sequences, self.tile_tokens)
        self.graphs = DecodeGraphs(self._decode, *on_device, max_graph_rows)
        self.mixed_graphs = MixedGraphs(self.compute_mixed, *on_device, sizes)
        self.adapted_graphs = DecodeGraphs(partial(self._decode, adapted=True), *on_device, max_graph_rows)
        self.adapted_mixed_graphs = MixedGraphs(partial(self.compute_mixed, adapted=True), *on_device, sizes)
        self._has_adapted = False  # whether a step has had a row with an adapter
        self.adapter_memory = DeviceAdapterMemory(
            shape,
            spec.dtype,
            arena,
            num_slots=spec.max_sequences,
            staging=self._staging,
            prepare=prepare_adapters,
            bound_grew=self._drop_adapted_graphs,
        )
        self._predicting: CudaPredicting | None = None
        if shape.predicts:
            self._predicting = CudaPredicting(
                self._loaded,
                self._batch_of,
                self._staging,
                self._device,
                num_slots=spec.max_sequences,
                tile_tokens=self.tile_tokens,
            )
        # states that small steps keep for the predictor; one memory for the graphs of all sizes
        self._kept_memory: list[Tensor] = []
        if max_graph_tokens:
            self._kept_memory = [model.state_memory(max_graph_tokens) for _ in range(model.num_kept)]
        self._products: list[entry.Product] = []  # matrix products, whose weights are views of the weight range
        self.trials: list[IdleTrials] = []  # what is compared on the device in idle time

    # ---- steps

    def execute(self, plan: BatchPlan, table: SequenceTable, masks: RowMasks | None = None) -> StepResult:
        """Runs one step, waits for it, and returns its result."""
        return self.launch(plan, table, masks).wait()

    def launch(self, plan: BatchPlan, table: SequenceTable, masks: RowMasks | None = None) -> Launched:
        """Starts one step and returns while it may still be running (see LaunchesAhead.launch). Waits for the step if
        log-probabilities of prompt tokens are to be returned. Raises NoWorkSpace if there is too little memory for the step, on the
        device or, page-locked, on the host."""
        try:
            return self._launch(plan, table, masks)
        except RuntimeError as error:
            if not lacks_memory(error):
                raise
            why = str(error).partition("\n")[0]
        # raised outside the except block: here nothing holds the memory that the step had taken
        if self._device.type == "cuda":  # what was launched of it uses adapters, KV and masks that others get now
            torch.cuda.default_stream(self._device).synchronize()
        raise NoWorkSpace(f"a step of {int(plan.num_new.sum())} tokens of {len(plan.slots)} requests found no work space: {why}")

    @torch.inference_mode()
    def _launch(self, plan: BatchPlan, table: SequenceTable, masks: RowMasks | None) -> Launched:
        began_s = time.perf_counter()
        adapted = self._update(plan, table)
        owed, rows = owed_prompt_rows(plan, table), self._sampling_rows(plan, table, masks)
        apart = owed is not None  # whether rows are sampled after the step instead of within it
        if rows is not None:
            apart |= rows.edits is not None or rows.num_top is not None or rows.allowed is not None
        if apart and rows is not None:
            self.edited_graphs.capture_lacking()
        begun = None if owed is not None else self._begin_padded(plan, table, rows, apart, adapted)
        if begun is None:
            begun = self._begin_plain(plan, table, None if apart else rows, None if owed is None else owed.tokens, adapted)
        num_sampling, hidden, logits = int(np.count_nonzero(plan.samples)), begun.outputs.hidden, self._logits_of
        drawn = told = begun.outputs.drawn
        read: Callable[[Tensor, float], StepResult] = partial(_drawn_result, num_sampling)
        if self.embeds:
            told, read = hidden[:num_sampling].float(), _embedded_result
        elif apart and rows is not None:
            slots, known = plan.slots[plan.samples], drawn if drawn.shape[1] else None
            edited = self._edited.draw(hidden, rows, slots, table.request_id[slots], known, logits)
            drawn, told, read = edited.drawn, edited.told, edited.result
        if owed is not None:
            prompts = owed.logprobs(self._ops, hidden[num_sampling:], logits, LOGITS_ROWS)
            read = partial(with_prompts, read, prompts)
        launched = self._pending(told, read, begun.marks, began_s)
        if self._predicting is None or plan.to_propose is None:
            return launched
        assert begun.outputs.kept is not None
        return WithProposals(launched, self._predicting.after(plan, table, begun.outputs.kept, drawn[0, :num_sampling]))

    def _sampling_rows(self, plan: BatchPlan, table: SequenceTable, masks: RowMasks | None) -> SamplingRows | None:
        """Returns the settings of a step's sampling rows, masks included. Returns None if no row samples."""
        if not np.count_nonzero(plan.samples):
            return None
        rows = sampling_rows(plan, table, self._eos_token_ids, self.vocab_size)
        if masks is not None:
            constrain(rows, masks)
        return rows

    def _begin_padded(
        self, plan: BatchPlan, table: SequenceTable, rows: SamplingRows | None, apart: bool, adapted: bool
    ) -> _Begun | None:
        """Launches the step if a graph runs it, or if it is a decode step whose rows are sampled within it. If the graph is due to
        be captured, captures it first, and does not count the capture towards the step's seconds. For all other steps returns None,
        and launches nothing.

        apart: the rows are sampled after the step instead of within it. adapted: at least one row has an adapter."""
        num_tokens = int(plan.num_new.sum())
        if rows is not None and len(rows.temperature) == num_tokens:
            padded, decoding = self._graph_for(len(plan.slots), adapted), self._graphs_of(adapted)[0]
            if apart and not padded:
                return None
            columns = decode_columns(plan, table, rows, len(plan.slots))
            marks = self._marks()
            run = decoding.run(padded, columns) if padded else self._decode(self._staging.send(columns), adapted)
            return _Begun(run, marks)
        if (size := self._mixed_size(plan, num_tokens, adapted)) is None:
            return None
        columns = mixed_columns(plan, table, rows, self.tile_tokens)
        marks = self._marks()
        return _Begun(self._graphs_of(adapted)[1].run(size, columns), marks)

    def _mixed_size(self, plan: BatchPlan, num_tokens: int, adapted: bool) -> MixedSize | None:
        """Returns the size of the graph that runs a step with prompt chunks; None: the step runs without a graph. If a graph is due
        to be captured, captures it first. num_tokens: the number of the step's new tokens."""
        held = num_tokens, len(plan.slots), num_tiles(plan, self.tile_tokens)
        mixed = self._graphs_of(adapted)[1]
        if (lacking := mixed.needed(*held)) is not None:
            self.capture_mixed(lacking, adapted)
        return mixed.size_for(*held)

    def _begin_plain(
        self, plan: BatchPlan, table: SequenceTable, rows: SamplingRows | None, also: LongArray | None, adapted: bool = False
    ) -> _Begun:
        """Launches a step of any kind, kernel by kernel. rows: settings of the rows that are sampled within the step; None: none
        are. also: indices into T of further tokens whose hidden states are returned after those of the sampling rows; None: there
        are none. adapted: at least one row has an adapter."""
        marks = self._marks()
        hidden, kept = self._forward(extend_step(plan, table, self.tile_tokens, also), adapted)
        if rows is None:
            drawn = torch.empty(2, 0, dtype=torch.int32, device=self._device)
            return _Begun(StepOutputs(drawn, hidden, kept), marks)
        sent = self._staging.send(sampling_columns(rows) | {"slots": plan.slots[plan.samples]})
        return _Begun(self._draw(hidden, sent, sent["slots"], kept), marks)

    @torch.inference_mode()
    def warm(self) -> None:
        """Launches all kernels of steps once, in a load's thread, so that they are compiled before the first request. The steps
        that it runs consist of padding rows, which belong to no sequence, so no KV is written."""
        if self._device.type == "cuda":
            with entry.weights_of_products() as products:
                self._launch_rows(1)
            self._products = entry.one_of_each_size(products)
        self.launch_all()

    @torch.inference_mode()
    def launch_all(self) -> None:
        """Launches every kernel that a step without adapters may launch, with every kind of arguments for which Triton compiles a
        kernel separately, so that no step has to wait for a compiler. Reads and writes only memory that belongs to no sequence.
        tests/engine/kernels/record_keys.py checks that no kernel is left out."""
        with nullcontext() if entry.INTERPRETED else entry.both_kernels():  # interpreted, hearthd's products take minutes
            for num_rows in (*range(1, entry.FEW_ROWS[-1] + 1), entry.MANY_ROWS):
                self._launch_rows(num_rows)
        nobody = np.array([self._sequences.num_slots], np.int32)
        one, none = np.ones(1, np.int32), np.zeros(1, np.int32)
        columns: Columns = {
            "token_rows": np.zeros(2, np.int32),
            "host_ids": np.zeros(2, np.int32),
            "slots": nobody,
            "firsts": none,
            "starts": none,
            "contexts": one + one,
            "num_new": one + one,
            "tile_rows": none,
            "tile_firsts": none,
            "wanted": one,
        }
        step = ExtendStep(columns, 0, 1, 1)
        hidden, kept = self._forward(step)
        sent = self._staging.send(padding_columns(1, self._sequences.num_slots))
        draws = self._loaded().makes_logits
        if draws or self.embeds:
            self._draw(hidden, sent, sent["slots"])
        if self._predicting is not None and kept is not None:
            self._predicting.see(kept, self._staging.send(columns), step)
        if not draws:  # nothing is sampled; block tables are changed by the kernel that stores sampled tokens elsewhere
            entry.set_entries(self._sequences.last_ids, sent["slots"], sent["host_ids"])
            return
        logits = self._loaded().logits(hidden)
        self._edited.launch_all(logits)
        ranks = torch.zeros(2, len(logits), dtype=torch.int32, device=self._device)
        entry.ranks(logits, ranks[0], ranks[1])

    def _launch_rows(self, num_rows: int) -> None:
        """Launches the kernels of a decode step of num_rows padding rows, and of the predictor that drafts tokens behind it, if the
        model has one."""
        sent = self._staging.send(padding_columns(num_rows, self._sequences.num_slots))
        hidden = self._decode(sent).hidden
        if self._predicting is not None:
            self._predicting.draw(self._predicting.go_on(hidden, sent), sent)

    @torch.inference_mode()
    def launch_adapters(self) -> None:
        """Launches every kernel that only steps with LoRA adapters launch, so that it is compiled."""
        with nullcontext() if entry.INTERPRETED else entry.both_kernels():
            self._decode(self._staging.send(padding_columns(1, self._sequences.num_slots)), adapted=True)

    @torch.inference_mode()
    def capture(self, num_rows: int, adapted: bool = False) -> int:
        """Captures the graph that runs decode steps of num_rows rows, unless it exists or steps of so many rows have no graph.
        Returns the graph's row count; 0 if there is no graph now. adapted: the graph is for steps with LoRA adapters. Called by the
        thread that runs steps, before a step that needs the graph or in idle time."""
        graphs, _ = self._graphs_of(adapted)
        padded = graphs.rows_for(num_rows)
        if not padded or padded in graphs.captured:
            return padded
        return padded if graphs.capture(padded, padding_columns(padded, self._sequences.num_slots)) else 0

    def _graph_for(self, num_rows: int, adapted: bool) -> int:
        """Returns the row count of the graph that runs a decode step of num_rows rows; 0: the step runs without a graph. If the
        graph is not captured yet, captures it when a second step needs it. The first such step runs without: a capture takes as
        long as several steps, and delays the tokens of the step before, which are often a request's first."""
        graphs, _ = self._graphs_of(adapted)
        padded = graphs.rows_for(num_rows)
        if padded and padded not in graphs.captured and not graphs.lacked_before(padded):
            return 0
        return self.capture(num_rows, adapted)

    def _unmeasured(self) -> list[tuple[entry.Product, int]]:
        """Returns the matrix multiplications, as pairs (product, number of rows), for which hearthd's kernel and cuBLAS have not
        been compared yet."""
        return [(product, rows) for product in self._products for rows in entry.FEW_ROWS if entry.is_open(product, rows)]

    def _measure(self, product: entry.Product, num_rows: int) -> None:
        """Measures hearthd's kernel and cuBLAS for a multiplication of num_rows rows. Later multiplications use hearthd's kernel if
        it is clearly faster; the graphs of this row count, which were captured with cuBLAS, are then dropped."""
        entry.measure_linear(product, num_rows)
        if entry.uses_ours(product, num_rows):
            for graphs in (self.graphs, self.adapted_graphs, self.edited_graphs):
                graphs.drop_size(num_rows)

    @property
    def num_uncaptured(self) -> int:
        """Returns for how many calls capture_next still has something to do: to capture a graph, to measure a matrix
        multiplication, or to go on with trials."""
        if self._model is None:
            return 0
        of_steps = sum(len(decoding) + len(mixed) for _, decoding, mixed in self._missing())
        of_trials = sum(trials.num_open for trials in self.trials)
        return len(self._unmeasured()) + of_steps + len(self.edited_graphs.missing()) + of_trials

    @torch.inference_mode()
    def capture_next(self) -> None:
        if unmeasured := self._unmeasured():
            self._measure(*unmeasured[0])
            return
        missing = next((missing for missing in self._missing() if missing[1] or missing[2]), None)
        if missing is not None:
            adapted, decoding, mixed = missing
            if decoding:
                self.capture(decoding[0], adapted)
            else:
                self.capture_mixed(mixed[0], adapted)
        elif sizes := self.edited_graphs.missing():
            self.edited_graphs.capture_size(sizes[0])
        elif trials := next((trials for trials in self.trials if trials.num_open), None):
            trials.measure_next()  # last, because only a later engine has anything of it

    def _missing(self) -> list[tuple[bool, list[int], list[MixedSize]]]:
        """Returns the graphs that may be captured in idle time, as a list of (whether the steps have adapters, row counts of decode
        graphs, sizes of graphs with prompt chunks). There is an entry for steps with adapters only after the model had such a
        step."""
        num_slots, forms = self._sequences.num_slots, [(adapted, *self._graphs_of(adapted)) for adapted in (False, True)]
        return [
            (adapted, decoding.missing(num_slots), mixed.missing()) for adapted, decoding, mixed in forms[: 1 + self._has_adapted]
        ]

    @torch.inference_mode()
    def capture_mixed(self, size: MixedSize, adapted: bool = False) -> bool:
        """Captures the graph of steps with prompt chunks of this size. adapted: the graph is for steps with LoRA adapters. Returns
        whether there is such a graph now."""
        return self._graphs_of(adapted)[1].capture(size, mixed_padding(size, self._sequences.num_slots))

    @property
    def evicted_s(self) -> float | None:
        """Returns the time.monotonic() at which the model was evicted. Returns None if it is not evicted."""
        return self.graphs.evicted_s

    @property
    def kept_bytes(self) -> int:
        """Returns the bytes of device memory, besides weights and KV, that the model keeps between steps and while it is
        evicted."""
        tables = (self._sequences.last_ids, *self._sequences.tables, *self._kept_memory)
        graphs = sum(each.kept_bytes for each in self._all_graphs())
        return sum(table.nbytes for table in tables) + self.adapter_memory.kept_bytes + graphs

    def drop_graphs(self) -> None:
        """Drops all graphs of this model. May be called in any thread."""
        for graphs in self._all_graphs():
            graphs.drop()

    def _drop_adapted_graphs(self) -> None:
        self.adapted_graphs.drop()
        self.adapted_mixed_graphs.drop()

    def _graphs_of(self, adapted: bool) -> tuple[DecodeGraphs, MixedGraphs]:
        """Returns the graphs of decode steps, and those of steps with prompt chunks. adapted: for steps in which at least one row
        has an adapter; False: for all other steps."""
        return (self.adapted_graphs, self.adapted_mixed_graphs) if adapted else (self.graphs, self.mixed_graphs)

    def _all_graphs(self) -> tuple[DecodeGraphs | MixedGraphs | EditedGraphs, ...]:
        return (*self._graphs_of(False), *self._graphs_of(True), self.edited_graphs)

    @torch.inference_mode()
    def logits(self, plan: BatchPlan, table: SequenceTable, every_token: bool = False) -> FloatArray:
        """Runs a step without sampling, for tests. Returns float32 logits: [T, V] of all tokens if every_token is set, else [N, V]
        of the sampling rows."""
        adapted = self._update(plan, table)
        everything = np.arange(int(plan.num_new.sum())) if every_token else None
        step = extend_step(plan, table, self.tile_tokens, everything)
        hidden, _ = self._forward(step, adapted)
        part = hidden[step.num_sampling :] if every_token else hidden[: step.num_sampling]
        return self._loaded().logits(part).float().cpu().numpy()

    def restore(self) -> None:
        """Makes the model usable again after a reload has put its weights back into the same address range."""
        self._model = self._built()
        self._set_evicted(None)

    def _built(self) -> CausalLM[DeviceBatch]:
        held = Weights(self.shape, self._dtype_name, self._weights, self._format, self.expert_counts)
        return build_model(self._ops, self.shape, held, self._ranks, self._stages)

    def release(self) -> None:
        """Unmaps the weights, and removes all adapters. Idempotent; until `restore` any step raises RuntimeError."""
        self.adapter_memory.clear_all()
        if self._device.type == "cuda" and self._model is not None:
            torch.cuda.default_stream(self._device).synchronize()  # nothing may still run on memory that is unmapped
        self._model = None
        self._set_evicted(time.monotonic())
        self._weights.unmap()

    def _set_evicted(self, evicted_s: float | None) -> None:
        for graphs in self._all_graphs():
            graphs.evicted_s = evicted_s

    # ---- inside a step

    def _loaded(self) -> CausalLM[DeviceBatch]:
        if self._model is None:
            raise RuntimeError(f"model {self.name} was released")
        return self._model

    def _logits_of(self, hidden: Tensor) -> Tensor:
        return self._loaded().logits(hidden)

    def _update(self, plan: BatchPlan, table: SequenceTable) -> bool:
        """Copies to the device those entries of the sequences' block tables and adapters that have changed since the last step.
        Returns whether any of the step's sequences has an adapter."""
        ends = plan.num_computed + plan.num_new
        if plan.to_propose is not None:  # all drafted tokens but the last have keys and values
            ends = ends + np.maximum(plan.to_propose - 1, 0)
        num_blocks = -(-int(ends.max()) // self._block_tokens)
        self._sequences.update(plan.slots, num_blocks, table, self._staging)
        adapted = self.adapter_memory.update(plan.slots, table)
        self._has_adapted |= adapted
        return adapted

    def _marks(self) -> Marks | None:
        """Returns the CUDA events that time a step, and records the first of them now, at the step's beginning. Returns None if
        there is no CUDA device."""
        if self._device.type != "cuda":
            return None
        if self._free_marks:
            marks = self._free_marks.pop()
        else:
            marks = Marks(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True, blocking=True))
        marks.started.record()
        return marks

    def _pending(
        self, told: Tensor, read: Callable[[Tensor, float], StepResult], marks: Marks | None, began_s: float
    ) -> PendingStep:
        if marks is not None:
            on_host = marks.room_for(told)
            on_host.copy_(told, non_blocking=True)
            marks.done.record()
            told = on_host
        return PendingStep(told, read, marks, began_s, self._free_marks.append)

    def _decode(self, columns: dict[str, Tensor], adapted: bool = False) -> StepOutputs:
        """Computes a decode step of R rows on the device, sampling included, and returns its results there. columns: the step's
        input arrays on the device (columns.decode_columns). adapted: at least one row has a LoRA adapter. The call may be captured
        in a graph, so it must not read a value back from the device."""
        hidden, kept = self._computed(self._decode_batch(columns, adapted), None)
        return self._draw(hidden, columns, columns["slots"], kept)

    def compute_mixed(self, columns: dict[str, Tensor], adapted: bool = False) -> StepOutputs:
        """Computes a step with prompt chunks on the device, sampling included, and returns its results there. columns: the step's
        input arrays on the device (mixed_steps.py). adapted: at least one row has a LoRA adapter. The call may be captured in a
        graph."""
        hidden, kept = self._computed(self._mixed_batch(columns, adapted), columns["wanted"])
        return self._draw(hidden, columns, columns["sampled_slots"], kept)

    def _forward(self, step: ExtendStep, adapted: bool = False) -> tuple[Tensor, list[Tensor] | None]:
        """Copies a step's inputs to the device and runs the model on them, without sampling. Returns the hidden states of the
        tokens in column `wanted`, and the states for the model's predictor (None: it has none)."""
        sent = self._staging.send(step.columns)
        return self._computed(self._extend_batch(sent, step, adapted), sent["wanted"])

    def _computed(self, batch: DeviceBatch, wanted: Tensor | None) -> tuple[Tensor, list[Tensor] | None]:
        """Runs the model on a batch. Returns the hidden states [N, width] of the tokens `wanted` (None: of all tokens), and the
        states for the model's predictor (None: it has none)."""
        model, num_tokens = self._loaded(), len(batch.input_ids)
        if self._predicting is not None:
            batch.kept = [one[:num_tokens] for one in self._kept_memory if num_tokens <= len(one)]
            if not batch.kept:
                batch.kept = [model.state_memory(num_tokens) for _ in range(model.num_kept)]
        return model.forward(batch, wanted), batch.kept

    def _batch_of(self, columns: Mapping[str, Tensor], step: ExtendStep | None) -> DeviceBatch:
        """Returns the inputs of a forward pass without adapters. columns: the step's input arrays on the device. step: the step
        with prompt tokens to which they belong; None: the step only decodes."""
        return self._decode_batch(columns, False) if step is None else self._extend_batch(columns, step, False)

    def _decode_batch(self, columns: Mapping[str, Tensor], adapted: bool) -> DeviceBatch:
        numbers, contexts = columns["numbers"], columns["contexts"]
        rows = (columns["slots"], columns["firsts"], numbers, contexts, contexts)
        return self._batch(numbers, columns["host_ids"], *rows, None, adapted)

    def _mixed_batch(self, columns: Mapping[str, Tensor], adapted: bool) -> DeviceBatch:
        """Returns the inputs of a forward pass with prompt chunks. columns: the input arrays of mixed_steps.py on the device.
        Decode attention is computed for all R rows: a row with several new tokens has a context of 0 there and gets zeros, which
        the attention by query tiles then overwrites."""
        tiles = QueryTiles(columns["tile_rows"], columns["tile_firsts"], self.tile_tokens, columns["starts"], columns["num_new"])
        contexts = columns["contexts"], columns["decode_contexts"]
        rows = (columns["slots"], columns["firsts"], columns["starts"], *contexts)
        return self._batch(columns["token_rows"], columns["host_ids"], *rows, tiles, adapted)

    def _extend_batch(self, sent: Mapping[str, Tensor], step: ExtendStep, adapted: bool) -> DeviceBatch:
        tiles = None
        if step.num_tiles:
            tiles = QueryTiles(sent["tile_rows"], sent["tile_firsts"], self.tile_tokens, sent["starts"], sent["num_new"])
        contexts = sent["contexts"]
        rows = (sent["slots"], sent["firsts"], sent["starts"], contexts, contexts[: step.num_decode])
        return self._batch(sent["token_rows"], sent["host_ids"], *rows, tiles, adapted)

    def _batch(
        self,
        token_rows: Tensor,
        host_ids: Tensor,
        slots: Tensor,
        firsts: Tensor,
        starts: Tensor,
        contexts: Tensor,
        decode_contexts: Tensor,
        tiles: QueryTiles | None,
        adapted: bool,
    ) -> DeviceBatch:
        sequences, num_decode = self._sequences, len(decode_contexts)
        input_ids, positions, groups = None, None, []
        turns: dict[Rotary, Tensor] = {}
        work: dict[int, Any] = {}
        for memory, block_table in zip(self._memory, sequences.tables, strict=True):
            input_ids, positions, kv_slots = entry.prepare_inputs(
                token_rows, host_ids, slots, firsts, starts, sequences.last_ids, block_table, memory.block_tokens
            )
            reach = memory.reach
            if memory.rotary not in turns:
                turns[memory.rotary] = entry.cos_sin(positions, memory.rotary)
            if num_decode and reach not in work:
                work[reach] = entry.split_contexts(decode_contexts, reach, memory.num_pieces, self._counted_heads)
            turning = turns[memory.rotary]
            groups.append(DeviceGroup(memory.kv, memory.scales, reach, block_table, kv_slots, turning, work.get(reach)))
        assert input_ids is not None
        rows = (slots, contexts, tiles, token_rows, firsts, starts)
        adapters = self.adapter_memory.of_tokens(slots, token_rows) if adapted else None
        return DeviceBatch(input_ids, num_decode, groups, self._layer_places, *rows, adapters=adapters)

    def _draw(self, hidden: Tensor, columns: dict[str, Tensor], slots: Tensor, kept: list[Tensor] | None = None) -> StepOutputs:
        """Samples one id for each row of hidden [N, width], by the settings in columns, and stores it as the last token of the
        row's slot. Returns the step's results on the device. If the model embeds, nothing is sampled, and the results' hidden
        states are the rows of `hidden` scaled to length 1. kept: states for the predictor, which are put into the results."""
        if self.embeds:
            return StepOutputs(torch.empty(2, 0, dtype=torch.int32, device=self._device), scaled_vectors(hidden))
        drawn = torch.empty(2, len(hidden), dtype=torch.int32, device=self._device)
        for first in range(0, len(hidden), LOGITS_ROWS):
            part = slice(first, first + LOGITS_ROWS)
            logits = self._loaded().logits(hidden[part])
            entry.sample(logits, [columns[name][part] for name in SETTINGS], drawn[0, part], drawn[1, part])
        entry.set_entries(self._sequences.last_ids, slots, drawn[0])
        return StepOutputs(drawn, hidden, kept)


def _drawn_result(num_sampling: int, told: Tensor, seconds: float) -> StepResult:
    """Makes the result of a step whose tokens were sampled on the device. told [2, R] int32: the host's copy of StepOutputs.drawn,
    of which the first num_sampling columns count. seconds: the step's device time."""
    drawn = told.numpy()[:, :num_sampling]
    return StepResult(drawn[0].copy(), drawn[1] != 0, seconds)


def _embedded_result(told: Tensor, seconds: float) -> StepResult:
    """Makes the result of a step of a model that embeds. told [N, width] float32: the host's copy of the vectors. seconds: the
    step's device time."""
    return vectors_result(told.numpy().copy(), seconds)


def with_prompts(
    read: Callable[[Tensor, float], StepResult], prompts: list[PromptLogprobs], told: Tensor, seconds: float
) -> StepResult:
    """Returns the step's result read(told, seconds) with the log-probabilities of prompt tokens added to it."""
    result = read(told, seconds)
    result.prompt_logprobs = prompts
    return result
