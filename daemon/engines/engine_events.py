"""Turns the engines' messages into events for the scheduler, and into tokens for the requests' sinks, which write the streams.

The hot path is `_tokens_out`: one call per step, and one list append and one sink call per token.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from daemon.contracts import Generation
from daemon.engines.groups import Answer, Groups, Regions
from daemon.engines.kernels import Kernels
from daemon.engines.probes import Probes
from daemon.errors import BadRequest, HearthError, NotNow, ServerFault
from daemon.metrics.swaps import KernelKills, source_of
from daemon.process.logs import fields
from daemon.requests.dispatcher import Dispatcher
from engine import protocol
from scheduler.node import events
from scheduler.report_intervals import MEASURED_PREFILL_TOKENS, PREFILL_EVERY_S

if TYPE_CHECKING:
    from daemon.traces.otlp import Value
    from daemon.traces.tracer import Tracer

log = logging.getLogger("hearthd")


class EngineEvents:
    """Handles the starts, ends and messages of all engines, on the event loop; implements WorkerEvents. `stats`: the last Stats of
    each device's engine, by device."""

    def __init__(
        self, dispatcher: Dispatcher, budgets: Mapping[str, int], kernels: Kernels, regions: Regions | None = None
    ) -> None:
        """budgets: device -> the bytes of its budget. kernels: receives the engines' reports on compiling kernels. regions: the
        memory that engines share to run split models; None if no model can be split over devices."""
        self._kernels = kernels
        self.groups = Groups(dispatcher.send, dispatcher.lease_of, dispatcher.config.block_tokens, regions, self._answered)
        dispatcher.groups = self.groups
        self.probes = Probes(dispatcher.send)
        self.stats: dict[str, protocol.Stats] = {}
        self._dispatcher, self._budgets = dispatcher, budgets
        self._ring, self._metrics, self._open = dispatcher.ring, dispatcher.metrics, dispatcher.open
        self._kernel_kills = KernelKills()
        self._loaded_s: dict[str, float] = {}  # model -> when its last load ended
        self._measure_prefill_at: dict[str, float] = {}  # model -> when a prefill may be measured again
        self._post, self._by_id = dispatcher.post, dispatcher.open.by_id
        # Set by the node: returns the experts of which the next loads of a model keep copies; None: its settings allow no copies.
        self.chosen_copies: Callable[[str], events.CopiesChosen | None] = lambda model: None
        self.is_over = False  # whether messages of engines are dropped, because the next daemon computes their content again

    def engine_up(self, device: str, message: protocol.EngineReady) -> None:
        log.info("engine is up (pid %d, %d chunks)", message.pid, message.num_chunks, extra=fields(device=device))
        self._ring.add("engine", device=device, state="up", pid=message.pid)
        self._post(
            events.EngineUp(
                now=time.monotonic(),
                cause=self._dispatcher.next_cause(f"engine-{device}"),
                device=device,
                budget_bytes=self._budgets[device],
                left=tuple(message.left),
            )
        )
        self._dispatcher.engines_changed()

    def engine_ended(self, device: str) -> None:
        self.groups.engine_ended(device)

    def engine_lost(self, device: str) -> None:
        self.groups.engine_lost(device)

    def engine_down(self, device: str, running: tuple[int, ...], reason: str) -> None:
        lost = self.groups.models_on(device)
        answers = self.groups.engine_down(device)
        self.stats.pop(device, None)
        self.probes.engine_down(device)
        self._kernels.forget(device)
        self._dispatcher.forget_aborts(device)
        self._metrics.engine_restarts[device] += 1
        self._metrics.swaps.engine_down(device, self._kernel_kills.look() and "SIGKILL" in reason)
        self._ring.add("engine", device=device, state="down", reason=reason, running=len(running))
        now = time.monotonic()
        if (tracer := self._dispatcher.tracer()) is not None:
            self._trace_engine_down(tracer, device, lost, now, reason)
        self._post(
            events.EngineDown(
                now=now,
                cause=self._dispatcher.next_cause(f"engine-{device}"),
                device=device,
                running=running,
                reason=reason,
            )
        )
        for devices, answer in answers:
            self._answered(devices, answer)
        self._dispatcher.engines_changed()

    def _trace_engine_down(self, tracer: Tracer, device: str, lost: set[str], now: float, reason: str) -> None:
        """Records the end of a device's engine in the traces of the loads and requests that the engine had. lost: the split models
        of which the engine held a share, that is, the part on one device. now: monotonic seconds."""
        for load in tracer.loads_lost(device, now, reason):
            self._dispatcher.tell_load(load)
        for generation in self._open.by_id.values():
            at = generation.submitted_device
            if generation.trace is not None and at and (at == device or generation.replica in lost):
                generation.trace.lost_engine(generation, now, device, reason)

    def engine_message(self, device: str, message: Any) -> None:
        kind = type(message)
        if self.is_over:
            return
        if kind is protocol.TokensOut:
            self._tokens_out(device, message)
        elif kind is protocol.Stats:
            self.stats[device] = message
            self._post(
                events.KVNoted(
                    now=time.monotonic(),
                    cause=f"engine-{device}",
                    device=device,
                    kv_bytes={model: (counts[0], counts[3]) for model, counts in message.models.items()},
                    waiting={model: counts[2] for model, counts in message.models.items() if counts[2] > 0},
                    without_room=message.without_room,
                    adapter_bytes=message.adapter_bytes,
                )
            )
        elif kind is protocol.KernelsTold:
            self._kernels.told(device, message)
        elif isinstance(message, Answer):
            if self.groups.knows(message.placement_id):
                self.groups.answer(device, message)
            else:
                self._answered(device, message)
        elif kind is protocol.EmbeddingsOut:
            self._embeddings_out(device, message)
        elif kind is protocol.PromptLogprobs:
            self._prompt_logprobs(device, message)
        elif kind is protocol.AdapterLoaded:
            self._adapter_loaded(device, message)
        elif kind is protocol.RequestFailed:
            self._request_failed(device, message)
        elif kind is protocol.Probed:
            self.probes.answered(device, message)
        elif kind is protocol.ExpertTokens:
            self._metrics.experts.add(device, message)

    def _answered(self, device: str, message: Answer) -> None:
        """Handles the answer to a load or an eviction: of one engine, or the joint answer of all engines of a split model. device:
        the device's name, or the joined names of all devices."""
        match message:
            case protocol.LoadProgress():
                self._load_progress(device, message)
            case protocol.LoadStreams():
                cause = f"load-{message.placement_id}"
                self._post(events.LoadStreams(now=time.monotonic(), cause=cause, placement_id=message.placement_id))
            case protocol.LoadDone():
                self._metrics.loads[message.model, "done"] += 1
                self._load_done(device, message)
            case protocol.LoadFailed():
                self._load_failed(device, message)
            case protocol.Evicted():
                self._evicted(device, message)

    def _load_failed(self, device: str, message: protocol.LoadFailed) -> None:
        self._metrics.loads[message.model, "failed"] += 1
        self._metrics.swaps.load_failed(device, message)
        if (tracer := self._dispatcher.tracer()) is not None:
            self._dispatcher.tell_load(tracer.load_ended(message.placement_id, time.monotonic(), error=message.error))
        self._post(
            events.LoadFailed(
                now=time.monotonic(),
                cause=f"load-{message.placement_id}",
                placement_id=message.placement_id,
                reason=message.error,
                permanent=message.permanent,
            )
        )

    def _load_done(self, device: str, message: protocol.LoadDone) -> None:
        now = self._loaded_s[message.model] = time.monotonic()
        if (tracer := self._dispatcher.tracer()) is not None:
            self._dispatcher.tell_load(tracer.load_ended(message.placement_id, now, _of_load(message)))
        self._metrics.load_seconds[message.model] += message.seconds
        self._metrics.swaps.load_done(message)
        if message.source_rejected:
            about = fields(model=message.model, device=device)
            log.warning("its copy in host memory was not used: %s", message.source_rejected, extra=about)
        self._ring.add(
            "loaded",
            model=message.model,
            device=device,
            seconds=round(message.seconds, 6),
            bytes_read=message.bytes_read,
            restored_kv_tokens=message.restored_kv_tokens,
            adopted=message.adopted,
        )
        self._post(
            events.LoadFinished(
                now=time.monotonic(),
                cause=f"load-{message.placement_id}",
                placement_id=message.placement_id,
                seconds=message.seconds,
                kept=message.kept,
                checksums=tuple(message.checksums),
                copy_s=message.copy_seconds,
                source_rejected=message.source_rejected,
                read_as=message.read_as,
                kernels_s=message.kernels_seconds,
                adopted=message.adopted,
                restored_kv_tokens=message.restored_kv_tokens,
            )
        )

    def _adapter_loaded(self, device: str, message: protocol.AdapterLoaded) -> None:
        self._metrics.adapter_loads[message.model] += 1
        self._metrics.adapter_load_seconds[message.model] += message.seconds
        self._ring.add(
            "adapter_loaded",
            model=message.model,
            device=device,
            adapter=message.adapter,
            num_bytes=message.num_bytes,
            seconds=round(message.seconds, 6),
        )

    def _evicted(self, device: str, message: protocol.Evicted) -> None:
        self._metrics.swaps.evicted(message)
        if (copies := self.chosen_copies(message.model)) is not None:
            self._post(copies)  # posted first, so that the model's next load already takes these copies
        self._ring.add("evicted", model=message.model, device=device, saved_kv_tokens=message.saved_kv_tokens)
        self._post(
            events.EvictFinished(
                now=time.monotonic(),
                cause=f"evict-{message.placement_id}",
                placement_id=message.placement_id,
                kv_slots=tuple(message.kv_slots_used),
                kv_index=message.kv_index,
                saved_kv_tokens=message.saved_kv_tokens,
            )
        )

    def _load_progress(self, device: str, message: protocol.LoadProgress) -> None:
        self._ring.add(
            "load_progress",
            keep=False,
            model=self._dispatcher.loading.get(device, ""),
            device=device,
            placement_id=message.placement_id,
            bytes_done=message.bytes_done,
            bytes_total=message.bytes_total,
        )
        self._post(
            events.LoadProgressed(
                now=time.monotonic(),
                cause=f"load-{message.placement_id}",
                placement_id=message.placement_id,
                bytes_done=message.bytes_done,
                bytes_total=message.bytes_total,
            )
        )

    def _find(self, device: str, request_id: int) -> Generation | None:
        """Returns the sequence with this id if it runs on the device. Returns None if it has ended, or if it was submitted to
        another device meanwhile. The caller then drops the tokens; if the sequence was submitted to another device, that device
        computes them again."""
        generation = self._by_id.get(request_id)
        return generation if generation is not None and generation.submitted_device == device else None

    def _embeddings_out(self, device: str, message: protocol.EmbeddingsOut) -> None:
        self._metrics.steps[message.model] += message.steps
        self._metrics.step_seconds[message.model] += message.seconds
        for request_id, vector in zip(message.request_ids, message.values, strict=True):
            generation = self._find(device, request_id)
            if generation is None:
                continue
            generation.vector = vector
            self._open.end(generation, "stop")
            try:
                generation.sink.tokens((), protocol.FINISH_STOP)
            except Exception:
                self._dispatcher.sink_broke(generation)
            self._dispatcher.finished(request_id)

    def _request_failed(self, device: str, message: protocol.RequestFailed) -> None:
        generation = self._find(device, message.request_id)
        about = {"model": generation.model.name, "device": generation.submitted_device} if generation is not None else {}
        cause = f"req-{message.request_id}"
        log.warning("a request failed in the engine: %s: %s", message.code, message.error, extra=fields(cause=cause, **about))
        if generation is not None:
            self._dispatcher.fail(generation, _error(message, generation), "failed")
            self._dispatcher.finished(message.request_id)

    def _logprobs(self, device: str, told: protocol.TokenLogprobs) -> None:
        start = 0
        for request_id, chosen, count in zip(told.request_ids, told.chosen, told.counts, strict=True):
            generation = self._find(device, request_id)
            if generation is not None and generation.logprobs is not None:
                generation.logprobs.feed(chosen, told.top_ids[start : start + count], told.top[start : start + count])
            start += count

    def _prompt_logprobs(self, device: str, told: protocol.PromptLogprobs) -> None:
        generation = self._find(device, told.request_id)
        if generation is None:
            return
        if generation.logprobs is not None:
            generation.logprobs.feed_prompt(told)
        if generation.prompt_logprobs is not None:
            generation.prompt_logprobs.feed(told)

    # ---- the hot path

    def _tokens_out(self, device: str, message: protocol.TokensOut) -> None:
        find = self._by_id.get
        ids, finish = message.ids, message.finish
        metrics, model = self._metrics, message.model
        metrics.steps[model] += message.steps
        metrics.step_seconds[model] += message.seconds
        metrics.generated_tokens[model] += len(ids)
        if message.drafted:
            metrics.drafted_tokens[model] += sum(message.drafted)
            metrics.accepted_tokens[model] += len(ids) - len(message.request_ids)
        if message.cached:
            self._note_cached(device, message)
        if message.resumed:
            self._note_resumed(device, message)
        if message.logprobs is not None:
            self._logprobs(device, message.logprobs)
        self._dispatcher.hold_aborts()
        try:
            if not message.counts and not finish:
                for request_id, token in zip(message.request_ids, ids, strict=True):
                    generation = find(request_id)
                    if generation is not None and generation.submitted_device == device:  # as in _find
                        output = generation.output
                        if not output:
                            self._first_token(generation, message)
                        output.append(token)
                        try:
                            generation.sink.tokens((token,), 0)
                        except Exception:  # the step's other sequences must get their tokens
                            self._dispatcher.sink_broke(generation)
            else:
                self._mixed_rows(device, message)
        finally:
            self._dispatcher.release_aborts()

    def _mixed_rows(self, device: str, message: protocol.TokensOut) -> None:
        """Passes the tokens of a step on to the sinks of their sequences. It handles steps in which a sequence gets several tokens
        or ends; _tokens_out handles all other steps itself, which is faster. (With many sequences, one ends in most steps.)"""
        find = self._by_id.get
        start = 0
        num_rows = len(message.request_ids)
        counts = message.counts or (1,) * num_rows
        finishes, drafted = message.finish or (0,) * num_rows, message.drafted or (0,) * num_rows
        for request_id, count, finish, num_drafted in zip(message.request_ids, counts, finishes, drafted, strict=True):
            row = message.ids[start : start + count]
            start += count
            generation = find(request_id)
            if generation is None or generation.submitted_device != device:  # as in _find
                continue
            if num_drafted:
                generation.num_drafted += num_drafted
                generation.num_accepted += count - 1
            if row and not generation.output:
                self._first_token(generation, message)
            generation.output += row
            if finish == protocol.FINISH_NONE:
                try:
                    generation.sink.tokens(row, 0)
                except Exception:
                    self._dispatcher.sink_broke(generation)
            elif finish == protocol.FINISH_ABORT:
                # its model was evicted and the scheduler did not say so; the request must still end
                error = NotNow(
                    "unloaded", f"Model {generation.model.name!r} was evicted while this request ran.", retry_after_s=1.0
                )
                self._dispatcher.fail(generation, error, "failed")
                self._dispatcher.finished(request_id)
            else:
                self._open.end(generation, "stop" if finish == protocol.FINISH_STOP else "length")
                try:
                    generation.sink.tokens(row, finish)
                except Exception:
                    self._dispatcher.sink_broke(generation)
                self._dispatcher.finished(request_id)

    def _note_cached(self, device: str, message: protocol.TokensOut) -> None:
        for request_id, num_cached in message.cached.items():
            generation = self._find(device, request_id)
            if generation is not None and not generation.output:
                generation.num_cached = num_cached
                self._metrics.cached_tokens[message.model] += num_cached

    def _note_resumed(self, device: str, message: protocol.TokensOut) -> None:
        for request_id, (restored, recomputed) in message.resumed.items():
            generation = self._find(device, request_id)
            if generation is not None:
                generation.restored_tokens += restored
                generation.recomputed_tokens += recomputed
                self._metrics.swaps.kv_tokens[message.model, "restored"] += restored
                self._metrics.swaps.kv_tokens[message.model, "recomputed"] += recomputed
                if generation.trace is not None:
                    generation.trace.begins_to_decode(generation, time.monotonic())

    def _first_token(self, generation: Generation, message: protocol.TokensOut) -> None:
        now = generation.first_token_s = time.monotonic()
        model = generation.model.name
        self._metrics.ttft[model].add(now - generation.arrived_s)
        if generation.trace is not None:
            generation.trace.begins_to_decode(generation, now)
        num_computed = len(generation.prompt) - generation.num_cached
        prompt_s = message.prompt_s.get(generation.request_id)
        if (
            prompt_s is not None
            and num_computed >= MEASURED_PREFILL_TOKENS
            and now >= self._measure_prefill_at.get(model, 0.0)
            and not generation.num_pauses
            and generation.submitted_s >= self._loaded_s.get(generation.replica, 0.0)  # otherwise it waited for the weights
        ):
            self._measure_prefill_at[model] = now + PREFILL_EVERY_S
            self._post(
                events.PrefillMeasured(
                    now=now,
                    cause=f"req-{generation.request_id}",
                    model=model,
                    device=generation.submitted_device,
                    num_tokens=num_computed,
                    seconds=prompt_s,
                )
            )


