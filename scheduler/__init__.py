"""Pure decisions: no torch, no asyncio, no clock, no I/O. `node` places models (daemon process); `batch` picks tokens (engine process)."""
