"""Every message between the daemon and an engine: tagged msgspec Structs over a socketpair.

Framing: 4-byte little-endian length, then one msgpack body (`encode` / `FrameReader`). Up to one `TokensOut` a step goes up,
whatever the number of sequences, so what a token costs the host does not grow with the batch.
Everything is flat arrays of ints; no object per token.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import msgspec

from loader.kv_layout import kv_dtype_of

PROTOCOL_VERSION = 9

# How a sequence ended, as `TokensOut.finish` carries it. 0 is "goes on".
FINISH_NONE, FINISH_STOP, FINISH_LENGTH, FINISH_ABORT = 0, 1, 2, 3


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages; the tag is the class name."""


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """How one request picks its tokens. Stop strings stay in the daemon, which sees text; ids are matched in the engine."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    seed: int = 0  # always set by the daemon (drawn when the client gave none) so that a resubmission repeats itself
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: list[int] = []  # the request's own; the model's end ids come with LoadModel
    logprobs: int = -1  # -1: none; else number of alternatives beside the sampled token
    prompt_logprobs: int = -1  # the same of the prompt's tokens
    min_p: float = 0.0  # tokens below this share of the likeliest one's probability are cut; 0: off
    presence_penalty: float = 0.0  # over the output, as frequency_penalty
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output
    logit_bias: dict[int, float] = {}  # token id -> added to its logit
    grammar: str = ""  # the text must follow it: "json_schema:…", "regex:…" and so on (engine/grammar/compile.py)
    allowed_token_ids: list[int] = []  # no other may come; empty: any
    bad_words: list[list[int]] = []  # sequences of tokens none of which may come; each has at least one
    prompt_ranks: bool = False  # with prompt_logprobs

    @property
    def is_limited(self) -> bool:
        """Whether tokens are ruled out by name (engine/grammar/token_limits.py)."""
        return bool(self.allowed_token_ids or self.bad_words)


# ---- daemon -> engine -------------------------------------------------------------------------------------------------


class Configure(Message, frozen=True):
    """Always the first message; answered by EngineReady. num_chunks covers the device's whole budget; the leases keep room for
    the weights and for the work space (work_space_bytes: the largest of the models known now)."""

    device: str  # cpu:0
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
    dtypes: list[str] = []  # of the registered models, the commonest first: their kernels are compiled from the start on
    test_disk_bytes_per_s: int = 0  # weights come from disk no faster than that; 0: as fast as they can
    test_copy_bytes_per_s: int = 0  # nor do copies between the host tier and the device
    host_tier_slots: int = 0  # of chunk_bytes each, in a memfd that the daemon made and hands over as --host-tier-fd; 0: none
    max_step_stretch: float = 2.0  # a step that computes prompts too, against that of its decoding sequences; 0: any


class LoadModel(Message, frozen=True):
    """Brings a checkpoint into the device. `lease_chunks` is the engine's KV lease once this model is in: the engine gives
    up blocks (prefix cache first, then preemption by recompute) down to it before it allocates.

    Slots are indices into the host tier; the daemon says which, and writes none while an engine uses them."""

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
    quantize: str = ""  # int8: of the layers' matrices
    source_slots: list[int] = []  # hold this model's weights, in order; empty: they come from disk
    checksum: int = 0  # of the weights in source_slots, as LoadDone told it; a copy that differs is not used
    keep_slots: list[int] = []  # to fill with the weights while they come from disk; empty: no copy is kept
    kv_slots: list[int] = []  # hold KV that an eviction saved (Evicted.kv_slots_used)
    kv_index: bytes = b""  # what is in them (Evicted.kv_index); empty: nothing is taken back
    kv_cache_dtype: str = ""  # fp8: of keys and values; empty: dtype

    @property
    def kv_dtype(self) -> str:
        """What keys and values are kept in."""
        return kv_dtype_of(self.dtype, self.kv_cache_dtype)


class EvictModel(Message, frozen=True):
    """Frees a model's weights and KV at once, or withdraws its load; answered by Evicted when the memory is back. Requests still
    in it are dropped without a word, between two steps: the daemon keeps them and submits them again. Their KV (the last, partial
    block included), then kept prefixes, the most recently used first, are copied to save_slots as far as those reach. A request
    submitted after the load that takes them back finds it by the prefix cache's keys."""

    placement_id: int
    model: str
    lease_chunks: int  # the lease after it
    save_slots: list[int] = []  # of the host tier


