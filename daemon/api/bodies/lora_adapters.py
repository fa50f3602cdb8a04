"""The bodies of /v1/load_lora_adapter and /v1/unload_lora_adapter, in vLLM's form."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Raw, Struct

from daemon.api.bodies.decode import decode
from daemon.api.bodies.unsupported import neutral, refuse_unsupported


class LoadAdapterBody(Struct):
    lora_name: str
    lora_path: str
    load_inplace: bool = False
    is_3d_lora_weight: Annotated[Raw, neutral("false")] = Raw()


class UnloadAdapterBody(Struct):
    lora_name: str
    lora_int_id: int | None = None


LOAD_MEANINGS = {
    "lora_name": "by which requests name it: no name, alias or further name of another model",
    "lora_path": "absolute path of a folder on the node's machine, with `adapter_config.json` and `adapter_model.safetensors`",
    "load_inplace": "true replaces an adapter that was loaded under this name; else that is an error",
}
UNLOAD_MEANINGS = {
    "lora_name": "of an adapter that was loaded so",
    "lora_int_id": "read and not used",
}


class AdapterHead(Struct, array_like=True):
    """The fields of a body that loads or unloads an adapter. model: the adapter's name. path: the folder of its files, "" in a body
    that unloads it. in_place: whether it may replace a loaded adapter of that name."""

    model: str | None
    path: str = ""
    in_place: bool = False


_load = msgspec.json.Decoder(LoadAdapterBody)
_unload = msgspec.json.Decoder(UnloadAdapterBody)


def parse_load(body: bytes) -> tuple[AdapterHead, bytes]:
    """Parses a body. Returns its fields, and b"", because nothing is left for a text worker. Raises BadRequest (400) naming the
    field."""
    fields: LoadAdapterBody = decode(_load, body, "")
    refuse_unsupported(fields)
    return AdapterHead(fields.lora_name, fields.lora_path, fields.load_inplace), b""


def parse_unload(body: bytes) -> tuple[AdapterHead, bytes]:
    """Parses a body. Returns its fields, and b"", because nothing is left for a text worker. Raises BadRequest (400) naming the
    field."""
    fields: UnloadAdapterBody = decode(_unload, body, "")
    return AdapterHead(fields.lora_name), b""
