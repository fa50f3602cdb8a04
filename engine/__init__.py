"""One process per device hosting every model placed there. The daemon imports only `engine.protocol`. Read `worker` first.

Part of hearthd.
"""
