"""Every message between the daemon and an engine: tagged msgspec Structs over a socketpair.

Framing: 4-byte little-endian length, then one msgpack body (`encode` / `FrameReader`). A step sends at most one `TokensOut`,
whatever the number of sequences, so what a token costs the host does not grow with the batch. Everything is flat arrays of ints; no
object per token.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import msgspec

from loader.kernel_sets import KernelSet
from loader.kv_layout import kv_dtype_of

PROTOCOL_VERSION = 16

# How a sequence ended, in `TokensOut.finish`; 0: it goes on.
FINISH_NONE, FINISH_STOP, FINISH_LENGTH, FINISH_ABORT = 0, 1, 2, 3

EMBED, SCORE = "embed", "score"  # `Submit.task` of encoders


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages; the tag is the class name."""


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """How the tokens of one request are sampled. Stop strings stay in the daemon, which sees text; the engine matches stop ids."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    seed: int = 0  # always set by the daemon (at random if the client gave none), so that a resubmission repeats itself
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: list[int] = []  # the request's own; the model's end ids come with LoadModel
    logprobs: int = -1  # -1: none; else the number of alternatives to the sampled token
    prompt_logprobs: int = -1  # the same for the prompt's tokens
    min_p: float = 0.0  # tokens below this share of the most likely one's probability are cut; 0: off
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
        """Whether the request rules out certain tokens or sequences of them (engine/grammar/token_limits.py)."""
        return bool(self.allowed_token_ids or self.bad_words)


# ---- daemon -> engine -------------------------------------------------------------------------------------------------


class Configure(Message, frozen=True):
    """The first message to an engine, answered by EngineReady. num_chunks covers the device's whole budget; the leases leave memory
    for the weights and for the work space (work_space_bytes: the largest of the models known now)."""

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
    kernels: list[KernelSet] = []  # that registered models need, of their most common dtype first: compiled from the start
    test_disk_bytes_per_s: int = 0  # for tests: limit for reading weights from disk; 0: none
    test_copy_bytes_per_s: int = 0  # for tests: limit for copies between the host tier and the device; 0: none
    host_tier_slots: int = 0  # of chunk_bytes each, in a memfd that the daemon made and passes as --host-tier-fd; 0: no tier
    max_step_stretch: float = 2.0  # longest step with prompts, as a multiple of a step of its decoding sequences alone; 0: any


# LoadModel.speculator: the checkpoint's own predictor (multi-token prediction), and a head from other files
MTP, EAGLE3 = "mtp", "eagle3"


class Group(msgspec.Struct, frozen=True, array_like=True):
    """One device's share of a model that is split over several. rank: of this device among them; rank 0 decides what each step
    computes. members: the engines' numbers in the exchange memory, by rank. region_offset, region_bytes: the part of that memory
    which is the group's own until all its members have answered EvictModel. expert_parts, num_stages: as in
    loader.model_shape.Division. handed_bytes: as in engine.exchange.RegionSizes."""

    rank: int
    members: list[int]
    region_offset: int
    region_bytes: int
    expert_parts: int = 1
    num_stages: int = 1
    handed_bytes: int = 0


class LoadModel(Message, frozen=True):
    """Loads a checkpoint into the device. `lease_chunks` is the engine's KV lease once this model is in: before it allocates, the
    engine gives up blocks down to it (cached prefixes first, then sequences, by preemption with recompute).

    Slots are indices into the host tier; the daemon chooses them, and writes none while an engine uses them."""

    placement_id: int
    model: str
    path: str
    dtype: str  # float32 | bfloat16 | float16
    fingerprint: str
    weights_chunks: int
    kv_reserved_chunks: int  # this model may always hold that many chunks of KV
    lease_chunks: int
    max_model_len: int
    max_sequences: int
    eos_token_ids: list[int]
    quantize: str = ""  # the weight format (loader/formats) that the layers' matrices are held in; empty: plain
    source_slots: list[int] = []  # hold this model's weights, in order; empty: they are read from disk
    checksum: int = 0  # of the weights in source_slots, as LoadDone reported it; a copy that differs is not used
    keep_slots: list[int] = []  # to fill with the weights while they are read from disk; empty: no copy is kept
    kv_slots: list[int] = []  # hold KV that an eviction saved (Evicted.kv_slots_used)
    kv_index: bytes = b""  # what is in them (Evicted.kv_index); empty: nothing is restored
    kv_cache_dtype: str = ""  # fp8: dtype of keys and values; empty: that of the model
    speculator: str = "none"  # what drafts tokens: none, prompt-lookup, mtp or eagle3 (and prompt-lookup where these have nothing)
    head_path: str = ""  # the folder of an EAGLE-3 head, whose files are part of the fingerprint
    group: Group | None = None  # of a model that is split over devices, each of which gets a LoadModel; None: it is whole

    @property
    def predicts(self) -> bool:
        """Whether something is loaded beside the model that predicts further tokens."""
        return self.speculator in (MTP, EAGLE3)

    @property
    def kv_dtype(self) -> str:
        """The dtype in which keys and values are stored."""
        return kv_dtype_of(self.dtype, self.kv_cache_dtype)


class EvictModel(Message, frozen=True):
    """Frees a model's weights and KV at once, or withdraws its load; answered by Evicted when the memory is free. Its requests are
    dropped without a message, between two steps: the daemon keeps them and submits them again. Their KV (including the last,
    partial block), then cached prefixes, the most recently used first, are copied to save_slots as far as these reach. A request
    submitted after the load that restores them finds them by the prefix cache's keys."""

    placement_id: int
    model: str
    lease_chunks: int  # the KV lease after the eviction
    save_slots: list[int] = []  # slots of the host tier that may take the KV


