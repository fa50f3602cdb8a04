"""Runs hearthd's long-lived daemon process: the HTTP API, the control socket, the dispatcher and the supervision of engine
processes.

It never imports torch. Start reading at `main`. Part of hearthd.
"""
