"""Makes all scheduling decisions. A decision depends on its inputs alone: the code uses no torch, asyncio, clock or I/O. `node`
places models on devices (in the daemon); `batch` picks the tokens of each step (in the engine).

Part of hearthd.
"""
