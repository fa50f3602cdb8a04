"""What config.json says about the matrices of a quantised checkpoint that are plain."""

from __future__ import annotations

import pytest

from loader.errors import CheckpointError
from loader.formats.left_plain import left_plain
from loader.shapes.config_fields import Fields


def test_names_expressions_and_parts() -> None:
    is_plain = left_plain(Fields({"ignore": ["lm_head", "re:.*self_attn.*"], "modules_to_not_convert": ["shared_experts"]}, "f"))
    assert is_plain("lm_head")
    assert is_plain("model.layers.3.self_attn.o_proj")
    assert is_plain("model.layers.3.mlp.shared_experts.up_proj")
    assert not is_plain("model.lm_head.0")
    assert not is_plain("model.layers.3.mlp.experts.7.up_proj")
    assert not left_plain(Fields({}, "f"))("lm_head")
    by_rules = left_plain(Fields({"dynamic": {"-:.*mlp.gate": {}, ".*self_attn.*": {"bits": 8}}}, "f"))
    assert by_rules("model.layers.3.mlp.gate")
    assert not by_rules("model.layers.3.self_attn.o_proj")


@pytest.mark.parametrize(
    ("value", "why"), [("lm_head", "not a list of names"), ([1], "not a list of names"), (["re:("], "is no regular expression")]
)
def test_lists_that_are_none_are_named(value: object, why: str) -> None:
    with pytest.raises(CheckpointError, match=rf"c\.json.*ignore.*{why}"):
        left_plain(Fields({"ignore": value}, "c.json"))
