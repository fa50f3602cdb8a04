"""Names the keys of config.json under which some families have factors that scale embeddings, attention scores or logits."""

from __future__ import annotations

from dataclasses import dataclass

from loader.shapes.config_fields import Fields


@dataclass(slots=True, frozen=True)
class Factors:
    """The keys of config.json that give a family's scaling factors; "": the family has no such factor. A factor is 1 if config.json
    leaves its key out.

    embeddings: factor of the embeddings. branches: factor of the outputs of attention and MLP.

    scores: factor of attention's scores, which replaces 1 / sqrt(head size). logits: factor of the logits; logits_default is its
    value if the key is absent. logits_divisor: divisor of the logits."""

    embeddings: str = ""
    branches: str = ""
    scores: str = ""
    logits: str = ""
    logits_default: float = 1.0
    logits_divisor: str = ""

    def logit_scale(self, fields: Fields) -> float:
        return factor(fields, self.logits, self.logits_default) / factor(fields, self.logits_divisor)


def factor(fields: Fields, key: str, default: float = 1.0) -> float:
    """Returns the factor that config.json has under `key`; `default` if config.json lacks the key or `key` is "". Raises
    CheckpointError if the value is not a positive number."""
    return fields.positive(key, default) if key else default
