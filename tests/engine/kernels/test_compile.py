"""Tests what the interpreter cannot show: that the kernels compile for a GPU, and to what.

Of forms that differ in a size the one with most registers is compiled. HEARTHD_TEST_SHAPES=1 compiles all, as `python -m
benchmarks.machine_code` does for four compute capabilities.
"""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

import pytest

pytest.importorskip("triton")

from tests.engine.not_interpreted import KERNEL_CACHE, output_of

COMPILES_ALL = "HEARTHD_TEST_SHAPES" in os.environ
LIMIT_S = 1800 if COMPILES_ALL else 300
CAPABILITIES = (80, 90, 100)  # for which sums are compiled


@pytest.mark.timeout(LIMIT_S + 30)
def test_kernels_compile_for_hopper_with_tensor_cores_and_without_spills(tmp_path: pathlib.Path) -> None:
    asked = ("90", "--unlisted") if COMPILES_ALL else ("90", "--unlisted", "--largest")
    told = output_of("tests.engine.kernels.compile_for_hopper", *asked, limit_s=LIMIT_S, **KERNEL_CACHE)
    lines = [json.loads(text) for text in told.splitlines()]
    kernels = {line["kernel"] for line in lines}
    assert len(kernels) >= 18, kernels
    assert sum(line["kernel"] == "_few_rows_kernel" for line in lines) >= 2  # without an activation and with one
    latents = {"_latent_piece_kernel", "_latent_extend_kernel"}
    store = {"_rope_and_store_kernel", "_store_latents_kernel"}
    assert {line["kernel"] for line in lines if line["fp8"]} == {"_piece_kernel", "_extend_kernel"} | store | latents
    for line in lines:
        assert line["shared_bytes"] <= 227 << 10  # the most a thread block may have
        if line["item_bytes"] == 4 and line["kernel"] in ("_piece_kernel", "_extend_kernel"):
            continue  # wide heads in float32 are multiplied without tensor cores, and may spill
        # fp8 latents are widened beside accumulators of 512 numbers, fp8 keys beside scores of 128 queries: some registers are kept
        # on the stack
        spilled = 64 if line["fp8"] and line["kernel"] in latents | {"_extend_kernel"} else 0
        if line["kernel"] == "_extend_kernel" and line["head_dim"] == 512:  # so do accumulators of 64 queries with 512 numbers
            spilled = 224
        # angles of any size are reduced on the stack
        assert line["stack_bytes"] <= spilled or line["kernel"] == "_cos_sin_kernel", line
        if line["kernel"] == "_piece_kernel":
            assert line["mma"] > 0
            assert line["async_copies_of_16_bytes"] > 0
        if line["kernel"] == "_few_rows_kernel":
            assert line["widest_load_bytes"] == 16
        if line["kernel"] == "_grouped_kernel":
            assert line["mma"] + line["wgmma"] > 0
            assert line["async_copies_of_16_bytes"] > 0
        if line["kernel"] == "_extend_kernel":
            assert line["wgmma"] > 0
            assert line["async_copies_of_16_bytes"] > 0


@pytest.fixture(scope="module")
def sums() -> list[dict[str, Any]]:
    """Returns what compile_peers prints for all CAPABILITIES, in one process, which takes seconds to start."""
    told = output_of("tests.engine.kernels.compile_peers", *map(str, CAPABILITIES), limit_s=LIMIT_S, **KERNEL_CACHE)
    return [json.loads(text) for text in told.splitlines()]


@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_sums_over_the_gpus_memory_order_what_they_tell_for_the_whole_system(sums: list[dict[str, Any]], capability: int) -> None:
    """In every form: values are written before a barrier and the number that tells so; they are read after that of each rank has
    been looked at, and a barrier. Nothing is read by way of a cache that does not see other devices' writes."""
    keys, *lines = (line for line in sums if line["capability"] == capability)
    assert keys == {"capability": capability, "compiled": 12, "added": 0}
    assert len(lines) == 12
    for line in lines:
        assert line["target"] == str(capability)
        assert line["stack_bytes"] == 0, line
        assert line["widest_load_bytes"] == 16
        order = line["order"]
        first, second = (at for at, what in enumerate(order) if what == "bar.sync")
        told, looked = order.index("st.release.sys.global.b64"), order.index("ld.acquire.sys.global.b64")
        assert first < told < looked < second
        assert order.count("st.release.sys.global.b64") == 1
        assert "st.global.v4.b32" in order[:first]
        assert not any(what.startswith("st.global") for what in order[first:second])
        between = [what for what in order[first + 1 : second] if what != "ld.acquire.sys.global.b64"]
        assert between == ["st.release.sys.global.b64", "ld.volatile.global.b64"]  # the latter is the host's word
        assert order[second:].count("ld.global.v4.b32") == line["ranks"]
        assert not any(".nc" in what for what in order)
