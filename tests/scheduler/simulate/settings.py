"""The settings of simulated engines in tests."""

from __future__ import annotations

from config.schema import NodeConfig
from daemon.simulate.scenario import step_settings

STEPS = step_settings(NodeConfig())