class SetLease(Message, frozen=True):
    lease_chunks: int


class AdapterSource(msgspec.Struct, frozen=True, array_like=True):
    """A LoRA adapter's files. fingerprint: as loader.catalog.Checkpoint has it."""

    name: str
    path: str
    fingerprint: str


class Submit(Message, frozen=True):
    """A request, or a request again after its engine died: `output` is what the client has already received."""

    request_id: int
    model: str
    prompt: list[int]
    params: SamplingParams
    output: list[int] = []
    tenant: str = ""  # tenants never share prefix blocks
    cache_salt: str = ""  # requests of one tenant with different salts share none either
    priority: int = 0
    task: str = "generate"  # | EMBED, SCORE: answered by EmbeddingsOut; params are ignored
    weight: float = 1.0  # the model's share of the device
    tenant_weight: float = 1.0  # the tenant's share among those that want this model
    prediction: list[int] = []  # tokens that the output may repeat in parts; empty: none are known
    second_at: int = 0  # of a score: index of the first token of the second text's segment (token type 1); 0: there is one segment
    adapter: AdapterSource | None = None  # of the model; None: the request is for the model itself


class Abort(Message, frozen=True):
    """Drops these requests at once, wherever they are; unknown ids are ignored. Not answered."""

    request_ids: list[int]


class BringAdapter(Message, frozen=True):
    """Asks for an adapter in the device's memory before a request names it. Nothing happens where the model is not there, or where
    the adapter cannot be read or finds no room: requests for it are told why. Answered by AdapterLoaded if it was read."""

    model: str
    adapter: AdapterSource


class RetireAdapter(Message, frozen=True):
    """Drops an adapter from the device's memory, once the requests that run with it have ended. Not answered."""

    model: str
    adapter: AdapterSource


class Probe(Message, frozen=True):
    """Has the device compute a token that is known beforehand, between two steps; `Probed` answers."""

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
    """The last message of an engine that ends itself; its requests are submitted to the next one. kind: no_memory if the device
    could not give what Configure asks for, else fault."""

    kind: str
    error: str  # one line


