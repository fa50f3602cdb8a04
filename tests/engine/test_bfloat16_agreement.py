"""How often a model in bfloat16 finds the same likeliest token as float32 does, beside how often transformers' does in bfloat16."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from engine.loading.runner import TorchRunner
from tests.engine.model_bench import CASES, logits_of, make_checkpoint, runner_with_kernels
from tests.engine.test_models_variants import VARIANTS

NUM_TOKENS = 120
SEEDS = (3, 4, 5, 6)
WORSE_BY = 0.02  # of all tokens: what hearthd may agree less often than transformers
OLMO3: dict[str, Any] = {"kind": "olmo3", "num_hidden_layers": 4, "sliding_window": 9, "pad_token_id": 0}
# of each kind of checkpoint the first case
FAMILIES = {case["kind"]: case for case in reversed([*CASES.values(), *VARIANTS.values(), OLMO3])}

runner = pytest.fixture(scope="module")(runner_with_kernels)


class Agreement(NamedTuple):
    """Tokens of texts. num_own and num_theirs of num_tokens are those at which hearthd's, and transformers', likeliest next token
    in bfloat16 is that of float32; num_unlike are those at which only one of the two is."""

    num_tokens: int
    num_own: int
    num_theirs: int
    num_unlike: int

    @property
    def chance(self) -> float:
        """By how many tokens num_own may be from num_theirs although both are equally good: four deviations. Each token of
        num_unlike is a sign that is drawn, but those of one text are not independent, because all layers behind read again what one
        has rounded: over 160 models of Gemma 4's kind the deviation was 1.5 times that of independent signs."""
        return 4 * 1.5 * math.sqrt(self.num_unlike)


def agreement(runner: TorchRunner, folder: Path, case: dict[str, Any], seed: int) -> Agreement:
    """Returns what is found of one random model with weights in bfloat16. Its random text is given, whatever the models find
    likely."""
    theirs = make_checkpoint(folder, dtype=torch.bfloat16, seed=seed, **case)
    text = np.random.default_rng(seed).integers(0, 211, NUM_TOKENS).tolist()
    own = logits_of(text, runner, folder, "bfloat16", steps=(NUM_TOKENS,)).argmax(-1)
    with torch.inference_mode():
        half = theirs(torch.tensor([text])).logits[0].float().numpy().argmax(-1)
        exact = copy.deepcopy(theirs).float()(torch.tensor([text])).logits[0].numpy().argmax(-1)
    is_own, is_theirs = own == exact, half == exact
    return Agreement(len(text), int(is_own.sum()), int(is_theirs.sum()), int((is_own != is_theirs).sum()))


def pooled(parts: Iterable[Agreement]) -> Agreement:
    return Agreement(*map(sum, zip(*parts, strict=True)))


@pytest.fixture(scope="module")
def found(runner: TorchRunner, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Agreement]:
    """Returns what is found of each family, over all seeds."""
    found = {}
    for kind, case in FAMILIES.items():
        found[kind] = pooled(agreement(runner, tmp_path_factory.mktemp(kind), case, seed) for seed in SEEDS)
    return found


def test_all_families_together_agree_with_float32_as_often_as_transformers(found: dict[str, Agreement]) -> None:
    """Checks the sum over so many tokens that chance makes less than WORSE_BY of them."""
    whole = pooled(found.values())
    assert whole.chance < WORSE_BY * whole.num_tokens, whole
    assert whole.num_own >= whole.num_theirs - WORSE_BY * whole.num_tokens, whole


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_family_agrees_with_float32_as_often_as_transformers(found: dict[str, Agreement], kind: str) -> None:
    """Checks one family, whose tokens are so few that chance must be allowed for."""
    assert found[kind].num_tokens == len(SEEDS) * NUM_TOKENS
    assert found[kind].num_own >= found[kind].num_theirs - WORSE_BY * found[kind].num_tokens - found[kind].chance, found[kind]
