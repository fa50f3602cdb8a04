"""Makes the models and adapters that answer in the world of chaos, and lists the names by which clients ask for them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from loader.configs.hf_config import parse_config
from tests.chaos.clients import Request
from tests.e2e.adapters import make_adapter
from tests.e2e.checkpoints import make_model, write_weights

MODELS = ("ash", "oak", "elm")
PACKED = "fir"  # a model that is held packed
# Models that both devices hold together: of the first each has half of all matrices, of the second, a copy of WHOLE, half of the
# layers.
TENSOR, STAGES, WHOLE = "bay", "box", "elm"
SPLIT = (TENSOR, STAGES)
SPARE = "yew"  # a model that no client asks for
FILLERS = ("big-0", "big-1")  # models that take all chunks of a device, weights and reserved KV together
FAR = "far"  # a copy of the first model that is seen through a mount, for a while; an adapter lies in its folder
# Adapters that nobody touches, by the model in whose steps they run. The first lies in its base's folder.
RED, SAGE, BLUE = "ash/red", "sage", "oak-blue"
BASES = {RED: "ash", SAGE: "ash", BLUE: "oak"}
FIRST, SECOND = "first", "second"  # two versions of an adapter, in folders of their own outside the models folder
RUST = "rust"  # an adapter in the models folder whose files acts change; undisturbed it is the first version
GUEST = "team/guest"  # the name under which acts load a version from its folder
FAR_ADAPTER = f"{FAR}/slow"  # the first version, through the mount
HUNG = "ivy"  # the first version through a mount of its own, for a while
OTHER_NAMES = {f"ash:{RED}": RED, "ash:red": RED, f"ash:{SAGE}": SAGE, f"oak:{BLUE}": BLUE}
OF_RUST = (RUST, f"ash:{RUST}")
OF_GUEST = (GUEST, "ash:guest")
WEIGHTS_BYTES = 4 << 20
FILLER_BYTES = 10 << 20
# They have no KV but what they reserve: by default most of a device as small as these.
SPLIT_CONFIG = f"""
[models.{TENSOR}]
parallel = {{ tensor = 2 }}
kv_floor_tokens = 4096
[models.{STAGES}]
parallel = {{ pipeline = 2 }}
kv_floor_tokens = 4096
"""
# What its layers add is zero: in bfloat16 a text would depend on how many rows share a step, and on what is computed again.
PACKED_CONFIG = f"""
[models.{PACKED}]
dtype = "bfloat16"
resident = "packed"
"""


class Cast:
    """Those that a runner can serve. models: that may be loaded and evicted. names: what clients ask for. has_adapters: whether it
    takes adapters and packed weights. config: what the node's configuration says of them. asked: whose texts an undisturbed node is
    asked for, from which those of all others follow."""

    def __init__(self, runner: str) -> None:
        self.has_adapters = runner == "torch"
        self.models = (*MODELS, *SPLIT, PACKED) if self.has_adapters else (*MODELS, *SPLIT)
        self.config = SPLIT_CONFIG + (PACKED_CONFIG if self.has_adapters else "")
        self.adapters = tuple(BASES) if self.has_adapters else ()
        # Stages compute the bits that one device computes, and what a null model says depends on the request alone.
        self._copies = {STAGES: WHOLE} if self.has_adapters else dict.fromkeys(SPLIT, WHOLE)
        self.asked = (*(name for name in self.models if name not in self._copies), *self.adapters)
        self.names = (*self.models, *self.adapters, *OTHER_NAMES, *OF_RUST) if self.has_adapters else self.models

    def make(self, folder: Path) -> None:
        """Makes all folders: those of the models folder below folder / "models", the others beside it."""
        models = folder / "models"
        for at, name in enumerate((*MODELS, SPARE)):
            make_model(models / name, seed=at, weights_bytes=WEIGHTS_BYTES)
        for name, seed in ((TENSOR, 21), (STAGES, MODELS.index(WHOLE))):
            make_model(models / name, seed=seed, weights_bytes=WEIGHTS_BYTES)
        for at, name in enumerate(FILLERS):
            make_model(models / name, seed=10 + at, weights_bytes=FILLER_BYTES)
        make_model(folder / FAR, seed=0, weights_bytes=WEIGHTS_BYTES)
        if not self.has_adapters:
            return
        packed = make_model(models / PACKED, seed=20, weights_bytes=WEIGHTS_BYTES // 2, dtype="bfloat16")
        shape = parse_config((packed / "config.json").read_bytes())
        write_weights(packed / "model.safetensors", shape, seed=20, agreeing=True)
        for at, (name, base) in enumerate(BASES.items()):
            make_adapter(models / name, models / base, seed=30 + at, rank=2 + 3 * at)
        for at, name in enumerate((FIRST, SECOND)):
            make_adapter(version_folder(folder, name), models / MODELS[0], seed=40 + at)
        for path in (models / RUST, folder / FAR_ADAPTER, folder / HUNG):
            make_adapter(path, models / MODELS[0], seed=40)

    def expected(self, told: Mapping[Request, str]) -> dict[Request, str]:
        """Returns the texts of all requests. told: of those for models, adapters and versions by their own names."""
        same = {FAR: MODELS[0]} | self._copies
        if self.has_adapters:
            same |= OTHER_NAMES | dict.fromkeys((*OF_RUST, *OF_GUEST, FAR_ADAPTER, HUNG), FIRST)
        return dict(told) | {
            request._replace(model=name): text
            for name, model in same.items()
            for request, text in told.items()
            if request.model == model
        }

    def alike(self, told: Mapping[Request, str]) -> list[str]:
        """Returns which requests have the same text for a base and one of its adapters, or for two of these, in words: what such a
        request is told says nothing."""
        texts: dict[tuple[Request, str], str] = {}
        found = []
        for request, text in told.items():
            base = BASES.get(request.model, MODELS[0] if request.model in (FIRST, SECOND) else request.model)
            other = texts.setdefault((request._replace(model=base), text), request.model)
            if other != request.model:
                found.append(f"{request}: the same text as {other}: {text[:60]!r}")
        return found


def version_folder(folder: Path, version: str) -> Path:
    return folder / "versions" / version
