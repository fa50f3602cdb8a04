"""The engine: one process per device, which hosts every model placed there. The daemon imports only a few light modules of it,
above all `engine.protocol`. Start reading at engine/loop/worker.py.

Part of hearthd.
"""