class LoadProgress(Message, frozen=True):
    """Progress of a load, in bytes. bytes_total 0: the load waits for kernels, and its time does not run."""

    placement_id: int
    bytes_done: int
    bytes_total: int


class LoadStreams(Message, frozen=True):
    """Sent during a load: requests may be submitted and are computed layer by layer as the weights arrive. None of them gets a
    token before LoadDone; LoadFailed and Evicted drop them. Saved KV that is to be restored has been restored by then."""

    placement_id: int
    model: str


class LoadDone(Message, frozen=True):
    placement_id: int
    model: str
    seconds: float
    bytes_read: int  # from disk; 0 where the weights came from the host tier
    kept: bool = False  # a whole copy of the weights is in keep_slots, or in source_slots if those were used
    checksum: int = 0  # checksum of the kept copy
    copy_seconds: float = 0.0  # between the host tier and the device, weights and KV
    map_seconds: float = 0.0  # spent in mapping calls
    restored_kv_tokens: int = 0  # tokens whose KV was restored from kv_slots
    source_rejected: str = ""  # why source_slots were given but not used (the weights came from disk instead)
    read_as: str = ""  # which files were read and why, if some are packed
    kernels_seconds: float = 0.0  # part of `seconds`: spent on kernels alone, while no weights were read
    adopted: bool = False  # the weights were on the device already, left by an engine that died: nothing was read or copied


class KernelsTold(Message, frozen=True):
    """Progress of compiling kernels (once per machine), sent every second. Models are served without them meanwhile, more slowly,
    unless loads_wait."""

    kind: str  # what is being compiled, such as "bfloat16"; empty: nothing any more
    num_done: int
    num_units: int
    left_s: float  # estimate
    problem: str = ""  # why kernels are not in use though nothing is being compiled
    loads_wait: bool = False  # the load that needs them does not end before they are compiled


class WeightsHeld(Message, frozen=True):
    """Where a ready model's weights are. Nothing writes there until the daemon evicts the model, so the next engine, given the same
    memory, may take them over if their checksum is still `checksum`."""

    placement_id: int
    model: str
    fingerprint: str
    dtype: str
    quantize: str
    num_bytes: int
    chunks: list[int]  # chunks of the device, in the weights' order
    checksum: int  # computed as LoadModel.checksum


class LoadFailed(Message, frozen=True):
    placement_id: int
    model: str
    error: str  # names file and tensor
    permanent: bool  # True: the checkpoint is at fault, trying again is pointless until its files change


class Evicted(Message, frozen=True):
    placement_id: int
    model: str
    kv_index: bytes = b""  # for LoadModel: opaque to the daemon
    kv_slots_used: list[int] = []  # of save_slots, in order; the others are free again
    saved_kv_tokens: int = 0
    recompute_kv_tokens: int = 0  # of dropped requests: computed, but not saved
    copy_seconds: float = 0.0  # copying between the device and the host tier


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of some of a step's tokens, by the softmax of the model's own logits (before bias, penalties and
    temperature). Flat: token i belongs to request_ids[i] and has the next counts[i] alternatives, the most likely first. Several
    tokens of one request follow each other in their order."""

    request_ids: list[int]
    chosen: list[float]
    counts: list[int]
    top_ids: list[int]
    top: list[float]


class TokensOut(Message, frozen=True):
    """The tokens of one step of one model. `counts` is empty if every request got exactly one token, `finish` if none ended. `ids`
    includes the end id that stopped a sequence."""

    model: str
    step_id: int
    seconds: float  # device time of this step and of steps without a token since the model's last message
    request_ids: list[int]
    ids: list[int]
    counts: list[int] = []
    finish: list[int] = []
    # request id -> prompt tokens found in the prefix cache; only in the step in which a request got its first token
    cached: dict[int, int] = {}
    logprobs: TokenLogprobs | None = None  # of the requests that asked for them
    # request id -> [tokens whose KV was found, tokens computed again], for requests submitted with `output`; only in the step in
    # which they got their next token
    resumed: dict[int, tuple[int, int]] = {}
    steps: int = 1  # number of steps in `seconds`; 0 if a sequence ends without a step
    # tokens that were drafted for each request, if `counts` is not empty; all of a request's in `ids` but the last were among them
    drafted: list[int] = []


class EmbeddingsOut(Message, frozen=True):
    """The vectors or scores of one step: the answers that end Submits of task "embed" or "score". seconds: device time of `steps`
    steps, of which a decoder's earlier ones computed pieces of these or other texts."""

    model: str
    step_id: int
    seconds: float
    request_ids: list[int]
    values: list[bytes]  # float32, little-endian: one vector of norm 1 each, or one number
    steps: int = 1