class SetLease(Message, frozen=True):
    lease_chunks: int


class Submit(Message, frozen=True):
    """A request, or a request again after its engine died: `output` is what the client already has."""

    request_id: int
    model: str
    prompt: list[int]
    params: SamplingParams
    output: list[int] = []
    tenant: str = ""  # tenants never share prefix blocks
    cache_salt: str = ""  # nor do requests of one tenant with different salts
    priority: int = 0
    task: str = "generate"  # | embed: of encoders, answered by EmbeddingsOut; params are not looked at
    weight: float = 1.0  # share of the device between models
    tenant_weight: float = 1.0  # the tenant's share among those that want this model


class Abort(Message, frozen=True):
    """Forgets these requests at once, wherever they are; unknown ids are passed over. Not answered."""

    request_ids: list[int]


class Shutdown(Message, frozen=True):
    pass


# ---- engine -> daemon -------------------------------------------------------------------------------------------------


class EngineReady(Message, frozen=True):
    pid: int
    version: int
    num_chunks: int
    left: list[str] = []  # models whose weights an engine before this one has left on the device


class EngineFault(Message, frozen=True):
    """The last message of an engine that ends of itself: its requests are submitted to the next one. kind: no_memory, where the
    device could not give what Configure asks for; else fault."""

    kind: str
    error: str  # one line


class LoadProgress(Message, frozen=True):
    """bytes_total 0: the load waits until kernels have been looked for, and its time has not begun."""

    placement_id: int
    bytes_done: int
    bytes_total: int


class LoadStreams(Message, frozen=True):
    """Of a load under way: requests may be submitted, and are computed layer by layer as the weights come. None of them has a token
    before LoadDone; LoadFailed and Evicted forget them, as Evicted does. Where saved KV comes back, it is there by then."""

    placement_id: int
    model: str


class LoadDone(Message, frozen=True):
    placement_id: int
    model: str
    seconds: float
    bytes_read: int  # from disk; 0 where the weights came from the host tier
    kept: bool = False  # keep_slots, or source_slots that were used, hold a whole copy of the weights
    checksum: int = 0  # of the kept copy
    copy_seconds: float = 0.0  # between the host tier and the device, weights and KV
    map_seconds: float = 0.0  # spent in mapping calls
    restored_kv_tokens: int = 0  # tokens whose KV was taken back from kv_slots
    source_rejected: str = ""  # why source_slots were given but not used (the weights came from disk instead)
    read_as: str = ""  # which of its files were read and why, where some are packed
    kernels_seconds: float = 0.0  # of the seconds, spent waiting until kernels had been looked for
    adopted: bool = False  # the weights were on the device already, left by an engine that died: nothing was read or copied


class KernelsTold(Message, frozen=True):
    """How far kernels are compiled, once a machine; told every second meanwhile. Models are served without them, more slowly."""

    kind: str  # what is being compiled: "bfloat16"; empty: nothing is, any more
    num_done: int
    num_units: int
    left_s: float  # about
    problem: str = ""  # why kernels are not in use though nothing is being compiled


