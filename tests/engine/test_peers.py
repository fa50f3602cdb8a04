"""Sums of small tensors through memory that ranks map from each other, in processes: the kernel interpreted, with memfds in the
place of memory of GPUs, and gloo in the place of NCCL."""

from __future__ import annotations

import functools
import importlib.util
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from engine.contracts.ranks import GroupBroken
from engine.cuda import peers
from engine.cuda.kernels import triton_peers
from engine.cuda.peers import PeerGroup, Peers
from engine.cuda.ranks import DeviceRanks, connect
from engine.memory import peer_handles
from tests.engine.gloo import Gloo
from tests.engine.rank_processes import Rank, RankGroup
from tests.engine.shared_regions import SharedRegions

CPU = torch.device("cpu")
LANE = triton_peers.LANE_BYTES


@pytest.fixture(scope="module", params=[2, 4], ids=["two", "four"])
def group(request: pytest.FixtureRequest) -> Iterator[RankGroup]:
    made = RankGroup(request.param)
    yield made
    made.close()


@pytest.fixture(scope="module")
def pair() -> Iterator[RankGroup]:
    made = RankGroup(2)
    yield made
    made.close()


class Meeting:
    """Stands in for a Rendezvous whose ranks know the id already."""

    def __init__(self, group_id: bytes) -> None:
        self._id = group_id

    def meet(self, new_id: Callable[[], bytes]) -> bytes:
        return self._id


def connected(own: Rank, group_id: bytes, new_regions: Callable[[int], Any] = SharedRegions) -> tuple[DeviceRanks, PeerGroup]:
    meeting: Any = Meeting(group_id)
    own.broken[0] = 0
    ranks = connect(Peers(Gloo(), new_regions, on_device=False), meeting, own.rank, own.size, own.broken, CPU)
    collectives: Any = ranks.collectives
    return ranks, collectives


def ended(ranks: DeviceRanks) -> None:
    ranks.close()
    ranks.wait_closed()


