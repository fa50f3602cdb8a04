"""Keeps the list of models and LoRA adapters: scans the models folder and tells the node scheduler how much memory each model
takes.

Scanning runs in a separate process (daemon/scanning); the event loop only takes over the result. A model that is running keeps the
files it was loaded from: when they change, the name is registered anew with a new fingerprint, for the next load.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

from config import replicas as config_replicas
from config.chat_templates import template_files
from config.schema import DeviceBudget, ModelConfig, NodeConfig
from config.units import format_bytes
from config.upstream import host_of
from daemon.errors import BadRequest, HearthError, NotNow, no_model
from daemon.models import expert_copies, speculators
from daemon.models.adapter_loading import check_name, check_path, load_refusal, unload_refusal
from daemon.models.adapters import AdapterRecord, register_adapters, with_adapter
from daemon.models.asker import OPERATOR, Asker
from daemon.models.entry import LoadSource, ModelEntry
from daemon.models.model_names import ModelNames
from daemon.models.planning import IS_HEAD, Planner
from daemon.models.registered import Registered
from daemon.models.sizing import Sizing
from daemon.process.file_signature import MISSING, signature_text
from daemon.record.state import NodeState
from engine.exchange import GroupForm
from loader.errors import shortened
from loader.formats.registry import held_format
from loader.models import catalog
from loader.shapes import kv_layout
from loader.shapes.kv_dtypes import asked_kv_cache_dtype
from loader.sizes import layout, work_space
from scheduler.node import events
from scheduler.node.ledger import kv_reserved_bytes
from scheduler.node.replica_names import further, model_of

log = logging.getLogger("hearthd.models")
# (models folder, or "" for none; the last result; adapters in other folders; files whose signatures will be asked for) -> every
# model by name; raises OSError if the models folder can't be read
Scan = Callable[[str, Mapping[str, catalog.Checkpoint], Mapping[str, str], Sequence[str]], Awaitable[dict[str, catalog.Checkpoint]]]


async def scan_in_thread(
    models_dir: str, previous: Mapping[str, catalog.Checkpoint], named: Mapping[str, str], files: Sequence[str] = ()
) -> dict[str, catalog.Checkpoint]:
    """Scans the models folder in a thread of this process, and returns the checkpoints by name. Unlike a scan in a separate process
    (daemon/scanning), it can hang or crash the caller. models_dir: "" to scan only the folders in `named`. previous: the last
    result. named: the folders of LoRA adapters by name. files: not used. Raises OSError if models_dir cannot be read."""
    if models_dir:
        return await asyncio.to_thread(catalog.scan, models_dir, previous, named)
    return catalog.merged(catalog.named_adapters(named, previous))


_NO_HEADS: Mapping[str, catalog.Checkpoint] = {}


class Registry:
    """All registered models and LoRA adapters. Implements ModelPort, the interface through which requests find them."""

    def __init__(
        self,
        config: NodeConfig,
        devices: Sequence[DeviceBudget],
        state: NodeState,
        without_carve_out: Mapping[str, str] | None = None,
        scan: Scan = scan_in_thread,
        signature_of: Callable[[str], str] = signature_text,
    ) -> None:
        """Makes an empty registry, which rescan() fills. devices: the node's devices, with carve-outs. state: what operators have
        set, such as loaded adapters. without_carve_out: isolated model -> why no memory could be set aside for it. scan: reads the
        models folder, and examines the further files that it is given. signature_of: returns the signature that a further file had
        in the last scan; called in other threads."""
        self.config, self._state, self._scan, self._signature_of = config, state, scan, signature_of
        self._sizing = Sizing(devices, state, without_carve_out or {})
        self._planner = Planner(self._sizing)
        self.models: dict[str, Registered] = {}
        self.adapters: dict[str, AdapterRecord] = {}
        self.num_adapters: Mapping[str, int] = {}  # adapters that can be served, counted by their bases' names
        self._with_adapters: dict[str, ModelEntry] = {}  # entries of adapters that can be served, by the adapter's name
        self.upstreams: dict[str, ModelEntry] = {}  # entries of names that other servers answer; filled by the first scan
        self._started = int(time.time())
        self.refused: Callable[[str], HearthError | None] = lambda name: None  # set by the node: why a model can never run
        # set by the node: (model, tenant) -> why a request would be refused now, or None
        self.turned_away: Callable[[str, str], HearthError | None] = lambda name, tenant: None
        self.names = self._names_now()
        self._entries: list[ModelEntry] = []
        self._rescan_lock = asyncio.Lock()

    # ---- ModelPort

    def resolve(self, name: str, asker: Asker = OPERATOR) -> ModelEntry:
        return self.names.resolve(name, asker)

    def canonical(self, name: str, asker: Asker = OPERATOR) -> str:
        return self.names.canonical(name, asker)

    def knows(self, name: str, asker: Asker = OPERATOR) -> bool:
        return self.names.knows(name, asker)

    def entries(self) -> Sequence[ModelEntry]:
        return self._entries

    def further_names(self, asker: Asker = OPERATOR) -> Mapping[str, Sequence[str]]:
        return self.names.further({entry.own_name for entry in self._entries if asker.may_use(entry.own_name)})

    def _served(self, name: str) -> ModelEntry | HearthError:
        """Returns the entry of the model or adapter with this name, or the error that says why its files or settings do not allow
        it to be served."""
        if (elsewhere := self.upstreams.get(name)) is not None:
            return elsewhere
        if (adapter := self.adapters.get(name)) is not None:
            return self._served_adapter(adapter)
        found = self.models.get(name)
        if found is None:
            return no_model(name)
        if found.entry is None:
            return _unserved(f"The model {name!r}", found.problem, bool(found.facts.incomplete))
        return self.refused(name) or found.entry

    def _served_adapter(self, adapter: AdapterRecord) -> ModelEntry | HearthError:
        """Returns the entry for requests to the adapter, or the error why the adapter or its base model cannot be served."""
        if adapter.served is None:
            return _unserved(f"The adapter {adapter.name!r}", adapter.problem, adapter.is_incomplete)
        base = self._served(adapter.base)
        return base if isinstance(base, HearthError) else self._with_adapters[adapter.name]

    # ---- for the dispatcher and the operator

    def source(self, name: str) -> LoadSource | None:
        """Returns what a load needs to know about a model's files and settings; None if the model does not exist or cannot be
        served. name: the model, or one of its further replicas. Which experts are copied to further devices is not part of the
        result; the scheduler's decision to load says that."""
        found = self.models.get(model_of(name, self.models))
        if found is None or found.entry is None:
            return None
        source = LoadSource(found.checkpoint.path, found.dtype, found.entry, found.quantize, found.kv_cache_dtype)
        if not found.facts.is_split or found.shape is None:
            return source
        num_groups = len(kv_layout.kv_groups(found.shape, found.dtype, self.config.block_tokens))
        num_tokens = work_space.staged_tokens(found.entry.max_sequences, self.config.max_num_batched_tokens)
        handed = work_space.handed_bytes(found.shape, found.dtype, num_tokens)
        return replace(source, form=GroupForm(found.division, num_groups, handed, found.checkpoint.files_id))

    def chosen_copies(
        self, name: str, counts: Callable[[Sequence[str]], Mapping[int, Sequence[int]]]
    ) -> events.CopiesChosen | None:
        """Returns the event that tells the scheduler which experts of a model the next loads copy to further devices, if there is
        room; None for a model whose settings allow no copies. name: the model, or one of its further replicas. counts: takes names
        of replicas and returns, for each layer, how many tokens each of its experts has computed in these replicas together."""
        name = model_of(name, self.models)
        found = self.models.get(name)
        if found is None or found.shape is None or not found.bytes_with_copies:
            return None
        copies = expert_copies.chosen(found, counts([name, *(one.name for one in found.replicas)]))
        return events.CopiesChosen(now=time.monotonic(), cause="experts", model=name, copies=copies)

    def layout_id(self, name: str) -> str:
        """Returns a text that identifies how the model's weights are laid out in memory, and by which runner. Weights that are
        still in memory can be used again only if this text and the fingerprint of the files are the same. The result is "" if the
        weights are never used again: the model is unknown, cannot be served, or is split over devices."""
        name = model_of(name, self.models)
        found = self.models.get(name)
        if found is None or found.entry is None or found.shape is None or found.facts.is_split:
            return ""
        shape, settings = found.shape, self.config.models.get(name, ModelConfig())
        weight_format = held_format(shape, settings.quantize, settings.resident)
        return f"{self.config.runner}-{layout.layout_id(shape, found.dtype, weight_format)}"

    # ---- scanning

    async def rescan(self, config: NodeConfig | None = None) -> list[events.Event]:
        """Scans the models folder again and registers what has changed. config: new settings; None: the present ones. Returns the
        events that tell the scheduler of changed and removed models. Raises OSError if the models folder cannot be read; nothing is
        changed then."""
        async with self._rescan_lock:
            config = config or self.config
            before, named = self.models, self._state.adapters
            checkpoints = await self._scan(config.models_dir, self._known(), named, template_files(config, config.models))
            found = await asyncio.to_thread(self._register_all, config, before, checkpoints)
            adapters = await asyncio.to_thread(register_adapters, config, checkpoints, found, self.adapters, named)
            return self._swap(config, found, adapters)

    def _known(self) -> dict[str, catalog.Checkpoint]:
        return {name: one.checkpoint for name, one in (self.models | self.adapters).items()}

    # ---- adapters that an operator loads

    async def load_adapter(self, name: str, path: str, in_place: bool = False) -> AdapterRecord:
        """Serves the LoRA adapter in the folder `path` under a name, and adds it to the state's `adapters`; the caller saves the
        state. in_place: whether it may replace an adapter that was loaded under the same name. Returns its record. Raises
        HearthError if it cannot be served; nothing is changed then."""
        check_name(name)
        check_path(path)
        async with self._rescan_lock:
            self._refuse_taken(name, in_place)
            try:
                found = await self._scan("", self._known(), {name: path}, ())
            except OSError as error:
                raise NotNow("adapter_unavailable", f"{path}: {error.strerror}", retry_after_s=10.0) from None
            named = self._state.adapters | {name: path}
            adapters = await asyncio.to_thread(register_adapters, self.config, found, self.models, self.adapters, named)
            record = adapters[name]
            if (refusal := load_refusal(record)) is not None:
                raise refusal
            if isinstance(base := self._served(record.base), HearthError):
                raise base
            self._state.adapters = named
            self._take_adapters(self.adapters | adapters)
            self._name_all()
            return record

    async def unload_adapter(self, name: str) -> AdapterRecord | None:
        """Stops serving an adapter that load_adapter() has added; the caller saves the state. Returns the record that the adapter
        had; None if no scan has examined it yet. Raises HearthError if no adapter was loaded under the name."""
        async with self._rescan_lock:
            if name not in self._state.adapters:
                raise unload_refusal(name, name in self.adapters)
            self._state.adapters = {each: path for each, path in self._state.adapters.items() if each != name}
            record = self.adapters.get(name)
            self._take_adapters({each: one for each, one in self.adapters.items() if each != name})
            self._name_all()
            return record

    def replicas(self, name: str) -> list[str]:
        """Returns the names that the scheduler and the engines use for the model's copies: its own name for the first, and one for
        each further replica."""
        found = self.models.get(name)
        return [name] if found is None else [name, *(one.name for one in found.replicas)]

    def model_of(self, name: str) -> str:
        """Returns the name of the model. name: the model's name, or that of one of its further replicas."""
        return model_of(name, self.models)

    def was_loaded(self, name: str) -> bool:
        """Returns whether an operator has loaded an adapter under this name."""
        return name in self._state.adapters

    def _refuse_taken(self, name: str, in_place: bool) -> None:
        """Raises HearthError if an adapter cannot be loaded under this name, because a model, adapter, alias or entry of [names]
        has it. in_place: whether it may replace an adapter that an operator has loaded."""
        if self.was_loaded(name):
            if in_place:
                return
            message = f"The adapter {name!r} is loaded already; load_inplace true, or `hearth load --replace`, replaces it."
            raise BadRequest("adapter_loaded", message, param="lora_name")
        if name in self.adapters or name in self.models:
            kind = "an adapter" if name in self.adapters else "a model"
            why = f"{kind} in the models folder, which is read anew whenever its files change"
        elif name in self.upstreams:
            why = "a model that another server answers"
        elif self.names.knows(name):
            why = "an alias of a model, or an entry of [names]"
        else:
            return
        raise BadRequest("name_taken", f"{name!r} is the name of {why}; choose another one.", param="lora_name")

    def _register_all(
        self, config: NodeConfig, before: Mapping[str, Registered], checkpoints: Mapping[str, catalog.Checkpoint]
    ) -> dict[str, Registered]:
        result = {}
        heads = speculators.named_heads(config, checkpoints)
        heads_before = speculators.named_heads(config, {name: one.checkpoint for name, one in before.items()})
        same_heads = heads.keys() == heads_before.keys() and all(heads_before[name] is one for name, one in heads.items())
        for name, checkpoint in checkpoints.items():
            if config.models.get(name, ModelConfig()).upstream is not None:
                if name in before or name not in self.upstreams:
                    log.warning("%s: its folder is hidden: by its settings another server answers for this name (upstream)", name)
                continue
            if checkpoint.is_adapter:
                continue
            known = before.get(name)
            is_known = known is not None and known.checkpoint is checkpoint and config is self.config and same_heads
            if known is not None and is_known and (known.entry is None or known.entry.text_id == self._text_id(config, checkpoint)):
                result[name] = known
                continue
            try:
                result[name] = self.register(config, checkpoint, heads)
            except Exception as error:  # an error in one folder must not hide the other models
                log.exception("%s: what its files say cannot be used", name)
                problem = f"what its files say cannot be used: {type(error).__name__}: {shortened(str(error))}"
                result[name] = self._unusable(config, checkpoint, problem)
        for name, head in heads.items():
            used_by = [one for one, found in result.items() if found.entry is not None and found.entry.head == name]
            problem = f"it drafts tokens for {', '.join(used_by)}" if used_by else IS_HEAD
            if name in result and head.complete and head.head is not None and result[name].problem != problem:
                result[name] = self._unusable(config, head, problem)
        return result

    def _unusable(self, config: NodeConfig, checkpoint: catalog.Checkpoint, problem: str) -> Registered:
        name = checkpoint.name
        settings = config.models.get(name, ModelConfig())
        facts = events.ModelFacts(
            name=name,
            weights_bytes=0,
            kv_bytes_per_token=0,
            work_space_bytes=0,
            max_model_len=0,
            pinned=self._state.pinned.get(name, settings.pinned),
            enabled=self._state.enabled.get(name, True),
            fingerprint=checkpoint.fingerprint,
            incomplete=problem if checkpoint.reason else "",  # missing files may still arrive
            unusable="" if checkpoint.reason else problem,
            drafts=checkpoint.complete and checkpoint.head is not None,
        )
        return Registered(checkpoint, facts, None, settings.dtype or config.dtype, problem)

    def _text_id(self, config: NodeConfig, checkpoint: catalog.Checkpoint) -> str:
        """Returns a text that changes whenever the model's tokenizer or chat template may have changed (ModelEntry.text_id). It is
        made of the names, sizes and times of the files in the model's folder and of the file that its setting chat_template
        names."""
        return checkpoint.signature + "".join(map(self._signature_of, template_files(config, [checkpoint.name])))

    def register(
        self, config: NodeConfig, checkpoint: catalog.Checkpoint, heads: Mapping[str, catalog.Checkpoint] = _NO_HEADS
    ) -> Registered:
        """Returns a new record of a model, made from its checkpoint and the settings. The record is not added to the registry.
        heads: EAGLE-3 heads in the models folder, which may draft tokens for it, by name."""
        name = checkpoint.name
        settings = config.models.get(name, ModelConfig())
        plan = self._planner.plan(config, checkpoint, settings, heads)
        if isinstance(plan, str):
            return self._unusable(config, checkpoint, plan)
        shape, facts, speculator, dtype = plan.shape, plan.facts, plan.speculator, plan.dtype
        weight_format = held_format(shape, settings.quantize, settings.resident)
        generation = checkpoint.generation
        given = settings.sampling
        defaults: dict[str, float | int | None] = {"max_tokens": given.max_tokens}
        for key in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
            override = getattr(given, key)
            defaults[key] = override if override is not None else getattr(generation, key)
        number = self._sizing.num_replicas(name, plan.settings, shape)
        replicas = further(facts, number, settings.replicas == config_replicas.AUTO)
        entry = ModelEntry(
            name=name,
            path=checkpoint.path,
            aliases=tuple(settings.aliases),
            max_model_len=facts.max_model_len,
            vocab_size=shape.vocab_size,
            eos_token_ids=generation.eos_token_ids,
            bos_token_id=generation.bos_token_id,
            created=checkpoint.created,
            fingerprint=speculator.fingerprint,
            text_id=self._text_id(config, checkpoint),
            generation_defaults={key: value for key, value in defaults.items() if value is not None},
            chat_template=settings.chat_template,
            max_sequences=settings.max_sequences,
            tool_parser=settings.tool_parser,
            reasoning_parser=settings.reasoning_parser,
            embedding_size=shape.hidden_size if shape.pooling and not shape.scoring else 0,
            scoring=shape.scoring,
            cut_sizes=range(1, shape.hidden_size + 1) if shape.any_cut_size else shape.cut_sizes,
            architecture=shape.architecture,
            dtype=dtype,
            quantize="" if weight_format.resident else weight_format.name,
            weights_bytes=facts.weights_bytes * facts.num_ranks,
            num_parameters=layout.num_parameters(shape),
            speculator=speculator.name,
            head="" if speculator.head is None else speculator.head.name,
            head_path="" if speculator.head is None else speculator.head.path,
            has_replicas=bool(replicas),
        )
        kv_cache_dtype = asked_kv_cache_dtype(settings.kv_cache_dtype)
        held = (weight_format.name, kv_cache_dtype)
        with_copies = self._sizing.bytes_with_copies(plan.settings, speculator.shape, dtype)
        missing = next((file for file in template_files(config, [name]) if self._signature_of(file) == MISSING), "")
        lost = config_replicas.missing(settings, number)
        return Registered(
            checkpoint, facts, entry, dtype, "", *held, speculator.shape, plan.division, replicas, with_copies, missing, lost
        )

    def _swap(self, config: NodeConfig, found: dict[str, Registered], adapters: dict[str, AdapterRecord]) -> list[events.Event]:
        before, after = _all_facts(self.models), _all_facts(found)
        for name, one in found.items():
            known_entry = self.models[name].entry if name in self.models else None
            if known_entry is not None and one.entry is not None and known_entry.text_id != one.entry.text_id:
                log.info("%s: its files have changed; new requests read its tokenizer and chat template anew", name)
        self.models, self.config = found, config
        self._take_adapters(adapters)
        now = time.monotonic()
        changes: list[events.Event] = [
            events.ModelRemoved(now=now, cause="scan", model=name) for name in before if name not in after
        ]
        for name, facts in after.items():
            known = before.get(name)
            if known is not facts and known != facts:
                changes.append(events.ModelRegistered(now=now, cause="scan", facts=facts))
        self.upstreams = {
            name: self._entry_of_upstream(name, settings)
            for name, settings in config.models.items()
            if settings.upstream is not None
        }
        self._name_all()
        return changes

    def _name_all(self) -> None:
        """Makes `names` and the list of entries anew, because the models, adapters or upstreams have changed. Logs each alias and
        entry of [names] that has no effect any more, because a model has the same name."""
        hidden, self.names = self.names.hidden, self._names_now()
        for name, warning in self.names.hidden.items():
            if hidden.get(name) != warning:
                log.warning("%s", warning)
        entries = [registered.entry for registered in self.models.values() if registered.entry is not None]
        entries += [*self.upstreams.values(), *self._with_adapters.values()]
        self._entries = sorted(entries, key=lambda entry: entry.own_name)

    def _take_adapters(self, found: dict[str, AdapterRecord]) -> None:
        """Replaces the registered adapters by `found`, and logs those that have changed or are gone."""
        before, self.adapters, self._with_adapters = self.adapters, found, {}
        for name in before.keys() - found.keys():
            told = "the adapter is unloaded" if before[name].loaded_from else "the adapter's folder is gone"
            log.info("%s: %s", name, told)
        for name, record in found.items():
            if record.served is not None and (base := self.models[record.base].entry) is not None:
                self._with_adapters[name] = with_adapter(base, record.served)
            if record is not before.get(name):
                log.log(logging.INFO if record.served is not None else logging.WARNING, "%s", record.describe())
        self.num_adapters = Counter(base.name for base in self._with_adapters.values())

    def _entry_of_upstream(self, name: str, settings: ModelConfig) -> ModelEntry:
        return ModelEntry(
            name=name,
            path="",
            aliases=tuple(settings.aliases),
            max_model_len=0,  # only the other server knows it
            vocab_size=0,
            eos_token_ids=(),
            bos_token_id=None,
            created=self._started,
            fingerprint="",
            upstream=host_of(settings.upstream or ""),
        )

    def _names_now(self) -> ModelNames:
        names = self.models.keys() | self.upstreams.keys() | self.adapters.keys()
        return ModelNames(self.config, names, self._served, lambda name, tenant: self.turned_away(name, tenant), self.adapters)

    def unknown_models(self) -> list[str]:
        """Returns the models that the settings or the table [names] name and that do not exist, sorted by name. Logs these, and
        files of chat templates that do not exist, because a name may be misspelt."""
        unknown = self.config.models.keys() - self.models.keys() - self.upstreams.keys() - self.adapters.keys()
        for name in sorted(unknown):
            log.warning('settings for models."%s": there is no model of that name (yet)', name)
        for name, targets in self.names.unknown_targets().items():
            log.warning('names."%s" leads to what is no model (yet): %s', name, ", ".join(targets))
            unknown.update(targets)
        for name, found in self.models.items():
            if found.missing_template:
                log.warning('settings for models."%s".chat_template: there is no file %s (yet)', name, found.missing_template)
        return sorted(unknown)

    def describe(self, name: str) -> str:
        """Returns the text that is logged when the model is registered: its dtype, lengths and memory, or why it cannot be
        served."""
        found = self.models[name]
        if found.entry is None:
            state = "incomplete" if found.facts.incomplete else "draft head" if found.facts.drafts else "refused"
            return f"{name}: {state}: {found.problem}"
        facts = found.facts
        limit = found.checkpoint.shape.max_position_embeddings if found.checkpoint.shape is not None else 0
        capped = f" of {limit}" if facts.max_model_len < limit else ""
        asked = self.config.models.get(name, ModelConfig()).max_model_len
        if asked is not None and asked > facts.max_model_len:
            capped = f" (configured {asked} is more than the checkpoint has)"
        held = f"{found.dtype}, {found.quantize} matrices" if found.quantize else found.dtype
        held += f", {found.kv_cache_dtype} KV" if found.kv_cache_dtype else ""
        held += ", drafts by its own predictor" if found.entry.speculator == speculators.MTP else ""
        held += f", drafts by {found.entry.head}" if found.entry.head else ""
        held += f", split over {facts.num_ranks} devices" if facts.is_split else ""
        held += f", up to {len(found.replicas) + 1} replicas" if found.replicas else ""
        where = "; on each device: " if facts.is_split else ", "
        return (
            f"{name}: {held}, max_model_len {facts.max_model_len}{capped}{where}weights {format_bytes(facts.weights_bytes)}, "
            f"reserved KV {format_bytes(kv_reserved_bytes(facts))}, "
            f"work space {format_bytes(facts.work_space_bytes)}{''.join(f'; {note}' for note in found.notes)}"
        )


def _all_facts(models: Mapping[str, Registered]) -> dict[str, events.ModelFacts]:
    """Returns the scheduler's facts about all models and their further replicas, by name, each model before its replicas. A replica
    whose name is that of a model is left out."""
    found = {}
    for name, registered in models.items():
        found[name] = registered.facts
        found |= {one.name: one for one in registered.replicas if one.name not in models}
    return found


def _unserved(what: str, problem: str, is_incomplete: bool) -> HearthError:
    """Returns the error for a request for a model or adapter that cannot be served. what: its kind and name, for the message.
    problem: the reason. is_incomplete: whether it may be served later, when missing files have arrived."""
    if is_incomplete:
        return NotNow("model_incomplete", f"{what} is not complete: {problem}", retry_after_s=10.0)
    return BadRequest("model_unusable", f"{what} cannot be served: {problem}", param="model")