class PromptLogprobs(Message, frozen=True):
    """Log-probabilities of the prompt's tokens from index `first` (>= 1) on, as many as `chosen` has, with `num_top` alternatives
    each. All are sent before the request's first token, in order, and again from the start if the request is computed again before
    that. ranks: for each, how many tokens were at least as likely; empty unless SamplingParams.prompt_ranks."""

    request_id: int
    first: int
    num_top: int
    chosen: list[float]
    top_ids: list[int]
    top: list[float]
    ranks: list[int]


class AdapterLoaded(Message, frozen=True):
    """A LoRA adapter is in the device's memory, and the requests that waited for it run. seconds: reading and copying it."""

    model: str
    adapter: str
    seconds: float
    num_bytes: int


class RequestFailed(Message, frozen=True):
    """The end of a request without an answer. code: nan_logits, no_work_space, too_long, unknown_model, unsupported_grammar,
    no_token_left, adapter_unusable, adapter_unavailable, no_adapter_room or internal."""

    request_id: int
    code: str
    error: str


class Probed(Message, frozen=True):
    """The answer to the `Probe` of the same number: the device has computed its token. A wrong token is a fault."""

    number: int


class Stats(Message, frozen=True):
    """The engine's state, sent on change, at most 4 times a second. `models`: name -> [kv_bytes, active, queued, cached_bytes]."""

    kv_chunks_used: int
    models: dict[str, list[int]]
    steps: int
    preemptions: int
    kv_moved_bytes: int = 0  # KV copied from chunk to chunk to free sparse chunks, since the engine's start
    adapters: dict[str, dict[str, int]] = {}  # model -> adapter in memory -> its bytes there, of models that have some


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
)

_encoder = msgspec.msgpack.Encoder()
_held_decoder = msgspec.msgpack.Decoder(list[WeightsHeld])
_length = struct.Struct("<I")


def encode(message: Message) -> bytes:
    """Returns one frame, length prefix included."""
    body = _encoder.encode(message)
    return _length.pack(len(body)) + body


def encode_held(weights: list[WeightsHeld]) -> bytes:
    """Returns the note that goes with the descriptors of a dead engine's memory (engine/memory/handles.py)."""
    return _encoder.encode(weights)


def decode_held(note: bytes) -> list[WeightsHeld]:
    """Returns the weights in such a note; none for an empty one. Raises msgspec.DecodeError."""
    return _held_decoder.decode(note) if note else []


class FrameReader:
    """Cuts a byte stream back into messages; the stream may be passed to `feed` in parts of any size."""

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
    """Writes the step in flight to shared memory (a memfd the daemon made), without a system call. `request_ids`: int64 array, cut
    at 4096; empty if nothing is left to run. The count is written last, so a reader never sees a half-written list."""
    _count.pack_into(journal, 0, 0)
    num = min(len(request_ids), 4096)
    if num:
        journal[4 : 4 + 8 * num] = request_ids[:num].tobytes()
        _count.pack_into(journal, 0, num)


def read_journal(journal: Any) -> tuple[int, ...]:
    """Returns the requests of the writer's last step; () if nothing was left to run when it died."""
    (num,) = _count.unpack_from(journal, 0)
    return struct.unpack_from(f"<{num}q", journal, 4)
