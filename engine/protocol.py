"""Defines every message between the daemon and an engine: tagged msgspec Structs over a socketpair.

Framing: 4-byte little-endian length, then one msgpack body (`encode` / `FrameReader`). A step sends at most one `TokensOut`,
whatever the number of sequences, and the fields of that message are flat arrays of numbers, without an object per token. So the
host's cost of a token does not grow with the batch.
"""

from __future__ import annotations

import signal
import struct
from collections.abc import Iterator
from typing import Any

import msgspec

from loader.configs.kernel_sets import KernelSet
from loader.shapes.kv_dtypes import kv_dtype_of

PROTOCOL_VERSION = 21
SHOW_THREADS = signal.SIGUSR1  # has an engine write to its standard error where each of its threads is

# Values of `TokensOut.finish`: how a sequence ended; 0: it goes on.
FINISH_NONE, FINISH_STOP, FINISH_LENGTH, FINISH_ABORT = 0, 1, 2, 3

EMBED, SCORE = "embed", "score"  # `Submit.task` of encoders


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The base class of all messages; the tag is the class name."""


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """The settings by which one request's tokens are sampled and its output ends. Stop strings stay in the daemon, which sees text;
    the engine compares token ids with the stop ids."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    seed: int = 0  # always set by the daemon (at random if the client gave none), so that a resubmission repeats itself
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: list[int] = []  # stop ids of the request; the model's end ids come with LoadModel
    logprobs: int = -1  # number of alternatives reported besides the sampled token; -1: no log-probabilities
    prompt_logprobs: int = -1  # the same for the prompt's tokens
    min_p: float = 0.0  # tokens less likely than this share of the most likely token's probability are cut; 0: off
    presence_penalty: float = 0.0  # counts the output only, as frequency_penalty does
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0  # counts prompt and output
    logit_bias: dict[int, float] = {}  # token id -> added to its logit
    grammar: str = ""  # the text must follow it: "json_schema:…", "regex:…" and so on (engine/grammar/compile.py)
    allowed_token_ids: list[int] = []  # no other may be sampled; empty: any
    bad_words: list[list[int]] = []  # token sequences none of which may appear; each has at least one token
    prompt_ranks: bool = False  # fills PromptLogprobs.ranks; only with prompt_logprobs

    @property
    def is_limited(self) -> bool:
        """Returns whether the request rules out certain tokens (allowed_token_ids) or sequences of tokens (bad_words); see
        engine/grammar/token_limits.py."""
        return bool(self.allowed_token_ids or self.bad_words)

    @property
    def is_constrained(self) -> bool:
        """Returns whether the request's steps need masks (sets of the tokens that may be sampled): it has a grammar, or rules out
        tokens."""
        return bool(self.grammar) or self.is_limited


# ---- daemon -> engine -------------------------------------------------------------------------------------------------


class Configure(Message, frozen=True):
    """The first message to an engine, answered by EngineReady: the device and the settings that hold for all models.
    num_chunks: the number of chunks in the device's whole budget.
    work_space_bytes: the largest work space of the models known now. The KV leases that are sent later leave room for it and for
    the weights."""

    device: str  # its name, such as cpu:0
    num_chunks: int
    chunk_bytes: int
    work_space_bytes: int
    max_num_batched_tokens: int
    block_tokens: int
    turn_budget_ms: float
    threads: int  # 0: the engine's default
    runner: str = "torch"  # torch | null
    null_step_ms: float = 10.0
    cache_dir: str = ""
    kernels: list[KernelSet] = []  # what registered models need, the most common dtype first: compiled from the start
    test_disk_bytes_per_s: int = 0  # for tests: limit for reading weights from disk; 0: none
    test_copy_bytes_per_s: int = 0  # for tests: limit for copies between the host tier and the device; 0: none
    host_tier_slots: int = 0  # slots of chunk_bytes each, in a memfd that the daemon passes as --host-tier-fd; 0: no tier
    max_step_stretch: float = 2.0  # longest step with prompts, as a multiple of one that only decodes; 0: unlimited