def _of_load(message: protocol.LoadDone) -> dict[str, Value]:
    """Returns the attributes that a finished load gets in a trace, such as where the weights came from."""
    return {
        "hearth.load.source": source_of(message),
        "hearth.load.read_bytes": message.bytes_read,
        "hearth.load.seconds": message.seconds,
        "hearth.load.copy_seconds": message.copy_seconds,
        "hearth.load.kernels_seconds": message.kernels_seconds,
        "hearth.load.restored_kv_tokens": message.restored_kv_tokens,
    }


def _error(failed: protocol.RequestFailed, generation: Generation) -> HearthError:
    """Returns the error that answers a request that failed in the engine. Three failures that only the engine can find are the
    client's fault (400): a grammar that the vocabulary cannot follow, word and token lists that leave no token, and an adapter with
    broken files. An adapter that cannot be read now, or for which there is no room, gives a temporary error (503). All other
    failures are the server's (500)."""
    if failed.code == "unsupported_grammar":
        kind = generation.params.grammar.partition(":")[0]
        field = {"regex": "regex", "lark": "grammar"}.get(kind, "response_format")
        return BadRequest(failed.code, f"{field}: {failed.error}", param=field)
    if failed.code == "no_token_left":
        field = "allowed_token_ids" if generation.params.allowed_token_ids else "bad_words"
        return BadRequest("no_token_left", f"{field}: {failed.error}", param=field)
    if failed.code == "adapter_unusable":
        return BadRequest("adapter_unusable", failed.error, param="model")
    if failed.code == "adapter_unavailable":
        return NotNow("adapter_unavailable", failed.error, retry_after_s=5.0)
    if failed.code == "no_adapter_room":
        return NotNow("no_adapter_room", failed.error, retry_after_s=5.0)
    return ServerFault(failed.code, failed.error)