def parts_of(number: int, size: int) -> list[Tensor]:
    """Returns what all ranks add up in a call. In bfloat16, which the interpreter does not round to, sums are exact."""
    draw = torch.Generator().manual_seed(number)
    dtype = triton_peers.DTYPES[number % 3]
    lanes = 64.0 if number == 7 else float(torch.rand(1, generator=draw)) * 4.0
    num_values = max(1, int(lanes * LANE) // dtype.itemsize)
    if number % 2:
        num_values = -(-num_values // 16) * 16
    if dtype is torch.bfloat16:
        return [torch.randint(-16, 17, (num_values,), generator=draw).to(dtype) for _ in range(size)]
    return [torch.randn(num_values, generator=draw).to(dtype) for _ in range(size)]


def total(parts: list[Tensor]) -> Tensor:
    """Returns the sum in the order of the ranks, in float32."""
    return functools.reduce(lambda one, other: one + other.float(), parts[1:], parts[0].float()).to(parts[0].dtype)


def many_sums(own: Rank, group_id: bytes, num_calls: int, slow: int) -> tuple[int, int]:
    """Returns how many sums were wrong, and how many went through gloo. slow: the rank that comes late to some calls."""
    ranks, peer_group = connected(own, group_id)
    assert peer_group.is_joined
    gloo: Any = peer_group.others
    before, wrong, late = gloo.num_exchanges, 0, random.Random(1)
    for number in range(num_calls):
        parts = parts_of(number, own.size)
        if own.rank == slow and late.random() < 0.2:
            time.sleep(late.random() * 0.02)
        x = parts[own.rank].clone()
        ranks.sum(x)
        wrong += not torch.equal(x, total(parts))
    through_gloo = gloo.num_exchanges - before
    ended(ranks)
    return wrong, through_gloo


def test_sums_of_any_size_and_type_are_the_reference_on_all_ranks(group: RankGroup) -> None:
    assert group.run(many_sums, Gloo().new_id(), 60, group.size - 1) == [(0, 0)] * group.size


def random_bits(own: Rank, group_id: bytes) -> list[bytes]:
    ranks, _ = connected(own, group_id)
    found = []
    for dtype in triton_peers.DTYPES:
        x = (torch.randn(3000, generator=torch.Generator().manual_seed(own.rank)) * 10.0**own.rank).to(dtype)
        ranks.sum(x)
        found.append(x.view(torch.uint8).numpy().tobytes())
    ended(ranks)
    return found


def test_all_ranks_get_the_same_bits_where_sums_are_rounded(group: RankGroup) -> None:
    first, *others = group.run(random_bits, Gloo().new_id())
    assert all(found == first for found in others)


def what_goes_where(own: Rank, group_id: bytes) -> list[int]:
    ranks, peer_group = connected(own, group_id)
    gloo: Any = peer_group.others
    counts = []
    most = triton_peers.MOST_BYTES // 4
    for x in (torch.ones(most), torch.ones(most + 1), torch.ones(8, dtype=torch.float64), torch.ones(1)):
        before = gloo.num_exchanges
        ranks.sum(x)
        assert (x == own.size).all()
        counts.append(gloo.num_exchanges - before)
    assert torch.equal(ranks.gather(torch.full((1, 2), float(own.rank))), torch.arange(own.size).repeat_interleave(2)[None].float())
    ended(ranks)
    return counts


def test_larger_tensors_and_other_types_go_through_the_other_connection(pair: RankGroup) -> None:
    assert pair.run(what_goes_where, Gloo().new_id()) == [[0, 1, 1, 0]] * 2


# ---- faults that are planted in the kernel, between pauses of any length at the places where it matters

TELLS = "    _tell(told + own_rank, call, STRIDE, SIZE, INTERPRETED)\n"
PAUSED = ("    tl.store(buffers + place, value)\n", TELLS, "    total = tl.zeros")  # before each of these
FAULTS = {
    "none": ("", ""),
    "one buffer": ("(call % 2) * LANES", "0 * LANES"),
    "no wait": ("while number < call:", "while number < 0:"),
    "a wait for the call before": ("while number < call:", "while number < call - 1:"),
    "told before it is written": ("    inner = tl.arange", TELLS.replace("told", "words + lane * RANKS") + "    inner = tl.arange"),
}


def altered(fault: str, seed: int) -> Any:
    """Returns triton_peers with a fault, and with pauses."""
    text = Path(triton_peers.__file__).read_text()
    for place in PAUSED:
        assert text.count(place) == 1
        text = text.replace(place, "    _pause()\n" + place)
    old, new = FAULTS[fault]
    assert fault == "none" or text.count(old) == 1
    text = text.replace(old, new) if old else text
    if fault == "told before it is written":
        text = text.replace("    _pause()\n" + TELLS, "")
    text += f"\nimport random, time\n_draw = random.Random({seed})\ndef _pause():\n    time.sleep(_draw.random() ** 4 * 0.02)\n"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"altered_{seed}.py")
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        alone = torch.zeros(1, triton_peers.REGION_BYTES, dtype=torch.uint8)
        module.sum_over_ranks(torch.ones(1), alone, torch.zeros(1, dtype=torch.int64), 0, True)  # while its text is there
    return module


def altered_sums(own: Rank, group_id: bytes, fault: str, num_calls: int) -> int:
    """Returns how many sums were wrong."""
    ranks, peer_group = connected(own, group_id)
    assert peer_group.is_joined
    module, regions, stop = altered(fault, own.rank), peer_group._regions, torch.zeros(1, dtype=torch.int64)
    assert regions is not None
    wrong = 0
    for number in range(num_calls):
        x = torch.arange(40.0) * (own.rank + 1) + number
        module.sum_over_ranks(x, regions.all, stop, own.rank, True)
        every = sum(range(1, own.size + 1))
        wrong += not torch.equal(x, torch.arange(40.0) * every + number * own.size)
    ended(ranks)
    return wrong


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_the_kernel_are_found(pair: RankGroup, fault: str) -> None:
    wrong = pair.run(altered_sums, Gloo().new_id(), fault, 150)
    assert any(wrong) == (fault != "none"), wrong


# ---- how it ends


def wait_for_nobody(own: Rank, group_id: bytes, by_flag: bool) -> float:
    """On rank 0: begins sums for which the other rank never comes, and returns the seconds until they have ended."""
    ranks, peer_group = connected(own, group_id)
    peer_group.others.sum(torch.ones(1))  # both are ready
    if own.rank:
        time.sleep(1.0)
        ended(ranks)
        return 0.0
    began_s = time.monotonic()

    def end() -> None:
        if by_flag:
            own.broken[0] = 1
        else:
            ranks.close()

    threading.Timer(0.3, end).start()
    ranks.sum(torch.ones(2 * LANE))
    seconds = time.monotonic() - began_s
    ranks.wait_closed()
    with pytest.raises(GroupBroken):
        ranks.sum(torch.ones(1))
    assert peer_group._regions is None
    return seconds


@pytest.mark.parametrize("by_flag", [False, True])
def test_a_sum_that_waits_for_a_lost_rank_ends(pair: RankGroup, by_flag: bool) -> None:
    seconds, _ = pair.run(wait_for_nobody, Gloo().new_id(), by_flag)
    assert 0.3 <= seconds < 5.0


# ---- ranks that do not reach each other


class Unreachable(SharedRegions):
    """Stands in for memory of GPUs that do not reach each other."""

    def map(self, step: int, handle: int) -> None:
        if step:
            raise RuntimeError("cuMemSetAccess: CUDA_ERROR_INVALID_DEVICE")
        super().map(step, handle)


class Apart(SharedRegions):
    """Stands in for memory of another GPU that can be mapped and does not hold what that GPU writes."""

    def map(self, step: int, handle: int) -> None:
        super().map(step, self._fd if step else handle)


class Without(SharedRegions):
    def __init__(self, size: int) -> None:
        raise MemoryError("cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY")


def fall_back(own: Rank, group_id: bytes, kind: str) -> tuple[bool, str, float]:
    """Returns whether sums go through the ranks' memory, why not, and a sum."""
    kinds: dict[str, Any] = {"unreachable": Unreachable, "apart": Apart, "without": Without}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers, "TRIAL_LIMIT_S", 0.5)
        patch.setattr(SharedRegions, "wait_for_steps", lambda self: pytest.fail("a load waits for a step"))
        if own.rank == 1 and kind == "disabled":
            patch.setenv("NCCL_P2P_DISABLE", "1")
        if own.rank == 1 and kind == "no descriptors":
            patch.setattr(peer_handles, "SWAP_LIMIT_S", 0.2)
            patch.setattr(peer_handles.handles, "send", _no_send)
        ranks, peer_group = connected(own, group_id, kinds.get(kind, SharedRegions) if own.rank == 1 else SharedRegions)
    x = torch.ones(4)
    ranks.sum(x)
    told = peer_group.is_joined, peer_group._why, float(x[0])
    assert peer_group._regions is None
    ended(ranks)
    return told


