"""The list of endpoints: every Endpoint that this module imports is served, and documented in this order in
docs/reference/http.md."""

from __future__ import annotations

from daemon.api.endpoint import Endpoint
from daemon.api.endpoints.chat import CHAT
from daemon.api.endpoints.completions import COMPLETIONS
from daemon.api.endpoints.embeddings import EMBEDDINGS
from daemon.api.endpoints.health import HEALTH, HEALTHZ, PING, READYZ
from daemon.api.endpoints.lora_adapters import LOAD_ADAPTER, UNLOAD_ADAPTER
from daemon.api.endpoints.messages import COUNT_TOKENS, MESSAGES
from daemon.api.endpoints.models import MODEL, MODELS
from daemon.api.endpoints.node import LOAD, METRICS, NODE_VERSION
from daemon.api.endpoints.ollama import OLLAMA_CHAT, OLLAMA_GENERATE
from daemon.api.endpoints.ollama_embed import OLLAMA_EMBED, OLLAMA_EMBEDDINGS
from daemon.api.endpoints.ollama_models import OLLAMA_PS, OLLAMA_SHOW, OLLAMA_TAGS, OLLAMA_VERSION
from daemon.api.endpoints.page import PAGE, PAGE_EVENTS
from daemon.api.endpoints.rerank import RERANK
from daemon.api.endpoints.response_input_items import RESPONSE_INPUT_ITEMS
from daemon.api.endpoints.responses import RESPONSE, RESPONSE_CANCEL, RESPONSE_INPUT_TOKENS, RESPONSES
from daemon.api.endpoints.score import SCORE
from daemon.api.endpoints.tokenize import DETOKENIZE, TOKENIZE

ENDPOINTS = tuple(value for value in vars().values() if isinstance(value, Endpoint))
BODY_MODULES = tuple({endpoint.body.parse.__module__ for endpoint in ENDPOINTS if endpoint.body is not None})  # for text workers
