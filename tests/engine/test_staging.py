"""Columns arrive on a device as they were laid out on the host, also over padding, and results come back to memory that fits."""

from __future__ import annotations

import numpy as np
import torch

from engine.cuda.model import Marks
from engine.cuda.sequences import Group, Padding, Staging, words_of

CPU = torch.device("cpu")


def test_columns_over_padding_are_as_if_they_had_been_padded() -> None:
    full = {
        "numbers": np.arange(5, dtype=np.int32),
        "halves": np.full(5, 0.5, np.float32),
        "keys": np.full(5, 2**32 - 1, np.uint32),
        "penalties": np.full(6, 1.5, np.float64),
        "words": np.zeros(1, np.int32),
    }
    staging, padding = Staging(CPU, 2), Padding(full)
    inputs = torch.full((words_of(full) + 9,), -7, dtype=torch.int32)
    own = {"keys": np.array([4, 5], np.uint32), "numbers": np.array([9], np.int32), "penalties": np.empty(0)}
    small, large = [np.array([1, 2], np.int32), np.array([3], np.int32)], np.array([2**31], np.uint32)
    pieces = [Group(small, 3), Group([], 0), Group([large], 1)]
    for _ in range(3):  # more often than there are buffers
        staging.copy(own | {"words": pieces}, inputs, padding)
        wanted = full | {"numbers": np.array([9, 1, 2, 3, 4], np.int32), "words": np.array([1, 2, 3, -(2**31)], np.int32)}
        wanted["keys"] = np.array([4, 5, *full["keys"][2:]], np.uint32)
        sent = staging.send(wanted)
        assert torch.equal(inputs[: words_of(wanted)], torch.cat([_aligned(sent[name]) for name in wanted]))
    staging.copy({}, inputs, padding)
    assert torch.equal(inputs[: words_of(full)], torch.cat([_aligned(each) for each in staging.send(full).values()]))


def test_groups_that_are_page_locked_follow_what_is_not() -> None:
    """Each may be an array or a tensor, and the memory that receives them larger."""
    head, masks, tokens = np.array([5, 6, 7], np.int32), np.array([8, 9], np.int32), torch.tensor([1, 2, 3], dtype=torch.int32)
    staging = Staging(CPU, 2)
    groups = [Group([np.array([4], np.int32)], 1), Group([tokens], 3, is_locked=True), Group([masks], 2, is_locked=True)]
    wanted = [5, 6, 7, 0, 4, 1, 2, 3, 8, 9]
    for into in (None, torch.full((16,), -7, dtype=torch.int32)):
        sent = staging.copy({"head": head, "words": groups}, into)
        assert sent[: len(wanted)].tolist() == wanted
        assert into is None or into[len(wanted) :].tolist() == [-7] * 6
        assert staging.send({"head": head, "words": groups}, into)["words"].tolist() == wanted[4:]


def _aligned(sent: torch.Tensor) -> torch.Tensor:
    words = sent.view(torch.int32)
    return torch.cat((words, torch.zeros(-len(words) % 4, dtype=torch.int32)))


def test_results_of_another_shape_get_memory_of_that_shape() -> None:
    marks = Marks(None, None, torch.zeros(64, dtype=torch.uint8))
    shapes = ((2, 3), (2, 3), (6,), (2, 8), (2, 3))
    for told in [torch.ones(shape, dtype=torch.int32) for shape in shapes] + [torch.ones(2, 3)]:
        room = marks.room_for(told)
        assert (room.shape, room.dtype) == (told.shape, told.dtype)
        assert room.data_ptr() == marks.room_for(told).data_ptr()