# Values of LoadModel.speculator: the checkpoint's own predictor (multi-token prediction), or a head from other files.
MTP, EAGLE3 = "mtp", "eagle3"


class Group(msgspec.Struct, frozen=True, array_like=True):
    """One device's share of a model that is split over several devices (tensor, expert or pipeline parallelism).
    rank: this device's index among the model's devices; rank 0 decides what each step computes.
    members: by rank, the number of the device's engine in the memory that engines share (engine/exchange.py).
    region_offset, region_bytes: the part of that memory that belongs to the model until all its engines have answered EvictModel.
    expert_parts, num_stages, copies: how the experts are divided, the number of pipeline stages, and the experts with several
    copies, as in loader.shapes.model_shape.Division.
    handed_bytes: bytes of the states that a step passes from stage to stage.
    num_kv_groups: number of the model's KV groups.
    hosts: by rank, the name of the host that lends the device, "" for the daemon's own; empty: all are the daemon's own.
    files_id: identifies the model's files on every host, as in loader.models.catalog.Checkpoint."""

    rank: int
    members: list[int]
    region_offset: int
    region_bytes: int
    expert_parts: int = 1
    num_stages: int = 1
    handed_bytes: int = 0
    num_kv_groups: int = 1
    hosts: list[str] = []
    files_id: str = ""
    copies: tuple[tuple[tuple[int, ...], ...], ...] = ()


class LoadModel(Message, frozen=True):
    """Loads a checkpoint into the device's memory. lease_chunks: the engine's KV lease (the chunks that it may use for KV) from
    this load on. Before the load takes memory, the engine frees KV blocks until the rest fits the lease: cached prefixes first,
    then blocks of sequences, which are preempted and computed again.

    Slots are indices into the host tier. The daemon chooses them, and does not write to a slot while an engine uses it."""

    placement_id: int
    model: str
    path: str
    dtype: str  # float32 | bfloat16 | float16
    fingerprint: str
    weights_chunks: int
    kv_reserved_chunks: int  # chunks of KV that are set aside for this model
    lease_chunks: int
    max_model_len: int
    max_sequences: int
    eos_token_ids: list[int]
    quantize: str = ""  # weight format (loader/formats) of the layers' matrices in memory; empty: plain
    source_slots: list[int] = []  # slots with this model's weights, in order; empty: they are read from disk
    checksum: int = 0  # checksum of the weights in source_slots, as LoadDone reported it; a copy that differs is not used
    keep_slots: list[int] = []  # slots to fill with the weights while they are read from disk; empty: no copy is kept
    kv_slots: list[int] = []  # slots with KV that an eviction saved (Evicted.kv_slots_used)
    kv_index: bytes = b""  # index of the KV in kv_slots (Evicted.kv_index); empty: nothing is restored
    kv_cache_dtype: str = ""  # dtype of keys and values: fp8, or empty for the model's dtype
    speculator: str = "none"  # what drafts tokens: none, prompt-lookup, mtp or eagle3 (and prompt-lookup where these have none)
    head_path: str = ""  # the folder of an EAGLE-3 head, whose files are part of the fingerprint
    group: Group | None = None  # for a split model, of which each device gets a LoadModel; None: the model is whole

    @property
    def predicts(self) -> bool:
        """Returns whether a predictor of further tokens (the checkpoint's own, or an EAGLE-3 head) is loaded with the model."""
        return self.speculator in (MTP, EAGLE3)

    @property
    def share(self) -> str:
        """A text that identifies the part of the model's weights that this device holds: the rank and how the model is split; "" if
        the device holds all of them."""
        group = self.group
        if group is None:
            return ""
        copies = f" with copies {group.copies}" if group.copies else ""
        return f"rank {group.rank} of {len(group.members)}, experts {group.expert_parts}, stages {group.num_stages}{copies}"

    @property
    def kv_dtype(self) -> str:
        """The dtype in which keys and values are stored."""
        return kv_dtype_of(self.dtype, self.kv_cache_dtype)


