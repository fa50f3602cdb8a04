"""Measures what moving memory costs on a GPU: mapping and unmapping chunks of a few sizes, reading through such mappings, a
captured graph whose memory was unmapped and mapped again, page-locking host memory, and the bus; the engine's own swaps against
that, and its chunks handed to another memory. One JSON line each.

usage: python -m benchmarks.gpu_memory [--tiny]: without a GPU only copies on the CPU, to show that the script runs.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_limits import host_to_device_bytes_per_s, seconds_of
from engine.cpu.memory import CpuMemory
from engine.memory.chunk_memory import ChunkMemory
from engine.memory.host_registration import RegistersHost, register
from engine.memory.host_tier import HostTier
from engine.memory.transfers import copies_several, transfer
from loader.packing import checksum

RANGE_BYTES = 2 << 30
CHUNKS_BYTES = (2 << 20, 16 << 20, 64 << 20)


def tell(**figures: Any) -> None:
    print(json.dumps({"benchmark": "gpu_memory"} | figures), flush=True)


def checked(answer: Any, call: str) -> Any:
    """The values of a driver call's answer. Raises RuntimeError naming the call."""
    code, *values = answer
    if int(code) != 0:
        raise RuntimeError(f"{call}: {code.name}")
    return values[0] if values else None


class MappedRange:
    """An address range of the device with chunks behind it (CUDA's virtual memory management), as a uint8 tensor."""

    def __init__(self, driver: Any, num_bytes: int, chunk_bytes: int) -> None:
        self._driver, self.num_bytes, self.chunk_bytes = driver, num_bytes, chunk_bytes
        where = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._kind = driver.CUmemAllocationProp()
        self._kind.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._kind.location.type, self._kind.location.id = where, torch.cuda.current_device()
        self._access = driver.CUmemAccessDesc()
        self._access.location.type, self._access.location.id = where, torch.cuda.current_device()
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        granularity = checked(driver.cuMemGetAllocationGranularity(self._kind, least), "cuMemGetAllocationGranularity")
        if chunk_bytes % granularity:
            raise RuntimeError(f"chunks of {chunk_bytes} bytes on a device that takes multiples of {granularity}")
        self.address = int(checked(driver.cuMemAddressReserve(num_bytes, 0, 0, 0), "cuMemAddressReserve"))

    def create(self) -> list[Any]:
        return [
            checked(self._driver.cuMemCreate(self.chunk_bytes, self._kind, 0), "cuMemCreate")
            for _ in range(self.num_bytes // self.chunk_bytes)
        ]

    def map(self, chunks: list[Any]) -> None:
        for number, chunk in enumerate(chunks):
            at = self.address + number * self.chunk_bytes
            checked(self._driver.cuMemMap(at, self.chunk_bytes, 0, chunk, 0), "cuMemMap")
        checked(self._driver.cuMemSetAccess(self.address, self.num_bytes, [self._access], 1), "cuMemSetAccess")

    def unmap(self) -> None:
        checked(self._driver.cuMemUnmap(self.address, self.num_bytes), "cuMemUnmap")

    def release(self, chunks: list[Any]) -> None:
        for chunk in chunks:
            checked(self._driver.cuMemRelease(chunk), "cuMemRelease")

    def close(self) -> None:
        checked(self._driver.cuMemAddressFree(self.address, self.num_bytes), "cuMemAddressFree")

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.num_bytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}


def mapping(driver: Any, chunk_bytes: int) -> None:
    made = MappedRange(driver, RANGE_BYTES, chunk_bytes)
    began_s = time.perf_counter()
    chunks = made.create()
    create_s = time.perf_counter() - began_s
    times: list[tuple[float, float]] = []
    for _ in range(5):
        began_s = time.perf_counter()
        made.map(chunks)
        mapped_s = time.perf_counter()
        made.unmap()
        times.append((mapped_s - began_s, time.perf_counter() - mapped_s))
    made.map(chunks)
    view = torch.as_tensor(made, device="cuda")
    target = torch.empty_like(view)
    plain = torch.ones_like(view)
    view.copy_(plain)
    copy_s, plain_s = (seconds_of(partial(target.copy_, source), "cuda", 10, captured=False) for source in (view, plain))
    map_s, unmap_s = (sorted(column)[2] for column in zip(*times, strict=True))
    num = len(chunks)
    tell(
        what="mapping",
        chunk_mib=chunk_bytes >> 20,
        create_us=round(create_s / num * 1e6, 1),
        map_us=round(map_s / num * 1e6, 1),
        unmap_us=round(unmap_s / num * 1e6, 1),
        map_s_per_gib=round(map_s / RANGE_BYTES * 2**30, 5),
        copy_against_plain=round(plain_s / copy_s, 3),
    )
    torch.cuda.synchronize()
    del view
    made.unmap()
    made.release(chunks)
    made.close()


def graph_survives(driver: Any) -> None:
    """A graph is captured over mapped memory; the memory is unmapped, other chunks come to the same place, and it is replayed."""
    made = MappedRange(driver, 64 << 20, 16 << 20)
    first, second = made.create(), made.create()
    made.map(first)
    view = torch.as_tensor(made, device="cuda")
    out = torch.zeros(1, dtype=torch.int64, device="cuda")
    view.fill_(1)
    for _ in range(2):
        out.copy_(view.sum())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.copy_(view.sum())
    answers = []
    for chunks, value in ((None, 1), (second, 2), (first, 3)):
        if chunks is not None:
            torch.cuda.synchronize()
            made.unmap()
            made.map(chunks)
            view.fill_(value)
        graph.replay()
        answers.append(int(out.item()) == value * made.num_bytes)
    tell(what="graph over memory that was unmapped and mapped again", right=all(answers))
    torch.cuda.synchronize()
    made.unmap()
    made.release(first + second)
    made.close()


