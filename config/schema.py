"""Defines every setting of the node, with its default, its unit and whether a reload applies it. docs/reference/config.md is
generated from this file.

The node's keys are one flat table, and each model has a table of its own (`[models."org/name"]`). The name of a duration ends in
`_s` or `_ms`, that of a size in `_bytes` (a size is written as a number or as "512MiB").
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from config import device_names

LIVE, RESTART = "live", "restart"


def key(description: str, unit: str = "", reload: str = RESTART) -> msgspec.Meta:
    return msgspec.Meta(description=description, extra={"unit": unit, "reload": reload})


class DeviceBudget(msgspec.Struct, frozen=True):
    """A device with its memory budget (`--device NAME=BUDGET`), or a carve-out: the part of a device that is set aside for an
    isolated model. Each has its own memory accounting and its own engine.

    name: `cpu:0`; `cpu:0@b` for a device that the host b lends; `cpu:0/org/name` for a carve-out. budget_bytes: for weights, KV and
    work space together. uuid: identifies the GPU of this machine on which the device or carve-out is; "" if there is none. model:
    the isolated model of a carve-out; "" for a device. whole_bytes: for a carve-out, the budget of the device before the division;
    0 for a device."""

    name: str
    budget_bytes: int
    uuid: str = ""
    model: str = ""
    whole_bytes: int = 0

    @property
    def host(self) -> str:
        """Returns the name of the host that lends the device; "" for a device of this machine."""
        return device_names.host_of(self.name)

    @property
    def hardware(self) -> str:
        """Returns the name that the device has on its own machine: `cpu:0` for `cpu:0@b`, which the host b lends, and for
        `cpu:0/MODEL`, the carve-out of an isolated model."""
        return device_names.hardware_of(self.name)

    @property
    def kind(self) -> str:
        return device_names.kind_of(self.name)

    def is_local(self, kind: str) -> bool:
        """Returns whether the device is of the given kind (cpu or cuda) and belongs to this machine. Only such devices use this
        machine's memory, cores or GPUs."""
        return device_names.is_local(self.name, kind)


class SamplingDefaults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The sampling settings of a model that apply where a request gives none. They override the checkpoint's
    generation_config.json. A field that is None leaves that file's value in force."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None


class ParallelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The division of a model among devices, from the key `parallel` of its table.

    pipeline: the number of stages into which the layers are divided; each stage has tensor * expert devices. tensor: the number of
    devices among which each matrix of a layer is divided. expert: the number of parts into which the experts of a layer are
    divided, whole experts each; all other matrices are divided among all devices of the stage. If all are 1, the model is not
    split."""

    tensor: int = 1
    expert: int = 1
    pipeline: int = 1

    @property
    def num_devices(self) -> int:
        return self.tensor * self.expert * self.pipeline


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of one model, from its table `[models."org/name"]`."""

    aliases: Annotated[list[str], key("other names requests may use", reload=LIVE)] = []
    max_model_len: Annotated[
        int | None,
        key(
            "longest prompt + output; default: the checkpoint's, or what 25 % of the device holds as KV (at least 2048)",
            "tokens",
        ),
    ] = None
    max_sequences: Annotated[int, key("sequences in one batch", "sequences")] = 256
    max_queued: Annotated[int | None, key("requests that may wait; default: max_queued_per_model", "requests", LIVE)] = None
    kv_floor_tokens: Annotated[
        int | None,
        key(
            "KV always kept for it; default: one request of max_model_len. A model that is split over devices (parallel) has no "
            "other KV; its default is what a quarter of the memory beside its weights and work space holds, at least one request "
            "of max_model_len and at most max_sequences of them",
            "tokens",
        ),
    ] = None
    priority: Annotated[float, key("factor on its value when victims are chosen, and on its turn", reload=LIVE)] = 1.0
    keep_alive: Annotated[
        float | str,
        key(
            'how long it stays on its device after its last request: seconds, "10m", "1h30m"; 0: it leaves as soon as it is idle; '
            '"forever" or -1: until its memory is needed. A pinned model always stays, and so does one that `hearth load` loaded, '
            "until it was requested. Requests over Ollama's API may set another value for as long as it stays",
            reload=LIVE,
        ),
    ] = "forever"
    pinned: Annotated[bool, key("loaded at start, never evicted", reload=LIVE)] = False
    warm: Annotated[
        str | list[str] | None,
        key(
            'when it is loaded ahead of its requests: a time of day such as "08:00" (the host\'s local time), "start", or a list '
            "of those; only if no model has to leave for it that is used. It may be evicted like any other afterwards",
            reload=LIVE,
        ),
    ] = None
    devices: Annotated[list[str], key("devices it may live on; empty: any", reload=LIVE)] = []
    parallel: Annotated[
        ParallelConfig | Literal["auto"] | None,
        key(
            "{ tensor = 2 }: the model is split over two devices, each of which holds a share of every layer and computes it for "
            "each token; { expert = 2 }: each of them has half of the experts of a layer, in place of half of each; "
            "{ pipeline = 2 }: each of them has half of the layers, and steps of different requests are in both at the same time; "
            "several of these: over as many devices as their product, all of one kind. Each stage is on one host, the last one on "
            "this. Decoders; not with isolate or a speculator that predicts. "
            '"auto": it is whole where a device holds it, with one request of max_model_len, else split over the fewest devices '
            "that do (docs/operations.md)"
        ),
    ] = None
    expert_copies: Annotated[
        int,
        key(
            "with parallel = { expert = N }: the most further experts that each device holds in each layer, copies of those that "
            "most tokens are routed to. They are chosen before the model loads, by what it has computed since hearthd started, and "
            "taken only if memory is free for them on all its devices (docs/operations.md)",
            reload=LIVE,
        ),
    ] = 0
    replicas: Annotated[
        int | Literal["auto"],
        key(
            "on how many devices it may be at once, whole on each (with parallel: on how many groups of devices). A request goes "
            "to the replica that has its prompt cached, or least to do. A number: further replicas are loaded as soon as the model "
            'is requested; "auto": another one when 8 requests run on each. They take free memory only, and leave first when '
            "memory is wanted; not with isolate (docs/operations.md)",
            reload=LIVE,
        ),
    ] = 1
    isolate: Annotated[
        bool, key("an engine process of its own, with a fixed part of its device's budget, set aside from start to stop")
    ] = False
    isolate_bytes: Annotated[
        int | str | None,
        key(
            "that part; default: what its weights, work space and reserved KV (kv_floor_tokens) take, by its files at start",
            "bytes",
        ),
    ] = None
    dtype: Annotated[str | None, key("auto, float32, bfloat16 or float16; default: the node's dtype")] = None
    quantize: Annotated[
        str | None,
        key(
            "int8, or none (the default): with int8 the layers' matrices are rounded to 8 bits at load, one scale an output: half "
            "the memory of bfloat16 and half to read for each token, hence faster at 1 to 4 sequences, and with AMX up to 32; "
            "prompts are no faster, nor models of a few MB (measured on cpu devices); not for encoders, nor for experts "
            "that the checkpoint holds in one tensor"
        ),
    ] = None
    resident: Annotated[
        str,
        key(
            "plain or packed: with packed the matrices stay in memory in a lossless form of 0.72 of their bytes, which is decoded "
            "where they are used. The model answers the same. On processors with AVX512-BF16 and AVX512-VBMI2 it is faster at 1 to "
            "4 sequences, elsewhere slower; prompts and larger batches are slower everywhere (docs/performance.md). For bfloat16 "
            "models on cpu devices; not with quantize, for encoders or mixtures of experts"
        ),
    ] = "plain"
    kv_cache_dtype: Annotated[
        str,
        key(
            "auto (the model's dtype) or fp8: with fp8 keys and values are kept as float8_e4m3 with a scale for each token and "
            "head, so the same memory holds nearly twice the tokens, at some cost in quality (docs/gpu.md); on cuda devices of "
            "compute capability 8.9 and later, not for encoders"
        ),
    ] = "auto"
    speculator: Annotated[
        str,
        key(
            "what guesses the next tokens, which are then computed in one step and kept as far as the model agrees: the name of an "
            "EAGLE-3 head in the models folder, mtp (a layer that checkpoints of some families hold for it), prompt-lookup (what "
            "followed the last tokens where they stood before in the request), none, or auto (a head in the model's folder or made "
            "for a model of its name, or else mtp, both on cpu devices alone, or else prompt-lookup; models that keep states have "
            "none); a guess is made where it pays"
        ),
    ] = "auto"
    sampling: Annotated[SamplingDefaults, key("defaults where a request names none", reload=LIVE)] = SamplingDefaults()
    chat_template: Annotated[
        str | None,
        key(
            "a Jinja file, or a template's text, used instead of the checkpoint's; new requests use it as soon as it changes",
            reload=LIVE,
        ),
    ] = None
    tool_parser: Annotated[
        str | None,
        key(
            "how it writes tool calls: command, deepseek_v3, deepseek_v31, gemma4, glm45, glm47, granite, harmony, hermes, "
            "kimi_k2, llama3, llama4_json, llama4_pythonic, mistral, qwen3_coder, seed_oss or none; default: told by the template",
            reload=LIVE,
        ),
    ] = None
    reasoning_parser: Annotated[
        str | None,
        key(
            "what becomes reasoning_content: think, `<think>…</think>`; command, gemma4, mistral and seed_oss, what these write in "
            "its place; harmony, gpt-oss's analysis; or none; default: told by the template",
            reload=LIVE,
        ),
    ] = None
    base: Annotated[
        str | None,
        key(
            "of a LoRA adapter: the model that it is for, by name or alias; default: by its adapter_config.json. Of the keys above "
            "an adapter has aliases alone (docs/reference/models.md)",
            reload=LIVE,
        ),
    ] = None
    upstream: Annotated[
        str | None,
        key(
            'another server of the OpenAI API that answers for this name, as in "http://gpu2:8000/v1"; nothing of it is loaded '
            "here, and of the keys above only aliases, max_sequences (requests there at once) and max_queued go with it "
            "(docs/reference/upstream.md)",
            reload=LIVE,
        ),
    ] = None
    upstream_model: Annotated[str | None, key("the model's name on that server; default: the same", reload=LIVE)] = None
    upstream_key_file: Annotated[
        str | None,
        key("the key for that server: a file with nothing else in it, or credential:NAME given by systemd", reload=LIVE),
    ] = None


class HostConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Another host that lends devices to this one, from its table `[hosts.NAME]`."""

    address: Annotated[str, key("where `hearth lend` listens on that host, as HOST:PORT")]
    key_file: Annotated[
        str, key("the secret that both hosts share: a file with nothing else in it, or credential:NAME given by systemd")
    ]


class TracesConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The destination and the settings of traces, from the table `[traces]`."""

    endpoint: Annotated[
        str,
        key(
            "the collector: http(s)://HOST:PORT, to which /v1/traces is added, or a URL with its whole path; or unix:/PATH, a "
            'socket; "": no traces',
            reload=LIVE,
        ),
    ] = ""
    headers: Annotated[dict[str, str], key("headers of what is sent there; `hearth config` hides their values", reload=LIVE)] = {}
    headers_file: Annotated[
        str,
        key(
            "more of them, those that are secret: a file with a line NAME: VALUE for each, or credential:NAME given by systemd; "
            "read again at each reload",
            reload=LIVE,
        ),
    ] = ""
    sample: Annotated[
        float,
        key(
            "share of the requests that are traced, from 0 to 1; for a request with a traceparent its sampled flag decides",
            reload=LIVE,
        ),
    ] = 1.0
    service_name: Annotated[str, key("service.name of the traces", reload=LIVE)] = "hearthd"
    resource_attributes: Annotated[
        dict[str, str], key("what else the traces say of this node, such as deployment.environment.name", reload=LIVE)
    ] = {}


class NodeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of the whole node. Flags override the TOML file."""

    models_dir: Annotated[str, key("folder whose subfolders are models (flag --models)")] = ""
    listen: Annotated[str, key("HTTP address, HOST:PORT; port 0 picks a free one")] = "127.0.0.1:8000"
    control: Annotated[str, key("control socket; default: /run/hearthd/control.sock as a service, else below $XDG_RUNTIME_DIR")] = (
        ""
    )
    status_socket: Annotated[
        str, key("a second control socket, open to everybody, for reading only; default: /run/hearthd/status.sock as a service")
    ] = ""
    keys_file: Annotated[
        str,
        key("who may use the node: a TOML file, or credential:NAME given by systemd; its content is read again at each reload"),
    ] = ""
    insecure: Annotated[bool, key("listen beyond this machine though no keys_file is set: anybody there may use the node")] = False
    admin_listen: Annotated[str, key("HOST:PORT of a second listener for /metrics, which leaves the first one, and health")] = ""
    tls_certificate: Annotated[
        str,
        key(
            "listen speaks TLS with this certificate, and so does admin_listen beyond this machine: a PEM file that holds it and "
            "then those it was issued by (certbot's fullchain.pem), or credential:NAME given by systemd; the file is read again as "
            'it changes; "": HTTP without TLS; from or to "" it needs a restart',
            reload=LIVE,
        ),
    ] = ""
    tls_key: Annotated[str, key("its private key: a PEM file without passphrase, or credential:NAME", reload=LIVE)] = ""
    tls_min_version: Annotated[str, key("oldest version of TLS that is spoken: 1.2 or 1.3", reload=LIVE)] = "1.2"
    tls_client_ca: Annotated[
        str,
        key(
            "PEM file of certificates, or credential:NAME; a client must show a certificate that one of them has issued (mutual "
            'TLS), besides its key; "": none is asked for',
            reload=LIVE,
        ),
    ] = ""
    allowed_hosts: Annotated[
        list[str], key("names in the Host header, beside listen's own, that are served while no keys are set", reload=LIVE)
    ] = []
    allowed_origins: Annotated[
        list[str],
        key(
            "other sites whose pages may use the API from a browser (CORS), as scheme://host[:port]; "
            '["*"]: all of them, which without keys hands the models to every page that somebody here opens',
            reload=LIVE,
        ),
    ] = []
    device: Annotated[
        list[str],
        key(
            "NAME=BUDGET, one entry a device: cpu=512MiB, cpu:1=25%, cuda:0=70GiB, cuda:GPU-3f1a (by UUID); "
            "a cuda device's budget is all of its memory but 1.5 GiB if none is given. cuda:1@b=70GiB is a device that the host b "
            "lends (see hosts), with a budget in bytes; only stages of pipelines live on it"
        ),
    ] = []
    dtype: Annotated[
        str, key("auto (the checkpoint's; bfloat16 for float16 on a node of cpu devices), float32, bfloat16 or float16")
    ] = "auto"
    state_dir: Annotated[
        str,
        key(
            "where pins, switched-off models and the tokens that tenants used today are kept, of one hearthd alone; default: "
            "$XDG_STATE_HOME/hearthd"
        ),
    ] = ""
    cache_dir: Annotated[str, key("compiled kernels; default: $XDG_CACHE_HOME/hearthd")] = ""
    log_level: Annotated[str, key("debug, info, warning or error", reload=LIVE)] = "info"
    log_format: Annotated[str, key("text, json, journal (text with a priority), or auto: journal where stderr is the journal")] = (
        "auto"
    )
    audit_log: Annotated[
        str,
        key(
            "a file for who did what (commands, reloads, refused keys, refused limits), a JSON object a line; log or journal: in "
            'hearthd\'s own log; "": none; opened anew at each reload and SIGHUP',
            reload=LIVE,
        ),
    ] = ""
    audit_requests: Annotated[
        bool,
        key(
            "each request to a model is written to audit_log, too: whose, which model, how many tokens; never its text", reload=LIVE
        ),
    ] = False

    max_num_batched_tokens: Annotated[
        int, key("tokens in one step; sizes each device's work space; with a cuda device 4096 if not set", "tokens")
    ] = 512
    block_tokens: Annotated[int, key("tokens in one KV block", "tokens")] = 16
    chunk_bytes: Annotated[int | str, key("unit of the devices' memory pools; with a cuda device 16MiB if not set", "bytes")] = (
        "2MiB"
    )
    host_tier_bytes: Annotated[
        int | str | None,
        key(
            "host memory where weights stay when their model leaves its device, and KV is saved: a size or a share such as 25%; "
            "0: none; default: none with cpu devices alone, else 50%",
            "bytes",
        ),
    ] = None
    adopt_weights: Annotated[
        bool | None,
        key(
            "when an engine dies, the next one takes over the weights on the device as they are, with nothing read or copied; the "
            "daemon holds the device's memory meanwhile; default: on GPUs"
        ),
    ] = None
    preempt_after_s: Annotated[
        float,
        key(
            "a busy model that has to make room may finish what runs for so long at least before it is paused, and until the work "
            "it leaves for is overdue by half of what the pause costs",
            "s",
            LIVE,
        ),
    ] = 1.0
    turn_budget_ms: Annotated[
        float,
        key(
            "device time a model may take before another busy one has its turn; while several are busy it bounds batch and chunk, "
            "and those with more to do pool their turns; with a cuda device 5 if not set",
            "ms",
        ),
    ] = 10.0
    max_step_stretch: Annotated[
        float,
        key(
            "a step with a prompt's chunk may take so many times the step of its decoding sequences alone; 0: any; else at least 1"
        ),
    ] = 2.0
    threads: Annotated[
        int, key("compute threads of each cpu engine; 0: the machine's cores, shared out equally among the cpu engines", "threads")
    ] = 0
    runner: Annotated[str, key("torch, or null: produces tokens without a model, to measure and test the serving path")] = "torch"
    loop_watch_ms: Annotated[float, key("how often the event loop's watch looks while requests are open", "ms")] = 5.0
    null_step_ms: Annotated[float, key("how long one step of the null runner takes", "ms")] = 10.0

    test_disk_bytes_per_s: Annotated[
        int, key("for tests and benchmarks: weights come from disk no faster; 0: as fast as they can", "bytes per second")
    ] = 0
    test_copy_bytes_per_s: Annotated[
        int, key("for tests and benchmarks: copies between host memory and a device are no faster", "bytes per second")
    ] = 0

    load_deadline_s: Annotated[float | None, key("a load may take; default max(20, 4 x predicted)", "s", LIVE)] = None
    overdue_after_s: Annotated[
        float, key("requests that have waited so long and the seconds of their model's load go first, by age", "s", LIVE)
    ] = 10.0
    max_wait_s: Annotated[float, key("longest wait before the first token's turn; then 503", "s", LIVE)] = 60.0
    engine_stall_s: Annotated[
        float,
        key(
            "an engine that gives no sign of life for so long is killed, and its requests go on in a new one; a step may take 8 "
            "times what it usually does, the first ones of a size 10 times this; at least 10, or 0: none is",
            "s",
            LIVE,
        ),
    ] = 30.0
    text_stall_s: Annotated[
        float,
        key(
            "the work on a request's text (chat template, tokens) may take so long, and 1 s more for every 256 KiB; then its "
            "process is killed and the request refused; at least 10, or 0: no limit",
            "s",
            LIVE,
        ),
    ] = 30.0
    request_timeout_s: Annotated[float, key("longest life of one request", "s", LIVE)] = 600.0
    body_read_timeout_s: Annotated[float, key("a request's body must be in by then", "s", LIVE)] = 10.0
    max_body_bytes: Annotated[int | str, key("largest request body", "bytes")] = "16MiB"
    stored_responses_bytes: Annotated[
        int | str,
        key(
            "memory for the responses of /v1/responses, which later ones follow by previous_response_id or which were made in the "
            "background; the oldest make room, and a stop forgets them; 0: none are kept",
            "bytes",
        ),
    ] = "64MiB"
    max_queued_per_model: Annotated[
        int,
        key(
            "requests that may wait for one model; of those that make several sequences each one counts, and all come in together",
            "requests",
            LIVE,
        ),
    ] = 256
    max_queued_per_tenant: Annotated[
        int, key("of them, requests of one tenant; 0: half of them while a keys_file is set", "requests", LIVE)
    ] = 0
    max_connections_per_address: Annotated[
        int,
        key(
            "connections that one client may have open to `listen`, by its address (IPv6: its /64 network); more are answered 429; "
            "0: any number, as behind a proxy, whose address all clients have",
            "connections",
            LIVE,
        ),
    ] = 1024
    drain_timeout_s: Annotated[
        float,
        key(
            "SIGTERM: running requests may take that long; a restart by systemd need not wait. A model whose folder is gone: its "
            "running requests may, before overdue work ends them",
            "s",
            LIVE,
        ),
    ] = 30.0
    sse_comment_every_s: Annotated[float, key("a comment keeps a silent stream open", "s", LIVE)] = 5.0

    names: Annotated[
        dict[str, list[str]],
        key(
            "a table of further names for requests: a name or a pattern with * and ?, and the model it leads to, or several, of "
            'which the first that can serve is taken; "*" is the default of unknown names (docs/reference/names.md)',
            reload=LIVE,
        ),
    ] = {}
    traces: Annotated[
        TracesConfig, key("a table: where traces of requests go (OpenTelemetry), see below; default: nowhere", reload=LIVE)
    ] = TracesConfig()
    hosts: Annotated[dict[str, HostConfig], key("a table for each host that lends devices to this one, see below")] = {}
    models: Annotated[dict[str, ModelConfig], key("per model, see below")] = {}
