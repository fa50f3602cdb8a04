"""The long-running process: HTTP, control socket, dispatcher, engines' supervision. Never imports torch. Read `main` first.

Part of hearthd.
"""
