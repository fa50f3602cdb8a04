"""All error codes that a client or `hearth` may meet, each with its meaning and what to do. Tests check that docs/reference/http.md
and docs/operations.md agree with this table, and the table with the code."""

from __future__ import annotations

# code -> (HTTP status, what it means, what to do)
CODES: dict[str, tuple[int, str, str]] = {
    # the caller's fault
    "invalid_json": (400, "the body is no JSON, or nested too deeply", "correct the body"),
    "invalid_body": (
        400,
        "the body ended early, its chunks are broken or its encoding is not read",
        "send it whole and uncompressed",
    ),
    "invalid_http": (400, "what was sent is no HTTP/1.1, or no HTTP; the message says where", "correct the client"),
    "invalid_request": (400, "a field has a value it may not have; `param` names it", "correct the field"),
    "unsupported_parameter": (400, "a field is known and not built, or not for this model; `param` names it", "leave it out"),
    "unsupported_grammar": (400, "a schema, regex or grammar cannot be followed; the message says which part", "simplify it"),
    "no_token_left": (
        400,
        "allowed_token_ids, bad_words and the grammar together rule out every token; the message says after how many",
        "allow an end token, too; or rule out less",
    ),
    "context_length_exceeded": (400, "prompt and output are longer than the model's max_model_len", "shorten; or raise it"),
    "previous_response_not_found": (
        400,
        "the response that previous_response_id names, or one that it follows, is not kept (any more)",
        "send the conversation as `input`; or raise stored_responses_bytes",
    ),
    "previous_response_not_completed": (
        400,
        "the response that previous_response_id names is still in the making, has failed or was cancelled",
        "wait for it; or send the conversation as `input`",
    ),
    "request_over_limit": (
        400,
        "the prompt alone has more tokens than the key's tenant may use in a minute, or a day; the message has the arithmetic",
        "send less; or raise tokens_per_minute or tokens_per_day in the keys file",
    ),
    "not_forwarded": (
        400,
        "another server answers for the model (`upstream`), and requests to this path are not passed on to it; the message says "
        "which are",
        "use a path that is named",
    ),
    "not_local": (
        400,
        "`hearth load` and so on: another server answers for the name (`upstream`), so there is nothing to load or pin here",
        "ask that server",
    ),
    "no_experts": (
        400,
        "the model is no mixture of experts, so there are no tokens of experts to count",
        "`hearth models` shows which models there are",
    ),
    "is_adapter": (
        400,
        "`hearth load` and so on: the name is a LoRA adapter's, which is no model of its own; the message names its base",
        "name the base",
    ),
    "wrong_task": (400, "embeddings, scores or text of a model that makes something else", "name another model"),
    "no_chat_template": (400, "the checkpoint has no chat template", "use completions, or set `chat_template` for the model"),
    "text_work_failed": (
        400,
        "the model's chat template or tokenizer took too long or too much memory with this text, or crashed; see the message",
        "shorten it; if short ones fail, too, the checkpoint's files are at fault: see `hearth status` and the log",
    ),
    "unsupported_tokenizer": (400, "the checkpoint's tokenizer is of a kind that is not served", "choose another checkpoint"),
    "model_unusable": (400, "the model's files or settings are of a kind that is not served", "see the message; `hearth doctor`"),
    "adapter_unusable": (
        400,
        "the LoRA adapter's files cannot be read, or do not fit the model; the message says why",
        "correct the files",
    ),
    "adapter_loaded": (
        400,
        "a LoRA adapter is to be loaded under a name under which one was loaded",
        "`load_inplace` true, or `hearth load --replace`, replaces it",
    ),
    "adapter_without_base": (
        400,
        "a LoRA adapter is to be loaded whose base is no model of this node; the message names it",
        "add the base, or name it with `base` in the adapter's settings",
    ),
    "adapter_in_folder": (
        400,
        "a LoRA adapter is to be unloaded that lies in the models folder and was not loaded",
        "`hearth rm` deletes it",
    ),
    "name_taken": (400, "a LoRA adapter is to be loaded under a name that something else has", "choose another name"),
    "model_too_large": (
        400,
        "the model can never be loaded here; the message has the arithmetic",
        "raise the device's budget, lower `max_model_len` or `kv_floor_tokens`, set `parallel`, or choose a smaller one",
    ),
    "invalid_api_key": (401, "no key, one that is in no keys file, or two different ones", "send `Authorization: Bearer KEY`"),
    "key_expired": (401, "the key's time, or its tenant's, is over (`expires` in the keys file)", "use a newer key"),
    "host_not_allowed": (403, "without keys: the Host header names no address of this machine", "use it, or set `allowed_hosts`"),
    "origin_not_allowed": (
        403,
        "a page of another site asked, in somebody's browser",
        "serve the page from the same origin, or set `allowed_origins`",
    ),
    "not_admin": (
        403,
        "this tells of all tenants, or changes what the node serves, and the key's tenant is no `admin`; without keys, the latter "
        "is for connections from the node's own machine",
        "use an admin's key",
    ),
    "permission_denied": (403, "a command over the status socket, or a socket one may not open", "join the group hearthd"),
    "not_found": (404, "no such path; `hearth why`: no such model or request", "see the paths above"),
    "response_not_found": (404, "no response of that id is kept for this key's tenant", "see stored_responses_bytes"),
    "model_not_found": (404, "no model of that name that this key may use", "see `GET /v1/models`, `hearth models`"),
    "adapter_not_found": (
        404,
        "the folder of a LoRA adapter that is to be loaded is not there, or not readable",
        "correct the path",
    ),
    "model_removed": (404, "the model's folder went while the request waited, or ran and others needed the room", "put it back"),
    "method_not_allowed": (405, "the path is there for another method; `Allow` names it", "use that"),
    "head_timeout": (408, "address and headers of a request were not in within 10 s", "send them at once"),
    "body_timeout": (408, "the body was not in within body_read_timeout_s", "send it faster, or raise the limit"),
    "body_too_large": (413, "the body is larger than max_body_bytes", "send less, or raise the limit"),
    "uri_too_long": (414, "the address of the request is longer than 32 KiB", "send less"),
    "unsupported_media_type": (415, "the body is compressed or not declared as JSON", "send plain application/json"),
    "headers_too_large": (431, "a header is longer than 32 KiB, or there are too many", "send less, smaller cookies perhaps"),
    "invalid_config": (400, "`hearth reload`: a file has an error, the old settings stay", "correct file, line and key it names"),
    # not now
    "queue_full": (429, "as many requests wait as may, for the model or of the tenant", "retry after Retry-After"),
    "rate_limit_exceeded": (
        429,
        "the key's tenant has used what requests_per_minute, tokens_per_minute or tokens_per_day allows; the message says which",
        "retry after Retry-After; `hearth keys`",
    ),
    "too_many_connections": (
        429,
        "the client's address has max_connections_per_address connections open",
        "close some or use them again; behind a proxy set the key to 0",
    ),
    "wait_exceeded": (503, "the request waited max_wait_s and its model's turn did not come", "retry; `hearth why MODEL`"),
    "request_timeout": (503, "the request was not done within request_timeout_s", "ask for fewer tokens, or raise it"),
    "load_timeout": (503, "the model's load took longer than its deadline", "`hearth why MODEL`; set load_deadline_s"),
    "would_not_fit": (503, "room cannot be made: what is loaded is pinned or busy", "unpin something, or retry"),
    "adapter_unavailable": (
        503,
        "the LoRA adapter's files changed just now, are incomplete, or do not answer; the message says which",
        "finish copying them, and retry",
    ),
    "no_adapter_room": (
        503,
        "the LoRA adapter finds no room in the device's memory beside the models that are loaded; the message has the arithmetic",
        "retry; unload a model, raise the device's budget, or lower `max_model_len`",
    ),
    "model_incomplete": (503, "files of the model are missing; the message names one", "finish copying them"),
    "model_failed": (503, "the last load failed; the message says why", "correct the files, then `hearth load MODEL`"),
    "model_disabled": (503, "an operator switched the model off", "`hearth enable MODEL`"),
    "model_draining": (503, "an operator drains the model", "`hearth resume MODEL`"),
    "node_draining": (503, "an operator drains the node", "retry; `hearth resume`"),
    "server_restarting": (503, "hearthd is stopping: the request came too late, or did not end in time", "send it again"),
    "unloaded": (503, "an operator unloaded the model while the request ran", "send it again"),
    "not_kept": (409, "`hearth unload --to warm`: no copy of its weights is kept", "leave out --to, or set host_tier_bytes"),
    "overloaded": (
        503,
        "hearthd has no open files left for this connection or request",
        "retry after Retry-After; raise LimitNOFILE= or `ulimit -n`, or close idle connections",
    ),
    "text_worker_ended": (
        503,
        "the process that does the model's texts was killed, ends each time, or waited too long for the model's files; the message "
        "says which",
        "retry after Retry-After; `hearth status` and the log say why",
    ),
    "upstream_unavailable": (
        503,
        "the server that answers for the model cannot be reached, or broke the connection off; the message says which and why",
        "retry after Retry-After; `hearth why MODEL`",
    ),
    "busy": (503, "the same command for the same model is under way", "wait for it"),
    "too_many_viewers": (503, "as many status pages are open as may", "close one"),
    "too_many_followers": (
        503,
        "as many clients follow the events on this socket as may",
        "end one, or look back without --follow",
    ),
    # ours
    "crashed_twice": (500, "the engine died twice with this request in it", "do not resend; tell the developers"),
    "model_changed": (500, "hearthd restarted during the request, and its name leads to another model now", "send it again"),
    "aborted": (500, "the engine ended this request", "see the log for the request's id"),
    "upstream_error": (
        500,
        "the server that answers for the model refused or failed, with any status, and gave no code; the message is its own",
        "see that server's log, by the request's id",
    ),
    "upstream_invalid": (
        502,
        "the server that answers for the model sent no answer of the OpenAI API; the message says what is wrong with it",
        "check `upstream` in the model's settings",
    ),
    "upstream_denied": (
        502,
        "the server that answers for the model does not accept this node's key",
        "correct the file in `upstream_key_file`; `hearth reload`",
    ),
    "upstream_loop": (508, "`upstream` of some model's settings leads back to a node that had the request", "correct it"),
    "state_not_saved": (
        507,
        "pin, unpin, enable or disable took effect and could not be saved: `saved` is false in its result",
        "make room in `state_dir` or correct it; `hearth status` shows the error until it is saved",
    ),
    "internal": (500, "a fault of hearthd", "see the log for the request's id"),
    "internal_error": (500, "a fault of hearthd", "see the log for the request's id"),
}