def host(device: str, num_bytes: int) -> None:
    target = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    figures: dict[str, float] = {}
    sources = {"pageable": torch.ones(num_bytes, dtype=torch.uint8)}
    if device == "cuda":
        began_s = time.perf_counter()
        sources["page_locked"] = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=True)
        figures["page_lock_s_per_gib"] = round((time.perf_counter() - began_s) / num_bytes * 2**30, 4)
        registered, runtime = torch.ones(num_bytes, dtype=torch.uint8), torch.cuda.cudart()
        began_s = time.perf_counter()
        code = runtime.cudaHostRegister(registered.data_ptr(), num_bytes, 0)
        figures["register_s_per_gib"] = round((time.perf_counter() - began_s) / num_bytes * 2**30, 4)
        figures["register_code"] = int(code)
        sources["registered"] = registered
    for name, source in sources.items():
        for direction, call in (
            ("to_device", lambda source=source: target.copy_(source, non_blocking=True)),
            ("to_host", lambda source=source: source.copy_(target, non_blocking=True)),
        ):
            figures[f"{name}_{direction}_gb_s"] = round(num_bytes / seconds_of(call, device, 5, captured=False) / 1e9, 2)
    tell(what="host", mib=num_bytes >> 20, **figures)
    if device == "cuda":
        torch.cuda.synchronize()
        runtime.cudaHostUnregister(registered.data_ptr())


def swaps(memory: ChunkMemory, bus_bytes_per_s: float) -> None:
    """All chunks from a tier of as many slots and back, summed up on the way, as an eviction and a load have it."""
    fd = os.memfd_create("tier")
    os.ftruncate(fd, memory.num_chunks * memory.chunk_bytes)
    tier = HostTier(fd, memory.num_chunks, memory.chunk_bytes)
    address, num_bytes = memory.arena.data_ptr(), memory.num_chunks * memory.chunk_bytes
    slots = list(range(memory.num_chunks))
    pieces = [(address + slot * memory.chunk_bytes, tier.slot(slot)) for slot in slots]
    for slot, (_, held) in zip(slots, pieces, strict=True):
        held[:] = slot % 251
    figures: dict[str, object] = {"mib": num_bytes >> 20}
    if isinstance(memory, RegistersHost):
        began_s = time.perf_counter()
        register(memory, "host tier", [tier.span], tier.slot_bytes)
        figures["register_s_per_gib"] = round((time.perf_counter() - began_s) / num_bytes * 2**30, 4)
    transfer(memory.copy_in, pieces, several=copies_several(memory, out=False))
    for name, copy, out in (("swap_in", memory.copy_in, False), ("swap_out", memory.copy_out, True)):
        began_s = time.perf_counter()
        sums = transfer(copy, pieces, several=copies_several(memory, out))
        seconds = time.perf_counter() - began_s
        figures[f"{name}_gb_s"] = round(num_bytes / seconds / 1e9, 2)
        figures[f"{name}_of_bus"] = round(num_bytes / seconds / bus_bytes_per_s, 3)
    began_s = time.perf_counter()
    told = memory.checksum(address, num_bytes)
    figures["checksum_gb_s"] = round(num_bytes / (time.perf_counter() - began_s) / 1e9, 2)
    right = sums == [checksum.of(held) for _, held in pieces] and told == checksum.of(memory.arena.cpu().numpy())
    tell(what="swaps", right=right, **figures)


def handed_over(made: ChunkMemory, make: Callable[[list[int]], ChunkMemory]) -> None:
    """The chunks' descriptors to a second memory, which finds what the first one left."""
    told = made.checksum(made.arena.data_ptr(), made.num_chunks * made.chunk_bytes)
    began_s = time.perf_counter()
    handles = made.export()
    exported_s = time.perf_counter()
    second = make(handles)
    had_s = time.perf_counter()
    same = second.checksum(second.arena.data_ptr(), made.num_chunks * made.chunk_bytes) == told
    tell(
        what="handed over",
        chunks=made.num_chunks,
        export_us=round((exported_s - began_s) / made.num_chunks * 1e6, 1),
        import_and_map_us=round((had_s - exported_s) / made.num_chunks * 1e6, 1),
        right=same,
    )
    for fd in handles:
        os.close(fd)
    second.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu_memory", description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    if parser.parse_args().tiny:
        host("cpu", 1 << 20)
        on_cpu = CpuMemory(4, 1 << 20)
        swaps(on_cpu, host_to_device_bytes_per_s("cpu", tiny=True))
        handed_over(on_cpu, lambda handles: CpuMemory(4, 1 << 20, handles))
        on_cpu.close()
        tell(what="mapping", skipped="needs a CUDA device")
        return
    torch.zeros(1, device="cuda")  # makes the context that the driver calls below are for
    host("cuda", 1 << 30)
    from cuda.bindings import driver

    from engine.cuda.memory import CudaMemory

    on_gpu = CudaMemory(128, 16 << 20, exportable=True)
    swaps(on_gpu, host_to_device_bytes_per_s("cuda", tiny=False))
    handed_over(on_gpu, lambda handles: CudaMemory(128, 16 << 20, handles=handles))
    on_gpu.close()
    for chunk_bytes in CHUNKS_BYTES:
        mapping(driver, chunk_bytes)
    graph_survives(driver)


if __name__ == "__main__":
    main()
