"""Limits the memory that torch may take of a GPU besides the chunks to the work space that the daemon planned for, plus what models
keep between steps. If a step needs more, its requests fail; otherwise it would take memory on which another process or the driver
counts.
"""

from __future__ import annotations

import torch

# Torch may keep this much for all models' graphs and block tables. It is a third of what the default budget leaves of a GPU
# (config/devices.py). The rest is for the context, what libraries load, and graph executables, which torch does not count.
KEPT_BYTES = 512 << 20


def limit_torch(work_space_bytes: int, index: int = 0) -> int:
    """Limits torch's allocations on device `index` to work_space_bytes + KEPT_BYTES, for the life of the process. Allocations
    beyond that raise torch.OutOfMemoryError, after torch has given back what it keeps for later. Returns the limit in bytes."""
    total_bytes = torch.cuda.mem_get_info(index)[1]
    limit_bytes = min(total_bytes, work_space_bytes + KEPT_BYTES)
    torch.cuda.set_per_process_memory_fraction(limit_bytes / total_bytes, index)
    return limit_bytes
