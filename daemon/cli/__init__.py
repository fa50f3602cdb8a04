"""`hearth`: the operator's commands, http.client over the control socket; imports neither aiohttp nor torch."""
