"""A device's share of a model that is split over several GPUs (tensor or pipeline parallelism). All ranks, the devices with shares
of the same layers, run every step with tensors of the same shapes, because exchanges on GPUs take whole tensors.

So the shapes of a step depend on its plan alone, and not on which CUDA graphs a rank has. A decode step of up to MAX_PADDED_ROWS
rows is padded as for a graph, even on ranks without that graph; every other step of several ranks has exactly the plan's tokens.
The step leaves its logits in memory outside of the graphs. Rank 0 then samples from them; the other ranks are finished with the
step.

Stages of a pipeline pass on only rows that are not padding. So a stage that is a single device may pad steps in any way. It also
has graphs of steps with prompt chunks, and if it is the last stage, it samples within its graphs, as a whole model does.

Shapes: R rows, N sampling rows, V vocabulary, W width.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.contracts.ranks import GroupBroken
from engine.contracts.steps import Launched, StepResult
from engine.cuda.begins import DeviceBegins
from engine.cuda.columns import decode_columns, extend_step
from engine.cuda.graphs import DecodeGraphs, StepOutputs, destroy_dropped, graph_rows
from engine.cuda.mixed_graphs import MixedGraphs
from engine.cuda.mixed_steps import mixed_columns, mixed_sizes
from engine.cuda.model import CudaModel, Marks, PendingStep, with_prompts
from engine.cuda.ops import CudaOps
from engine.cuda.ranks import DeviceRanks
from engine.cuda.stages import DeviceStages
from engine.grammar.row_masks import RowMasks
from engine.memory.weight_range import WeightRange
from engine.protocol import LoadModel
from engine.sampling.logprobs import owed_prompt_rows
from loader.shapes.model_shape import ModelShape
from loader.sizes.gpu_sizing import LOGITS_ROWS
from loader.sizes.work_space import MOST_STAGED_TOKENS
from scheduler.batch.plan import BatchPlan, FloatArray, LongArray, SequenceTable

MAX_PADDED_ROWS = LOGITS_ROWS  # decode steps of more rows are not padded, and have no graph
Logits = Callable[[Tensor], Tensor]  # [n, W] -> [n, V]


class ShareLinks:
    """The connections of one device's share of a model to the other shares.

    ranks: the connection to the shares of the same layers; None: there are none. stages: the connection to the shares of other
    layers; None: there are none.
    broken [1]: not 0 once a device of the split model has been lost; other code sets it.
    begins: reports to the first rank when the other ranks begin a step. None in a pipeline, where another device may have begun a
    later step by the time of the report."""

    def __init__(
        self,
        ranks: DeviceRanks | None,
        stages: DeviceStages | None,
        broken: LongArray,
        begins: DeviceBegins | None = None,
    ) -> None:
        self.ranks, self.stages, self._broken, self.begins = ranks, stages, broken, begins
        self._all = [one for one in (ranks, stages, begins) if one is not None]

    @property
    def waited_s(self) -> float:
        """The seconds for which the host has waited for other stages, in all steps so far."""
        return 0.0 if self.stages is None else self.stages.waited_s

    def count(self, num_tokens: int) -> None:
        """Sets how many rows of the next step are not padding; stages pass on only these."""
        if self.stages is not None:
            self.stages.count(num_tokens)

    def has_ended(self) -> bool:
        """Returns, without waiting, whether the threads of all connections have done the work that they were given. Raises the
        error that has ended one of them, if there was one."""
        return all(one.has_ended() for one in self._all)

    def check(self) -> None:
        """Raises the error that has ended the thread of a connection, or GroupBroken if a device of the split model has been
        lost."""
        for one in self._all:
            one.check_fault()
        if self.ranks is not None:
            self.ranks.check()
        if self._broken[0]:
            raise GroupBroken("the group has lost a device")

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Returns a context in which a step is captured: instead of waiting for the stage before and sending to the next stage, the
        step reads states from memory that stays allocated and leaves its own states there (DeviceStages.in_place)."""
        with nullcontext() if self.stages is None else self.stages.in_place():
            yield

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Returns a context in which one graph is replayed. At its beginning it waits for the states of the stage before; at its
        end it sends this stage's states to the next one. Raises GroupBroken if a device of the split model has been lost."""
        if self.stages is not None:
            self.stages.take()
        with nullcontext() if self.ranks is None else self.ranks.launching():
            yield
        if self.stages is not None:
            self.stages.pass_on()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Returns a context in which nothing is exchanged between ranks or passed on between stages. It is for steps that only
        compile kernels or allocate memory."""
        with ExitStack() as stack:
            for one in self._all:
                stack.enter_context(one.alone())
            yield

    def close(self) -> None:
        """Ends all exchanges with other shares that are under way, and prevents further ones. Idempotent."""
        for one in self._all:
            one.close()

    def wait_closed(self) -> None:
        """Waits, after `close`, until the connections are given up. Before the call, graphs with exchanges must have been
        destroyed, and nothing may keep the device from ending its steps."""
        for one in self._all:
            one.wait_closed()


class CudaShare(CudaModel):
    """One device's share of a decoder (an engine.contracts.steps.SplitModel) on a GPU, or on the CPU with interpreted kernels (for
    tests). Parameters that are not named here are those of CudaModel.

    kv_memory: uint8, the memory of the share's KV, in which block numbers count from 0.
    links: the connections to the other shares.
    max_graph_tokens: used only by a pipeline stage that is a single device; other shares have no graphs of steps with prompt
    chunks.

    _samples: whether this share samples within its steps, which the last stage of a pipeline does if it is a single device."""

    def __init__(
        self,
        ops: CudaOps,
        spec: LoadModel,
        shape: ModelShape,
        weights: WeightRange,
        kv_memory: Tensor,
        block_tokens: int,
        links: ShareLinks,
        max_graph_rows: int = 0,
        max_graph_tokens: int = 0,
    ) -> None:
        assert shape.split is not None
        self._samples = links.ranks is None and shape.split.is_last_stage and not shape.pooling
        parts = (ops, spec, shape, weights, kv_memory, block_tokens)
        super().__init__(*parts, max_graph_rows if self._samples else 0, ranks=links.ranks, stages=links.stages)
        self._links, model = links, self._loaded()
        self._waited_s = 0.0  # how long the host had waited for other stages when the last step began
        num_rows = min(graph_rows(spec.max_sequences), MAX_PADDED_ROWS)
        row_limit, token_limit = min(max_graph_rows, num_rows), 0
        if links.stages is not None and links.ranks is None:
            token_limit = min(max_graph_tokens, MOST_STAGED_TOKENS)
        on_device, sizes = (self._staging, self._device), mixed_sizes(token_limit, spec.max_sequences, self.tile_tokens)
        decode, mixed, replaying = self._in_place(self._decode), self._in_place(self.compute_mixed), links.replaying
        self.graphs = DecodeGraphs(decode, *on_device, row_limit, warming=links.alone, replaying=replaying)
        self.mixed_graphs = MixedGraphs(mixed, *on_device, sizes, replaying=replaying)
        # one memory for the graphs of all sizes; the logits of steps without a graph, too, are left there
        width = self.vocab_size if model.makes_logits and not self._samples else 0
        self._logits = torch.empty(num_rows, width, dtype=getattr(torch, spec.dtype), device=self._device)
        if links.stages is not None and (most := max([row_limit, *(size.num_tokens for size in sizes)])):
            links.stages.keep(most, 1 + model.passes_second)

    @property
    def kept_bytes(self) -> int:
        states = 0 if self._links.stages is None else self._links.stages.kept_bytes
        return super().kept_bytes + self._logits.nbytes + states

    # ---- steps

    def execute(self, plan: BatchPlan, table: SequenceTable, masks: RowMasks | None = None) -> StepResult:
        """Runs one step and returns its result (see HostedModel.execute). All ranks run the step, the others by `follow`. Raises
        GroupBroken if a device of the split model has been lost."""
        result = self.launch(plan, table, masks).wait()
        if self._links.begins is not None:
            result.waited_s = self._links.begins.waited_s(result.seconds)
        self._links.check()
        return result

    @torch.inference_mode()
    def launch(self, plan: BatchPlan, table: SequenceTable, masks: RowMasks | None = None) -> Launched:
        """Starts one step and returns while it may still be running. If there is too little memory, the process ends, because the
        other ranks wait for this rank's part of the step. The step's seconds do not include waits for other stages."""
        began_s, self._waited_s = time.perf_counter(), self._links.waited_s
        self._links.check()
        if self._samples:
            self._links.count(int(plan.num_new.sum()))
            return self._launch(plan, table, masks)
        self._update(plan, table)
        owed, rows = owed_prompt_rows(plan, table), self._sampling_rows(plan, table, masks)
        marks = self._marks()
        hidden, num_sampling, logits = self._begin(plan, table, None if owed is None else owed.tokens)
        told = torch.empty(2, 0, dtype=torch.int32, device=self._device)
        read: Callable[[Tensor, float], StepResult] = _nothing_sampled
        if rows is not None:
            slots = plan.slots[plan.samples]
            edited = self._edited.draw(hidden[:num_sampling], rows, slots, table.request_id[slots], None, logits)
            told, read = edited.told, edited.result
        if owed is not None:
            read = partial(with_prompts, read, owed.logprobs(self._ops, hidden[num_sampling:], logits, LOGITS_ROWS))
        return self._pending(told, read, marks, began_s)

    def _marks(self) -> Marks | None:
        marks = super()._marks()
        if marks is not None and self._links.stages is not None:
            self._links.stages.received = marks.started.record  # once more: the host has waited by then
        return marks

    def _pending(
        self, told: Tensor, read: Callable[[Tensor, float], StepResult], marks: Marks | None, began_s: float
    ) -> PendingStep:
        return super()._pending(told, read, marks, began_s + self._links.waited_s - self._waited_s)

    @torch.inference_mode()
    def follow(self, plan: BatchPlan, table: SequenceTable) -> None:
        """Launches this rank's part of a step that rank 0 leads, and returns when it is launched; `table` is not read after that.
        Raises GroupBroken if a device of the split model has been lost."""
        self._links.check()
        if self._links.begins is not None:
            self._links.begins.note()
        self._update(plan, table)
        owed = owed_prompt_rows(plan, table)
        hidden, num_sampling, logits = self._begin(plan, table, None if owed is None else owed.tokens)
        if not self._loaded().makes_logits:
            return
        for first, end in ((0, num_sampling), (num_sampling, num_sampling + (0 if owed is None else len(owed.tokens)))):
            for at in range(first, end, LOGITS_ROWS):
                logits(hidden[at : min(at + LOGITS_ROWS, end)])

    def has_ended(self) -> bool:
        """Returns whether the device has ended all steps that `follow` has started. It asks the CUDA stream, because an event after
        each step would cost the host more time."""
        return self._links.has_ended() and (self._device.type != "cuda" or torch.cuda.current_stream().query())

    @torch.inference_mode()
    def logits(self, plan: BatchPlan, table: SequenceTable, every_token: bool = False) -> FloatArray:
        self._update(plan, table)
        also = np.arange(int(plan.num_new.sum())) if every_token else None
        hidden, num_sampling, logits_of = self._begin(plan, table, also)
        made = logits_of(hidden[num_sampling:]) if every_token else logits_of(hidden)[:num_sampling]
        logits: FloatArray = made.float().cpu().numpy().copy()  # the next step overwrites what it was made from
        return logits

    def _begin(self, plan: BatchPlan, table: SequenceTable, also: LongArray | None) -> tuple[Tensor, int, Logits]:
        """Launches a step up to its hidden states, or up to its logits if it is padded. also: indices into T of further tokens
        whose hidden states are wanted, besides those of the sampling rows; None: there are none.

        Returns the hidden states [>= N, W], those of the N sampling rows first; the number N; and a function that returns the
        logits of hidden states. All ranks must call this function in the same order for the same parts of the hidden states, each
        of at most LOGITS_ROWS rows: first for the sampling rows, then for the others."""
        num_sampling, num_tokens = int(plan.samples.sum()), int(plan.num_new.sum())
        self._links.count(num_tokens)
        padded = graph_rows(num_tokens)
        if also is None and num_sampling == num_tokens and padded <= min(MAX_PADDED_ROWS, len(self._logits)):
            columns = decode_columns(plan, table, None, padded)
            if self._graph_for(num_tokens, adapted=False):
                outputs = self.graphs.run(padded, columns)
            else:
                outputs = self._decode(self._staging.send(columns))
        elif (
            also is None
            and num_sampling <= len(self._logits)
            and (size := self._mixed_size(plan, num_tokens, adapted=False)) is not None
        ):
            outputs = self.mixed_graphs.run(size, mixed_columns(plan, table, None, self.tile_tokens))
        else:
            hidden, _ = self._forward(extend_step(plan, table, self.tile_tokens, also))
            return hidden, num_sampling, self._loaded().logits
        if self._samples:
            return outputs.hidden, num_sampling, self._loaded().logits
        return outputs.hidden, num_sampling, lambda hidden: self._logits[: len(hidden)]

    def _decode(self, columns: dict[str, Tensor], adapted: bool = False) -> StepOutputs:
        """Computes a decode step of R rows and returns its results on the device. The last stage of a pipeline, if it is one
        device, samples; all other shares leave the logits in self._logits instead. The call may be captured in a graph."""
        if self._samples:
            return super()._decode(columns, adapted)
        return self._left(self._computed(self._decode_batch(columns, adapted), None)[0])

    def compute_mixed(self, columns: dict[str, Tensor], adapted: bool = False) -> StepOutputs:
        """Computes a step with prompt chunks, whose input arrays (columns) mixed_steps.py describes, and returns its results on the
        device. The last stage of a pipeline, if it is one device, samples; all other shares leave the logits in self._logits."""
        if self._samples:
            return super().compute_mixed(columns, adapted)
        return self._left(self._computed(self._mixed_batch(columns, adapted), columns["wanted"])[0])

    def _left(self, hidden: Tensor) -> StepOutputs:
        """Writes the logits of hidden states [R, W] to self._logits, if this share makes logits. Returns a step's results without
        sampled ids and with these hidden states; with no rows of hidden states if the share makes no logits, because nothing reads
        them and a graph would keep their memory."""
        nothing_drawn = torch.empty(2, 0, dtype=torch.int32, device=self._device)
        if not self._loaded().makes_logits:
            return StepOutputs(nothing_drawn, hidden.new_empty(0, hidden.shape[1]))
        for first in range(0, len(hidden), LOGITS_ROWS):
            part = self._loaded().logits(hidden[first : first + LOGITS_ROWS])
            self._logits[: len(part)].copy_(part[: len(self._logits)])
        return StepOutputs(nothing_drawn, hidden)

    def _in_place(self, step: Callable[[dict[str, Tensor]], StepOutputs]) -> Callable[[dict[str, Tensor]], StepOutputs]:
        """Returns the function that is captured instead of `step`. It runs `step`, but reads states from memory that stays
        allocated and leaves its own states there, instead of exchanging them with other stages (ShareLinks.in_place)."""

        def captured(columns: dict[str, Tensor]) -> StepOutputs:
            with self._links.in_place():
                return step(columns)

        return captured

    # ---- kernels and graphs

    def launch_all(self) -> None:
        with self._links.alone():
            super().launch_all()

    def warm(self) -> None:
        with self._links.alone():
            super().warm()

    def capture(self, num_rows: int, adapted: bool = False) -> int:
        """Captures the graph of decode steps of num_rows rows (see CudaModel.capture). Returns its row count; 0: there is none, for
        example because a device of the split model is lost during the capture."""
        try:
            return super().capture(num_rows, adapted)
        except GroupBroken:
            return 0

    def release(self) -> None:
        """Unmaps the weights, destroys the CUDA graphs, and gives up the connections to the other shares, for which the graphs must
        be gone."""
        self._links.close()  # exchanges under way end, so that the device can end its steps
        super().release()
        self.drop_graphs()
        destroy_dropped()
        self._links.wait_closed()


def _nothing_sampled(told: Any, seconds: float) -> StepResult:
    """Returns the result of a step in which no row samples. seconds: the step's device time."""
    return StepResult(np.empty(0, np.int32), np.empty(0, np.bool_), seconds)