def _no_send(*arguments: Any) -> None:
    raise ConnectionRefusedError("refused")


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("unreachable", "cuMemSetAccess: CUDA_ERROR_INVALID_DEVICE"),
        ("apart", "the other GPUs' memory did not tell anything within 0 s"),
        ("without", "cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY"),
        ("disabled", "NCCL_P2P_DISABLE is set"),
        ("no descriptors", "refused"),
    ],
)
def test_where_one_rank_cannot_all_sums_go_through_the_other_connection(pair: RankGroup, kind: str, why: str) -> None:
    told = pair.run(fall_back, Gloo().new_id(), kind)
    assert [(joined, total) for joined, _, total in told] == [(False, 2.0)] * 2
    assert told[1][1] == why


# ---- descriptors


def test_every_rank_gets_the_memory_of_the_others() -> None:
    group_id, size = b"a group", 3
    swaps = [peer_handles.PeerHandles(group_id, rank, size) for rank in range(size)]
    own = [SharedRegions(size) for _ in range(size)]
    for rank, region in enumerate(own):
        region.all[0, 0] = 10 + rank
    found: dict[int, dict[int, int]] = {}

    def swap(rank: int) -> None:
        found[rank] = swaps[rank].swap(own[rank].export(), own[rank].num_bytes)

    threads = [threading.Thread(target=swap, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)
    for rank in range(size):
        assert found[rank].keys() == {0, 1, 2} - {rank}
        for other, handle in found[rank].items():
            own[rank].map((other - rank) % size, handle)
            assert own[rank].all[(other - rank) % size, 0] == 10 + other
        swaps[rank].close()


def test_memory_of_another_size_is_refused() -> None:
    one, other = (peer_handles.PeerHandles(b"another group", rank, 2) for rank in range(2))
    region = SharedRegions(2)

    def send() -> None:
        with pytest.raises(ConnectionError):
            other.swap(region.export(), 77)

    sending = threading.Thread(target=send)
    sending.start()
    with pytest.raises(ConnectionError, match="1 descriptors of 77 bytes instead of one of 532480"):
        one.swap(region.export(), region.num_bytes)
    sending.join(10.0)
    one.close()
    other.close()
