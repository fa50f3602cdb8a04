"""Implements `hearth lend`: runs engines on this host's devices for a daemon on another host, which decides what these engines
do."""