class WeightsHeld(Message, frozen=True):
    """Where a ready model's weights are. Nothing writes there until the model is told to leave, so the engine after this one, given
    the same memory, may take them over if they sum up to `checksum` still."""

    placement_id: int
    model: str
    fingerprint: str
    dtype: str
    quantize: str
    num_bytes: int
    chunks: list[int]  # of the device, in the weights' order
    checksum: int  # as LoadModel.checksum


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
    recompute_kv_tokens: int = 0  # of requests that were dropped: computed, but not saved
    copy_seconds: float = 0.0  # between the device and the host tier


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of some of a step's tokens, by the softmax of the model's own logits (before bias, penalties and
    temperature). Flat: token i belongs to request_ids[i], and counts[i] of the alternatives, likeliest first, are its."""

    request_ids: list[int]
    chosen: list[float]
    counts: list[int]
    top_ids: list[int]
    top: list[float]


class TokensOut(Message, frozen=True):
    """One step of one model. `counts` is empty when every request got exactly one token, `finish` when none ended. The end id that
    stopped a sequence is among `ids`."""

    model: str
    step_id: int
    seconds: float  # on the device: of this step and of those since the model's last message that gave no token
    request_ids: list[int]
    ids: list[int]
    counts: list[int] = []
    finish: list[int] = []
    # request id -> prompt tokens found in the prefix cache; only in the step in which a request got its first token
    cached: dict[int, int] = {}
    logprobs: TokenLogprobs | None = None  # of the rows that asked
    # request id -> [tokens whose KV was found, tokens computed again], of requests submitted with `output`; only in the step in
    # which they got their next token
    resumed: dict[int, tuple[int, int]] = {}
    steps: int = 1  # how many `seconds` are of; 0 where a sequence just ends


class EmbeddingsOut(Message, frozen=True):
    """What one step of an encoder came to: answers to Submits of task "embed", which have ended with it. seconds: device time."""

    model: str
    step_id: int
    seconds: float
    request_ids: list[int]
    values: list[bytes]  # of each: float32, little-endian, of length 1


class PromptLogprobs(Message, frozen=True):
    """Of the prompt's tokens from index `first` (>= 1) on, as many as `chosen` has; each has `num_top` alternatives. All of them
    come before the request's first token, in order; again from the start if the request is computed again before that. ranks: how
    many tokens were at least as likely as each; empty unless SamplingParams.prompt_ranks."""

    request_id: int
    first: int
    num_top: int
    chosen: list[float]
    top_ids: list[int]
    top: list[float]
    ranks: list[int]


class RequestFailed(Message, frozen=True):
    request_id: int
    code: str  # nan_logits | no_work_space | too_long | unknown_model | unsupported_grammar | no_token_left | internal
    error: str


class Stats(Message, frozen=True):
    """Sent when something changed, at most 4 times a second. `models`: name -> [kv_bytes, active, queued, cached_bytes]."""

    kv_chunks_used: int
    models: dict[str, list[int]]
    steps: int
    preemptions: int
    kv_moved_bytes: int = 0  # of KV, copied from chunk to chunk so that sparse chunks came free; since the engine's start


ToEngine = Configure | LoadModel | EvictModel | SetLease | Submit | Abort | Shutdown
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
    | RequestFailed
    | Stats
)

_encoder = msgspec.msgpack.Encoder()
_held_decoder = msgspec.msgpack.Decoder(list[WeightsHeld])
_length = struct.Struct("<I")


def encode(message: Message) -> bytes:
    """One frame, length prefix included."""
    body = _encoder.encode(message)
    return _length.pack(len(body)) + body


def encode_held(weights: list[WeightsHeld]) -> bytes:
    """What goes with the descriptors of a dead engine's memory (engine/memory/handles.py)."""
    return _encoder.encode(weights)


def decode_held(note: bytes) -> list[WeightsHeld]:
    """Raises msgspec.DecodeError."""
    return _held_decoder.decode(note) if note else []


class FrameReader:
    """Cuts a byte stream back into messages; `feed` may be given any split of it."""

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

PULSE_AT = 8 + 8 * 4096  # behind the requests: engine/pulse.py
JOURNAL_BYTES = PULSE_AT + 32
_count = struct.Struct("<I")


def write_journal(journal: Any, request_ids: Any) -> None:
    """Notes the step in flight in shared memory (a memfd the daemon made): no system call. `request_ids`: int64 array, or empty
    when nothing is left to run. The count is written last, so a reader never sees a half-written list."""
    _count.pack_into(journal, 0, 0)
    num = min(len(request_ids), 4096)
    if num:
        journal[4 : 4 + 8 * num] = request_ids[:num].tobytes()
        _count.pack_into(journal, 0, num)


def read_journal(journal: Any) -> tuple[int, ...]:
    """The requests of the writer's last step; () if nothing was left to run when it died."""
    (num,) = _count.unpack_from(journal, 0)
    return struct.unpack_from(f"<{num}q", journal, 4)
