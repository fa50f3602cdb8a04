"""Runs an engine: the process that hosts all models of one device. The daemon imports only a few light modules of it, above all
`engine.protocol`. Start reading at engine/loop/worker.py.

Part of hearthd.
"""
