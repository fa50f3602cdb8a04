"""Lists the settings that a LoRA adapter may have in its table. In everything else an adapter follows the settings of its base
model.
"""

from __future__ import annotations

ALLOWED_FOR_ADAPTERS = ("aliases", "base")
