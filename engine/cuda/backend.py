"""The backend (engine.contracts.backend) of NVIDIA GPUs: opens a device's memory and makes models on it. A model's kernels are
compiled for its sizes before its weights are loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import torch
import triton
from torch import Tensor

from engine.contracts.backend import OpenDevice
from engine.contracts.loads import KernelNews
from engine.cuda import overlap_choice
from engine.cuda.begins import DeviceBegins
from engine.cuda.collectives import Connects
from engine.cuda.frames import DeviceFrames, device_frames
from engine.cuda.graphs import captured, give_back_memory
from engine.cuda.kept_models import KeptModels
from engine.cuda.kernel_builds import CudaKernelBuilds
from engine.cuda.kernels import triton_overlap
from engine.cuda.model import CudaModel
from engine.cuda.nccl import NcclError, nccl
from engine.cuda.ops import CudaOps
from engine.cuda.overlap_choice import OverlapChoice
from engine.cuda.peers import Peers
from engine.cuda.ranks import connect
from engine.cuda.share import CudaShare, ShareLinks
from engine.cuda.sink import DeviceSink
from engine.cuda.stages import DeviceStages
from engine.cuda.tile_choice import TileChoice, choice_file, compared_on, measured_on, usable_flash
from engine.host.process import num_cores
from engine.host.step_begins import StepBegins
from engine.host.weight_decoder import weight_decoder
from engine.memory import handles
from engine.memory.chunk_memory import ChunkMemory
from engine.memory.group_region import GroupRegion
from engine.memory.handover import Handover
from engine.memory.out_of_memory import lacks_memory
from engine.memory.weight_range import WeightRange
from engine.protocol import Configure, LoadModel
from loader.configs.hf_config import CONFIG_NAME
from loader.errors import UnsupportedModel
from loader.formats.weight_format import WeightFormat
from loader.reading.unpack import Decoder
from loader.shapes.kv_dtypes import KVDtype, kv_dtype_named
from loader.shapes.model_shape import ModelShape

log = logging.getLogger("engine")

MAX_GRAPH_ROWS = 256  # decode steps with more rows have no graph
MAX_GRAPH_TOKENS = 512  # steps with prompt chunks and more tokens have no graph


def open_device(configure: Configure, handover: Handover | None) -> OpenDevice:
    """Opens a GPU: allocates its chunks, and limits the memory that torch takes beside the chunks to the work space. configure: the
    engine's settings. handover: takes over the chunks that an earlier engine left, or else passes file descriptors of the new
    chunks to the daemon, so that they outlive this process; None: the chunks end with this process. Raises MemoryError or
    DeviceError if the driver refuses the memory, and ValueError for a chunk size that the device cannot have."""
    from engine.cuda.memory import CudaMemory, DeviceError
    from engine.cuda.work_space import limit_torch

    work_space_bytes, configure = configure.work_space_bytes, beside_work_space(configure)
    size = (configure.num_chunks, configure.chunk_bytes)
    given, left = handover.ask(*size) if handover is not None else ([], None)
    try:
        memory = CudaMemory(*size, exportable=handover is not None, handles=given)
    except DeviceError as error:
        if handover is None or given:
            raise
        log.warning("this engine's memory does not outlive it: %s", error)
        handover, left, memory = None, None, CudaMemory(*size)
    finally:
        handles.close(given)
    limit_bytes = limit_torch(work_space_bytes)
    log.info("torch is held to %.2f GiB of work space", limit_bytes / 2**30)
    if handover is not None and not given:
        handover.give(memory)
    return OpenDevice(CudaBackend(memory, configure), configure, left)


def beside_work_space(configure: Configure) -> Configure:
    """Returns the configuration with the chunks of the work space subtracted from num_chunks, and with a work space of 0. On a GPU
    torch takes the work space from memory outside of the chunks, so these chunks are not allocated; the daemon leases them to
    nobody."""
    work_chunks = -(-configure.work_space_bytes // configure.chunk_bytes)
    return msgspec.structs.replace(configure, num_chunks=configure.num_chunks - work_chunks, work_space_bytes=0)


class CudaBackend:
    """The backend (engine.contracts.backend.Backend) of one NVIDIA GPU. In tests the arena may be in host memory instead; kernels
    then run interpreted on the CPU.

    memory: the device's chunks, with the arena. options: the engine's settings. connects: makes the connections between the ranks
    of split models; None: NCCL is used, except for small all-reduces if the GPUs can map each other's memory
    (engine/cuda/peers.py)."""

    compute_threads = 1
    reads_in_place = steps_may_overlap = False

    def __init__(self, memory: ChunkMemory, options: Configure, connects: Connects | None = None) -> None:
        self.memory, self._options, self._connects = memory, options, connects
        self._kept = KeptModels()
        self._frames: DeviceFrames | None = None  # decodes packed weights on the device; None: the host does
        # Everything that loads launch runs on this stream, and nothing on the stream of steps and of captured graphs.
        self._load_stream = torch.cuda.Stream() if memory.arena.is_cuda else None
        self._builds: CudaKernelBuilds | None = None  # None: kernels are interpreted
        self._tile_choice: TileChoice | None = None  # None likewise
        self._overlap_choice: OverlapChoice | None = None  # None also where kernels cannot overlap

    def prepare(self, tell: Callable[[KernelNews], None]) -> None:
        self._ops = CudaOps(self._options.cache_dir)
        self.memory.copy_out(self.memory.arena.data_ptr(), np.zeros(8, np.uint8)).wait()  # compiles the checksum kernel
        self._frames = device_frames(self.memory)
        if self.memory.arena.is_cuda:
            major, minor = torch.cuda.get_device_capability()
            capability, folder = 10 * major + minor, Path(triton.knobs.cache.dir)
            of_gpu = (capability, self._options.block_tokens)
            self._builds = CudaKernelBuilds(str(triton.knobs.cache.dir), *of_gpu, num_cores(), tell)
            gpu, device = torch.cuda.get_device_properties(self.memory.arena.device), self.memory.arena.device
            flash, flash_mark = usable_flash(folder, capability)
            path = choice_file(folder, f"{gpu.name} {major}.{minor}", flash)
            builds = partial(self._builds.build_trials, has_flash=flash_mark is not None)
            of_device = (device, gpu.multi_processor_count)
            tries = measured_on(*of_device), compared_on(*of_device, partial(captured, device))
            self._tile_choice = TileChoice(path, self._options.block_tokens, builds, *tries, flash_mark)
            self._tile_choice.begin()
            if capability in triton_overlap.CAPABILITIES:
                self._begin_overlap_choice(folder, f"{gpu.name} {major}.{minor}", gpu.multi_processor_count, self._builds)

    def _begin_overlap_choice(self, folder: Path, gpu: str, num_cores: int, builds: CudaKernelBuilds) -> None:
        """Reads whether kernels are to overlap, and prepares to find it out; not with a driver that is too old. gpu: its name and
        compute capability. num_cores: its number of multiprocessors."""
        from engine.cuda.memory import driver_version

        if (version := driver_version()) < triton_overlap.SMALLEST_DRIVER:
            return
        device = self.memory.arena.device
        of_layers = (self._options.block_tokens, device, num_cores, partial(captured, device))
        tries = overlap_choice.compared_on(*of_layers), overlap_choice.measured_on(*of_layers)
        trial = overlap_choice.Trial(builds.build_overlap_trial, builds.build_overlapping, *tries)
        path = overlap_choice.choice_file(folder, f"{gpu} {version}")
        self._overlap_choice = OverlapChoice(path, trial)
        self._overlap_choice.begin()

    def need_kernels(
        self, spec: LoadModel, shape: ModelShape, weight_format: WeightFormat
    ) -> Callable[[Callable[[], None]], None] | None:
        return None if self._builds is None else partial(self._builds.need, spec, shape)

    def _need_adapter_kernels(self, spec: LoadModel, shape: ModelShape) -> None:
        """Compiles the kernels for this model's steps with LoRA adapters, and waits until they are compiled. Does nothing if they
        are compiled already. Called before an adapter of the model is read."""
        if self._builds is not None:
            self._builds.need(spec, shape, lambda: None, adapters=True)

    def check(self, spec: LoadModel, shape: ModelShape, weight_format: WeightFormat) -> None:
        if not weight_format.runs_on("cuda"):
            raise UnsupportedModel(CONFIG_NAME, None, f"{weight_format.setting}: {spec.quantize} is not built on a GPU")
        if shape.is_encoder:
            raise UnsupportedModel(CONFIG_NAME, None, "encoders are not served on a GPU")
        if experts := weight_format.unbuilt_experts(shape):
            why = f"{weight_format.setting}: {spec.quantize} is not built for {experts}"
            raise UnsupportedModel(CONFIG_NAME, None, why)
        if spec.kv_cache_dtype and self.memory.arena.is_cuda:
            check_capability(kv_dtype_named(spec.kv_cache_dtype), torch.cuda.get_device_capability())

    def early_model(self, spec: LoadModel, shape: ModelShape, weights: WeightRange) -> None:
        return None

    def model(self, spec: LoadModel, shape: ModelShape, weights: WeightRange) -> CudaModel:
        """Returns the model, whose weights have arrived in the address range `weights`. If a model was loaded before with the same
        settings in the same range, returns that object again, because the addresses that its CUDA graphs hold are still valid."""
        identity = (
            weights,  # not its address: the driver may give that to another range, whose chunks the model would never unmap
            spec.fingerprint,
            spec.dtype,
            spec.quantize,
            spec.predicts,
            spec.kv_dtype,
            spec.max_model_len,
            spec.max_sequences,
        )
        with self._on_load_stream():
            model = self._kept.restored(spec.model, identity)
            if model is not None:
                return model
            try:
                model = self._made(spec, shape, weights)
            except RuntimeError as error:
                if not lacks_memory(error):
                    raise
                log.info("%s: %s", spec.model, str(error).partition("\n")[0])
            if model is None:  # torch may not have given memory back while a graph was being captured
                self._kept.give_up_evicted()
                give_back_memory()
                model = self._made(spec, shape, weights)
        self._kept.add(spec.model, identity, model)
        return model

    def _made(self, spec: LoadModel, shape: ModelShape, weights: WeightRange) -> CudaModel:
        has_graphs = self.memory.arena.is_cuda
        model = CudaModel(
            self._ops,
            spec,
            shape,
            weights,
            arena=self.memory.arena,
            block_tokens=self._options.block_tokens,
            max_graph_rows=MAX_GRAPH_ROWS if has_graphs else 0,
            max_graph_tokens=MAX_GRAPH_TOKENS if has_graphs else 0,
            prepare_adapters=lambda: self._need_adapter_kernels(spec, shape),
        )
        model.warm()
        if self._tile_choice is not None:
            model.trials.append(self._tile_choice.of_model(spec, shape))
        if self._overlap_choice is not None:
            self._overlap_choice.start(spec, shape)
            model.trials.append(self._overlap_choice)
        return model

    def split_model(
        self, spec: LoadModel, shape: ModelShape, weights: WeightRange, kv_memory: Tensor, region: GroupRegion
    ) -> CudaShare:
        """Returns this device's share of a split model, whose weights have arrived (see SplitsModels.split_model). It is a new
        object at each load, because CUDA graphs hold addresses of the connection. Waits until the other shares of the same layers
        are loaded. Raises GroupBroken, UnsupportedModel if NCCL is needed and there is none, and RuntimeError if the devices cannot
        exchange anything.

        kv_memory: uint8, the memory of the share's KV blocks. region: the memory that the engines with shares of the model have in
        common."""
        self._kept.give_up(spec.model)
        with self._on_load_stream():
            links = self._links(spec, shape, region)
            try:
                most = (MAX_GRAPH_ROWS, MAX_GRAPH_TOKENS) if self.memory.arena.is_cuda else (0, 0)
                share = CudaShare(self._ops, spec, shape, weights, kv_memory, self._options.block_tokens, links, *most)
                share.warm()
            except BaseException:
                links.close()
                raise
        return share

    def _links(self, spec: LoadModel, shape: ModelShape, region: GroupRegion) -> ShareLinks:
        """Connects a device's share of a model with the other shares, and returns the connections. Raises as split_model does."""
        device, ranks, stages, begins = self.memory.arena.device, None, None, None
        if region.stage_size > 1:
            try:
                connects = self._connects or _peers()
            except NcclError as error:
                raise UnsupportedModel(CONFIG_NAME, None, f"parallel: {error}") from None
            ranks = connect(connects, region.rendezvous, region.stage_rank, region.stage_size, region.broken, device)
        try:
            if region.num_stages > 1:
                width, dtype = shape.hidden_size, getattr(torch, spec.dtype)
                stages = DeviceStages(region.new_link(), region.new_link(), width, dtype, device)
            else:
                of_ranks = StepBegins(region.ranks, region.stage_rank, region.stage_size)
                begins = DeviceBegins(of_ranks, region.stage_rank == 0, device.type == "cuda")
        except BaseException:
            if ranks is not None:
                ranks.close()
            raise
        return ShareLinks(ranks, stages, region.broken, begins)

    @contextmanager
    def _on_load_stream(self) -> Iterator[None]:
        """Returns a context in which everything is launched on the CUDA stream of loads. At its end the context waits for that
        stream, because nothing may run there any more when a model is used or its weights are unmapped."""
        if self._load_stream is None:
            yield
            return
        with torch.cuda.stream(self._load_stream):
            try:
                yield
            finally:
                self._load_stream.synchronize()

    def sink(self, weights: WeightRange) -> DeviceSink:
        return DeviceSink(self.memory, weights, self._frames)

    def decoder(self) -> Decoder:
        return weight_decoder(self._options.cache_dir)

    def measured_decoder(self) -> Decoder:
        return self.decoder() if self._frames is None else self._frames.measured_by(self.decoder())


def _peers() -> Connects:
    """Returns the object that connects the GPUs of this host: small all-reduces go through memory that the GPUs map from each
    other, all other exchanges through NCCL. Raises NcclError if there is no NCCL."""
    from engine.cuda.peer_regions import DeviceRegions

    return Peers(nccl(), DeviceRegions)


def check_capability(kv_dtype: KVDtype, capability: tuple[int, int]) -> None:
    """Raises UnsupportedModel if the GPU cannot hold keys and values in this dtype. capability: the GPU's compute capability, (8,
    9) for 8.9."""
    if capability < kv_dtype.capability:
        needed, there = (".".join(map(str, one)) for one in (kv_dtype.capability, capability))
        text = f"kv_cache_dtype: {kv_dtype.name} needs compute capability {needed}; this GPU has {there}"
        raise UnsupportedModel(CONFIG_NAME, None, text)
