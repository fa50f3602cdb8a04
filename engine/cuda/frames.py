"""Decodes packed weights on the device that uses them. Packed weights come in frames (units of packed data in a file,
loader.files.frame). A frame is copied to the device as it is in the file; a kernel launched after the copy decodes its values and
writes them to their place.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.memory.chunk_memory import ChunkMemory
from loader.architectures.architecture import Cut
from loader.files import frame
from loader.packing import codec
from loader.reading.unpack import Decoder

log = logging.getLogger("engine")

PROOF_VALUES = 2 * frame.GROUP_VALUES + 100  # values of two bytes each; not a multiple of 16 bytes (see `prove`)


class KeptPart(NamedTuple):
    """A part of a frame's values that one device's share of a split model keeps. begin, end: the part is within the values [begin,
    end). columns: these values are seen as rows of `columns.whole` values, of which the columns in `columns.ranges` are kept. out:
    the memory on the device that receives the kept values, [N] of two bytes each."""

    begin: int
    end: int
    columns: Cut
    out: Tensor


class DeviceFrames:
    """Decodes frames on one device, for all its loads and for several threads at once.

    All frames pass through one buffer on the device, so the next frame's copy waits until the kernel has decoded the frame before.
    That costs little: decoding a frame takes a tenth of the time of its copy."""

    def __init__(self, memory: ChunkMemory) -> None:
        from engine.cuda.kernels import triton_unpack

        self._memory, self._unpack = memory, triton_unpack.unpack
        self._lock = threading.Lock()
        with memory.copying():
            num_bytes = frame.frame_bytes(frame.FRAME_VALUES, frame.FRAME_VALUES)
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=memory.arena.device)
            self._begin = torch.zeros(1, dtype=torch.int64, device=memory.arena.device)

    def verdict(self) -> Tensor:
        """Returns a new verdict: [1] int32 on the device, 0 until `decode` finds a frame invalid and writes the frame's number to
        it."""
        with self._memory.copying():
            return torch.zeros(1, dtype=torch.int32, device=self._memory.arena.device)

    def decode(self, data: Any, out: Tensor, verdict: Tensor, number: int) -> None:
        """Starts to decode a frame to `out`, [N] values of two bytes each on the device, and returns. data: the frame as uint8,
        whose checksum the caller has checked. Raises FrameError if the frame's head does not fit N values. If the kernel finds the
        frame invalid, it writes `number` (not 0) to verdict."""
        with self._lock, self._memory.copying():
            self._decode(data, out, verdict, number)

    def _decode(self, data: Any, out: Tensor, verdict: Tensor, number: int) -> None:
        codec.Parts(data, out.numel())
        self._memory.write(self._buffer.data_ptr(), data)
        self._unpack(self._buffer, self._begin, frame.FRAME_VALUES, out, verdict, number)

    def decode_parts(self, data: Any, num_values: int, kept: Sequence[KeptPart], verdict: Tensor, number: int) -> None:
        """Starts to decode a frame of num_values values, of which this device's share of a split model keeps only the parts `kept`.
        The whole frame is decoded to temporary memory on the device, from which the kept parts are copied to their places. data,
        verdict, number: as in `decode`, whose errors it raises."""
        with self._lock, self._memory.copying():
            values = torch.empty(num_values, dtype=torch.int16, device=self._memory.arena.device)
            self._decode(data, values, verdict, number)
            for part in kept:
                rows = values[part.begin : part.end].view(-1, part.columns.whole)
                first, out = 0, part.out.view(-1, part.columns.length)
                for begin, end in part.columns.ranges:
                    out[:, first : first + end - begin].copy_(rows[:, begin:end])
                    first += end - begin

    def refused(self, verdict: Tensor) -> int:
        """Waits for all decoding that was started with this verdict. Returns the number of a frame that was found invalid; 0: none
        was."""
        with self._memory.copying():
            return int(verdict.item())

    def measured_by(self, host: Decoder) -> Decoder:
        """Returns a decoder with which loader.reading.read_rates measures how fast frames, the compressed units of a packed weight
        file, can be decoded. As in a load, checksums are computed on the host, by `host`, and frames are decoded on this device."""
        with self._memory.copying():  # torch reuses memory in the order of the stream it was taken on
            out = torch.empty(frame.FRAME_VALUES, dtype=torch.int16, device=self._memory.arena.device)
        verdict = self.verdict()
        return Decoder("triton", lambda data, values: self.decode(data, out[: len(values)], verdict, 1), host.sum_of)

    def prove(self) -> None:
        """Tests the decoder: decodes a frame with known values to two places, one aligned to 16 bytes and one not, for which Triton
        compiles the kernel separately. Raises RuntimeError if a decoded value is wrong."""
        values = np.random.default_rng(1).normal(0, 0.02, PROOF_VALUES).astype(np.float32)
        bits = (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        with self._memory.copying():
            out = torch.zeros(2, PROOF_VALUES, dtype=torch.int16, device=self._memory.arena.device)
        verdict = self.verdict()
        for place in out:
            self.decode(np.frombuffer(bytearray(codec.encode(bits)), np.uint8), place, verdict, 1)
        refused = self.refused(verdict)
        with self._memory.copying():
            decoded = out.cpu().numpy().view(np.uint16)
        if refused or not (decoded == bits).all():
            raise RuntimeError("a frame decoded on the device has other values than on the host")


def device_frames(memory: ChunkMemory) -> DeviceFrames | None:
    """Returns the decoder of packed weights on this device. Returns None if the device does not decode correctly; the log then says
    why, and the host decodes instead."""
    try:
        frames = DeviceFrames(memory)
        frames.prove()
    except Exception as error:
        log.warning("packed weights are decoded on the host: %s: %s", type(error).__name__, error)
        return None
    return frames