class EvictModel(Message, frozen=True):
    """Frees a model's weights and KV at once, or cancels its load; answered by Evicted when the memory is free. The model's
    requests are dropped between two steps, without a message: the daemon keeps them and submits them again.

    Before the memory is freed, KV is copied to save_slots as far as there is room: first that of the dropped requests, including
    their last, partial block, then cached prefixes, the most recently used first. A later load restores this KV, and requests
    submitted after that load find it by the prefix cache's keys."""

    placement_id: int
    model: str
    lease_chunks: int  # the KV lease after the eviction
    save_slots: list[int] = []  # slots of the host tier that may take the KV
    comes_back: bool = False  # the model will be loaded again soon: its weights stay in chunks that are free, until they are taken


class SetLease(Message, frozen=True):
    lease_chunks: int


class AdapterSource(msgspec.Struct, frozen=True, array_like=True):
    """The folder from which a LoRA adapter is read, and which version of its files is meant. path: the folder. fingerprint: differs
    when the files have changed, as in loader.models.catalog.Checkpoint."""

    name: str
    path: str
    fingerprint: str


class Submit(Message, frozen=True):
    """Hands the engine a request to compute. It may be new or submitted again, for example after its engine died; `output` is what
    the client has already received."""

    request_id: int
    model: str
    prompt: list[int]
    params: SamplingParams
    output: list[int] = []
    tenant: str = ""  # tenants never share prefix blocks
    cache_salt: str = ""  # requests of one tenant with different salts share no prefix blocks either
    priority: int = 0
    task: str = "generate"  # generate, or EMBED or SCORE, which are answered by EmbeddingsOut and ignore params
    weight: float = 1.0  # the model's share of the device
    tenant_weight: float = 1.0  # the tenant's share among those that want this model
    prediction: list[int] = []  # tokens that the output may repeat in parts; empty: none are known
    second_at: int = 0  # for SCORE: index of the first token of the second text's segment (token type 1); 0: there is one segment
    adapter: AdapterSource | None = None  # LoRA adapter of the model; None: the request is for the model itself
    text_id: str = ""  # of requests with a grammar: it changes when tokenizer.json does, by which the grammar is followed


class Abort(Message, frozen=True):
    """Drops these requests at once, whether they wait or run; unknown ids are ignored. Not answered."""

    request_ids: list[int]


class BringAdapter(Message, frozen=True):
    """Asks the engine to load an adapter into the device's memory before a request names it. Answered by AdapterLoaded if it was
    loaded. Nothing happens if the model is not loaded, or if the adapter cannot be read or finds no room; a request that names the
    adapter later fails with the reason."""

    model: str
    adapter: AdapterSource


class RetireAdapter(Message, frozen=True):
    """Drops an adapter from the device's memory, once the requests that run with it have ended. Not answered."""

    model: str
    adapter: AdapterSource


class Probe(Message, frozen=True):
    """Tests whether the device still computes: makes it compute a token that is known in advance, between two steps. Answered by
    the `Probed` with the same number."""

    number: int


class Shutdown(Message, frozen=True):
    pass


# ---- engine -> daemon -------------------------------------------------------------------------------------------------


class EngineReady(Message, frozen=True):
    pid: int
    version: int
    num_chunks: int
    left: list[str] = []  # models whose weights an earlier engine left on the device


class EngineFault(Message, frozen=True):
    """The last message of an engine that ends itself; its requests are submitted to the next engine. kind: no_memory if the device
    has less memory than Configure asks for, else fault. error: one line for the log."""

    kind: str
    error: str  # one line


class LoadProgress(Message, frozen=True):
    """Reports the progress of a load, in bytes. bytes_total 0: the load is waiting for kernels to be compiled, and the time until
    the load's deadline begins again with this message."""

    placement_id: int
    bytes_done: int
    bytes_total: int


class LoadStreams(Message, frozen=True):
    """Tells the daemon, during a load, that requests for the model may be submitted from now on: they are computed layer by layer
    as the weights arrive. No request gets a token before LoadDone; LoadFailed and Evicted drop the requests. Saved KV has been
    restored before this message."""

    placement_id: int
    model: str


