"""What torch may take of a GPU beside the chunks: the work space that the daemon reckoned with, and what models keep between steps.
More is refused, and costs the step its requests: not the memory that another process, or the driver, counts on."""

from __future__ import annotations

import torch

# Of all models' graphs and block tables: half of what the default budget leaves of a GPU (config/devices.py); the context and what
# libraries load, which torch does not count, have the rest.
KEPT_BYTES = 512 << 20


def limit_torch(work_space_bytes: int, index: int = 0) -> int:
    """Holds torch's allocations on device `index` to so much beside KEPT_BYTES, from now on and for the life of the process. Beyond
    it they raise torch.OutOfMemoryError, once torch has given back what it keeps for later. Returns the limit, bytes."""
    total_bytes = torch.cuda.mem_get_info(index)[1]
    limit_bytes = min(total_bytes, work_space_bytes + KEPT_BYTES)
    torch.cuda.set_per_process_memory_fraction(limit_bytes / total_bytes, index)
    return limit_bytes
