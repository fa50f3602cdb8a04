"""Sums small tensors over the ranks (GPUs) of a split model in one kernel (Triton), through memory that the ranks' GPUs map from
each other.

Each rank has a region of memory that all ranks have mapped. A program (a lane) handles LANE_BYTES of the tensor, independently of
other lanes. It copies the rank's values to the rank's region, publishes the number of the call to the same lane of every rank,
waits until all ranks have published this number, and adds up the values of all ranks in float32, in the order of the ranks. So all
ranks get the same bits.

A lane counts its calls in the region. Every rank makes the same calls, so the counts agree, and a graph needs no number from the
host. A lane has two buffers: call n writes buffer n % 2, over the values of call n - 2. All ranks have read these values by then:
this rank's call n - 1 has waited until all ranks had published n - 1, and a rank publishes n - 1 only after its call n - 2, with
all its reads, has ended on the same stream. One buffer would not be enough, because a rank that has published n - 1 may still be
reading the values of call n - 1 when this rank begins call n.

A number is published by a store with release semantics for the whole system, after a barrier of the program's threads. A lane waits
in a loop of loads with acquire semantics, followed by a barrier. On a GPU these are PTX's st.release and ld.acquire, which need no
atomic operations across PCIe. Where kernels are interpreted (in tests), they are the interpreter's atomic operations.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.cuda.kernels.sizes import ceil_div

LANE_BYTES = 4096  # 16 bytes for each of 256 threads
NUM_LANES = 64  # few enough to run on a GPU all at once, because each waits for the same lane of other GPUs
# The largest tensor. A rank reads the whole tensor of every rank; for larger tensors NCCL, which exchanges sums of parts, moves
# fewer bytes. vLLM has the same limit with eight GPUs, and twice as much with four (custom_all_reduce.cuh).
MOST_BYTES = NUM_LANES * LANE_BYTES
MOST_RANKS = 8
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# A region has, for each lane, the number of calls that each rank has published; for each lane, the number of the rank's own calls;
# and two buffers for each lane.
_CALLS_AT = 8 * NUM_LANES * MOST_RANKS
_BUFFERS_AT = 8192
REGION_BYTES = _BUFFERS_AT + 2 * MOST_BYTES
# Examples of all kernels that are compiled: for each type a number of values that is a multiple of 16, and one that is not.
FORMS = tuple((dtype, 2 * LANE_BYTES // dtype.itemsize - less) for dtype in DTYPES for less in (0, 1))
WARPS = 8
LOOKS = 256  # reads of the other ranks' counts between two reads of `stop`, which is in host memory and takes longer to read


@triton.jit
def _tell(
    place,  # int64 pointer to this rank's count in its own region; its count in the next region is STRIDE bytes further
    call,
    STRIDE: tl.constexpr,
    SIZE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Publishes the number `call` in the regions of all ranks. A thread that reads this number also sees everything that this
    program's threads wrote before the last barrier. place: where this rank publishes in its own region; in each next region that
    place is STRIDE bytes further."""
    if INTERPRETED:
        for step in tl.static_range(SIZE):
            tl.atomic_xchg(place + step * (STRIDE // 8), call, sem="release", scope="sys")
    else:  # a thread for each region
        tl.inline_asm_elementwise(
            """
            {
            .reg .pred tells;
            .reg .b32 thread;
            .reg .b64 place;
            mov.u32 thread, %tid.x;
            setp.lt.u32 tells, thread, $4;
            mad.wide.u32 place, thread, $3, $1;
            @tells st.release.sys.global.b64 [place], $2;
            mov.u32 $0, thread;
            }
            """,
            "=r,l,l,r,r",
            [place.to(tl.int64), call, tl.full((), STRIDE, tl.int32), tl.full((), SIZE, tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _told(
    places,  # [S] int64
    SIZE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Returns, in each thread, the number that one of the ranks has published. The thread then also sees what that rank wrote
    before it published the number. Where kernels are interpreted, returns the smallest number of all ranks. places [S] int64, in
    this rank's region: the numbers that all ranks have published to it."""
    if INTERPRETED:
        number = tl.atomic_add(places, 0, sem="acquire", scope="sys")
        for rank in tl.static_range(1, SIZE):
            number = tl.minimum(number, tl.atomic_add(places + rank, 0, sem="acquire", scope="sys"))
    else:
        number = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 rank;
            .reg .b64 place;
            mov.u32 rank, %tid.x;
            rem.u32 rank, rank, $2;
            mad.wide.u32 place, rank, 8, $1;
            ld.acquire.sys.global.b64 $0, [place];
            }
            """,
            "=l,l,r",
            [places.to(tl.int64), tl.full((), SIZE, tl.int32)],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )
    return number


@triton.jit(do_not_specialize=["num_values", "own_rank"])
def _sum_kernel(
    x,  # [N], read and written
    words,  # int64: the regions, STRIDE bytes apart: this rank's, then those of the next higher ranks, with rank 0 after the last
    buffers,  # the same memory in x's dtype
    stop,  # [1] int64 in host memory: not 0 once all ranks must stop waiting
    num_values,
    own_rank,
    WHOLE: tl.constexpr,  # whether num_values is a multiple of 16
    STRIDE: tl.constexpr,
    SIZE: tl.constexpr,
    ITEM_BYTES: tl.constexpr,
    BLOCK: tl.constexpr,  # values of a lane
    INTERPRETED: tl.constexpr,
    RANKS: tl.constexpr,
    LANES: tl.constexpr,
    CALLS_AT: tl.constexpr,
    BUFFERS_AT: tl.constexpr,
    MANY: tl.constexpr,
):
    lane = tl.program_id(0)
    calls = words + CALLS_AT // 8 + lane
    call = tl.load(calls) + 1
    inner = tl.arange(0, BLOCK)
    at = lane * BLOCK + inner
    # the compiler sees in this form that the 16 values of a wide load are all inside or all outside
    inside = at // 16 < num_values // 16 if WHOLE else at < num_values
    value = tl.load(x + at, mask=inside, other=0.0)
    place = BUFFERS_AT // ITEM_BYTES + ((call % 2) * LANES + lane) * BLOCK + inner
    tl.store(buffers + place, value)
    tl.debug_barrier()  # all threads have read the count, and have written their values
    told = words + lane * RANKS
    _tell(told + own_rank, call, STRIDE, SIZE, INTERPRETED)
    number = _told(told, SIZE, INTERPRETED)
    looks = 0
    while number < call:  # has no barrier, because threads leave the loop one by one
        number = _told(told, SIZE, INTERPRETED)
        looks += 1
        if looks % MANY == 0:  # noqa: SIM102 (Triton's `and` would read the word every time)
            if tl.load(stop, volatile=True) != 0:
                number = call
    tl.debug_barrier()  # each thread now sees the values of all ranks that the threads have waited for
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for rank in tl.static_range(SIZE):
        step = ((rank - own_rank + SIZE) % SIZE).to(tl.int64)
        total += tl.load(buffers + step * (STRIDE // ITEM_BYTES) + place).to(tl.float32)
    tl.store(x + at, total.to(x.dtype.element_ty), mask=inside)
    tl.store(calls, call)


def sum_over_ranks(x: Tensor, regions: Tensor, stop: Tensor, rank: int, interpreted: bool) -> None:
    """Replaces the values of x by their sums over all ranks. All ranks call it. x: contiguous, of one of DTYPES, at most
    MOST_BYTES.

    regions [S, bytes of a region] uint8: the regions of all ranks as this rank has mapped them: its own, then those of the next
    higher ranks, with rank 0 after the last. Before the first call of any rank all bytes were 0.
    stop [1] int64, in memory that host and device read: once it is not 0, calls end without waiting, and their results are
    worthless."""
    item, size, stride = x.element_size(), *regions.shape
    block = LANE_BYTES // item
    _sum_kernel[(ceil_div(x.numel(), block),)](
        x,
        regions.view(torch.int64),
        regions.view(x.dtype),
        stop,
        x.numel(),
        rank,
        WHOLE=x.numel() % 16 == 0,
        STRIDE=stride,
        SIZE=size,
        ITEM_BYTES=item,
        BLOCK=block,
        INTERPRETED=interpreted,
        RANKS=MOST_RANKS,
        LANES=NUM_LANES,
        CALLS_AT=_CALLS_AT,
        BUFFERS_AT=_BUFFERS_AT,
        MANY=4 if interpreted else LOOKS,  # interpreted reads all take equally long
        num_warps=WARPS,
    )