class LoadDone(Message, frozen=True):
    placement_id: int
    model: str
    seconds: float
    bytes_read: int  # bytes read from disk; 0 if the weights came from the host tier
    kept: bool = False  # a whole copy of the weights is in keep_slots, or in source_slots if those were used
    checksums: list[int] = []  # checksum of the kept copy; of a split model, the checksums of all shares by rank
    copy_seconds: float = 0.0  # spent copying weights and KV between the host tier and the device
    map_seconds: float = 0.0  # spent in mapping calls
    restored_kv_tokens: int = 0  # tokens whose KV was restored from kv_slots
    source_rejected: str = ""  # why source_slots were given but not used (the weights came from disk instead)
    read_as: str = ""  # which of the model's files were read and why, if some are packed
    kernels_seconds: float = 0.0  # the part of `seconds` spent on kernels alone, while no weights were read
    # The weights were on the device already, left by an engine that died or by a group that lost a device: nothing was read or
    # copied. Of a split model: those of one share at least.
    adopted: bool = False


class KernelsTold(Message, frozen=True):
    """Reports the progress of compiling kernels, about every second until it has ended; a machine compiles each kernel once.
    Meanwhile models are served by slower operations in place of these kernels or, if loads_wait is True, the load that needs the
    kernels waits."""

    kind: str  # what is being compiled, such as "bfloat16"; empty: compilation has ended
    num_done: int
    num_units: int
    left_s: float  # estimated seconds until the end
    problem: str = ""  # why kernels are not used although nothing is being compiled
    loads_wait: bool = False  # whether the load that needs them waits until they are compiled
    postponed: bool = False  # nothing is compiled until the engine is idle or a step calls these kernels


class WeightsHeld(Message, frozen=True):
    """Says which chunks hold the weights of a loaded model. Nothing writes to these chunks until the daemon evicts the model, so
    the next engine, given the same memory, may use the weights if their checksum is still `checksum`. share: the part of the
    model's weights that these are (LoadModel.share).

    The engine also keeps such an object for itself, about weights that stay on the device after an eviction
    (EvictModel.comes_back). Only in this case may `checksum` be 0, which means that it is not known."""

    placement_id: int
    model: str
    fingerprint: str
    dtype: str
    quantize: str
    num_bytes: int
    chunks: list[int]  # chunks of the device, in the weights' order
    checksum: int  # computed like LoadModel.checksum
    share: str = ""


class LoadFailed(Message, frozen=True):
    placement_id: int
    model: str
    error: str  # names the file and the tensor
    permanent: bool  # True: the checkpoint is at fault, trying again is pointless until its files change


