"""A layer of a dense Llama launches ten kernels in a step that decodes, nine where decode attention joins its own pieces,
and eight where also the product of gate and up has its activation in it. All of hearthd's overlap where kernels are to."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("triton")

from tests.engine.not_interpreted import output_of


def test_a_layer_launches_no_more_than_docs_gpu_says() -> None:
    two_kernels, joining, gated, overlapping = map(json.loads, output_of("tests.engine.kernels.layer_launches").splitlines())
    ours = {"_norm_kernel": 2, "_rope_and_store_kernel": 1, "_piece_kernel": 1, "_gate_kernel": 1}
    assert joining == ours | {"product": 4}
    assert two_kernels == joining | {"_combine_kernel": 1}
    activation = {"_gate_kernel": 1, "product": 4}
    assert gated == {name: num for name, num in joining.items() if name not in activation} | {"_few_rows_kernel": 1, "product": 3}
    assert overlapping == {name: num for name, num in gated.items() if name != "product"}
    assert [sum(each.values()) for each in (two_kernels, joining, gated)] == [10, 9, 8]
