"""Pure decisions: no torch, asyncio, clock or I/O. `node` places models (daemon); `batch` picks tokens (engine).

Part of hearthd.
"""