class Evicted(Message, frozen=True):
    placement_id: int
    model: str
    kv_index: bytes = b""  # to be passed to LoadModel; opaque to the daemon
    kv_slots_used: list[int] = []  # those of save_slots that hold KV, in order; the others are free again
    saved_kv_tokens: int = 0
    recompute_kv_tokens: int = 0  # computed tokens of dropped requests whose KV was not saved
    copy_seconds: float = 0.0  # spent copying between the device and the host tier


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of some of a step's tokens, by the softmax of the model's own logits (before bias, penalties and
    temperature).
    request_ids, chosen, counts: for each token, its request, its log-probability and its number of alternatives. The tokens of one
    request follow each other in their order.
    top_ids, top: the ids and log-probabilities of the alternatives, token after token, the most likely first: the first counts[0]
    belong to the first token, the next counts[1] to the second, and so on."""

    request_ids: list[int]
    chosen: list[float]
    counts: list[int]
    top_ids: list[int]
    top: list[float]


class TokensOut(Message, frozen=True):
    """The tokens of one step of one model.
    ids: the tokens of request_ids[0], then those of request_ids[1], and so on; the end id that stopped a sequence is among them.
    counts: for each request, the number of its tokens in `ids`; empty if every request got exactly one.
    finish: for each request, FINISH_NONE if it goes on, else how it ended (FINISH_STOP, …); empty if none ended."""

    model: str
    step_id: int
    seconds: float  # device seconds of this step and of earlier steps without a token since the model's last message
    request_ids: list[int]
    ids: list[int]
    counts: list[int] = []
    finish: list[int] = []
    # request id -> prompt tokens found in the prefix cache; only in the step in which a request got its first token
    cached: dict[int, int] = {}
    logprobs: TokenLogprobs | None = None  # for the requests that asked for them
    # request id -> [tokens whose KV was found, tokens computed again], for requests submitted with `output`; only in the step in
    # which they got their next token
    resumed: dict[int, tuple[int, int]] = {}
    steps: int = 1  # number of steps in `seconds`; 0 if a sequence ends without a step
    # How many tokens were drafted for each request, if `counts` is not empty. All of a request's `ids` but the last were drafted.
    drafted: list[int] = []
    # request id -> seconds from the plan that began its prompt, after any wait for a place in the batch, for memory or for an
    # adapter, to the end of this step; only in the step in which a request got its first token
    prompt_s: dict[int, float] = {}


class EmbeddingsOut(Message, frozen=True):
    """The vectors or scores of one step: the answers that end Submits of task "embed" or "score". seconds: device time of the last
    `steps` steps of the model. There is more than one such step if a decoder computed long texts in several chunks of the
    prompt."""

    model: str
    step_id: int
    seconds: float
    request_ids: list[int]
    values: list[bytes]  # float32, little-endian: one vector of norm 1 each, or one number
    steps: int = 1


class PromptLogprobs(Message, frozen=True):
    """Log-probabilities of some of a prompt's tokens, from the token with index `first` (>= 1) on. chosen: one for each token.
    top_ids, top: for each token, num_top alternatives and their log-probabilities, token after token. ranks: for each token, how
    many tokens were at least as likely; empty unless SamplingParams.prompt_ranks.

    All messages of a prompt are sent in order, before the request's first token. If the request is computed again before its first
    token, they are sent again from the start."""

    request_id: int
    first: int
    num_top: int
    chosen: list[float]
    top_ids: list[int]
    top: list[float]
    ranks: list[int]


class AdapterLoaded(Message, frozen=True):
    """Says that a LoRA adapter is in the device's memory now, and that the requests that waited for it run. seconds: time to read
    and copy the adapter. num_bytes: its size on the device."""

    model: str
    adapter: str
    seconds: float
    num_bytes: int


class RequestFailed(Message, frozen=True):
    """Says that a request has failed and ended. code: nan_logits, no_work_space, too_long, unknown_model, unsupported_grammar,
    no_token_left, adapter_unusable, adapter_unavailable, no_adapter_room or internal. error: the reason as text."""

    request_id: int
    code: str
    error: str


class Probed(Message, frozen=True):
    """Answers the `Probe` with the same number: the device has computed the right token. (After a wrong token the engine sends
    EngineFault and ends.)"""

    number: int


class Stats(Message, frozen=True):
    """The engine's state, sent when it changes, at most 4 times a second.
    kv_chunks_used: number of chunks that hold KV or adapters.
    models: name -> [kv_bytes, active, queued, cached_bytes]: bytes of KV that sequences use, running requests, waiting requests,
    bytes of cached prefixes that no sequence uses.
    steps, preemptions: counted since the engine's start.
    without_room: model -> how many of its queued requests wait because their adapter finds no room; only models with such requests.
    adapter_bytes: the bytes of all adapters that running requests use.
    share_chunks: split model that this engine leads -> number of chunks with KV on each of the model's devices. Engines that follow
    report none."""

    kv_chunks_used: int
    models: dict[str, list[int]]
    steps: int
    preemptions: int
    kv_moved_bytes: int = 0  # bytes of KV copied from chunk to chunk to empty sparse chunks, since the engine's start
    adapters: dict[str, dict[str, int]] = {}  # model -> adapter in memory -> its bytes, for models with adapters
    without_room: dict[str, int] = {}
    adapter_bytes: int = 0
    share_chunks: dict[str, int] = {}


class ExpertTokens(Message, frozen=True):
    """Reports, by layer and expert, how many tokens of a model this engine has computed since its last such message; a token counts
    once for each expert that computes it. Sent every few seconds if there are any, and before the model leaves. If an expert is
    divided among several devices, only one of them reports its tokens."""

    model: str
    layers: list[int]
    num_experts: int  # of a layer, on all devices
    first_expert: int  # the number of the first expert in `counts`: a device of a split model may have only some of them
    counts: bytes  # int64, little-endian: for each of `layers` as many numbers as the device has experts of it


ToEngine = Configure | LoadModel | EvictModel | SetLease | Submit | Abort | BringAdapter | RetireAdapter | Probe | Shutdown
FromEngine = (
    EngineReady
    | EngineFault
    | LoadProgress
    | LoadStreams
    | LoadDone
    | KernelsTold
    | WeightsHeld
    | LoadFailed
    | Evicted
    | TokensOut
    | EmbeddingsOut
    | PromptLogprobs
    | AdapterLoaded
    | RequestFailed
    | Probed
    | Stats
    | ExpertTokens
)

_encoder = msgspec.msgpack.Encoder()
_held_decoder = msgspec.msgpack.Decoder(list[WeightsHeld])
_length = struct.Struct("<I")


def encode(message: Message) -> bytes:
    """Returns a message as one frame: the length of its body as 4 bytes, then the body."""
    body = _encoder.encode(message)
    return _length.pack(len(body)) + body


def encode_held(weights: list[WeightsHeld]) -> bytes:
    """Returns the records of the weights that an engine leaves in device memory, as bytes. The daemon passes these bytes, the note,
    to the next engine together with the descriptors of the memory (engine/memory/handles.py)."""
    return _encoder.encode(weights)


def decode_held(note: bytes) -> list[WeightsHeld]:
    """Returns the records of weights in device memory from a note that encode_held made; [] for an empty note. Raises
    msgspec.DecodeError for any other note."""
    return _held_decoder.decode(note) if note else []


class FrameReader:
    """Cuts a byte stream back into messages. kinds: the type, or union of types, of the messages. `feed` takes the next bytes of
    the stream, any number of them, and returns an iterator over the messages that are now complete. It raises msgspec.DecodeError
    for a body that is no message of these types."""

    def __init__(self, kinds: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(kinds)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        buffer = self._buffer
        buffer += data
        start, end = 0, len(buffer)
        messages = []
        while end - start >= 4:
            (length,) = _length.unpack_from(buffer, start)
            if end - start - 4 < length:
                break
            messages.append(self._decoder.decode(bytes(buffer[start + 4 : start + 4 + length])))
            start += 4 + length
        del buffer[:start]
        return iter(messages)


# ---- the step journal: which requests were in the step that killed an engine -------------------------------------------

PULSE_AT = 8 + 8 * 4096  # the pulse (engine/loop/pulse.py) comes after the requests
JOURNAL_BYTES = PULSE_AT + 32
_count = struct.Struct("<I")


def write_journal(journal: Any, request_ids: Any) -> None:
    """Writes the requests of the steps that are running to the step journal (shared memory in a memfd that the daemon made),
    without a system call. request_ids: int64 array, of which at most 4096 are written; empty if no step runs. The count is set to 0
    first and written last, so a reader never sees a half-written list."""
    _count.pack_into(journal, 0, 0)
    num = min(len(request_ids), 4096)
    if num:
        journal[4 : 4 + 8 * num] = request_ids[:num].tobytes()
        _count.pack_into(journal, 0, num)


def read_journal(journal: Any) -> tuple[int, ...]:
    """Returns the ids of the requests that the step journal of an engine names: those of the steps that were running when the
    engine last wrote to it. Returns () if no step was running."""
    (num,) = _count.unpack_from(journal, 0)
    return struct.unpack_from(f"<{num}q", journal, 4)
