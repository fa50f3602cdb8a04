"""Answers the questions that load balancers and monitoring ask the node."""

from __future__ import annotations

from daemon.metrics import page
from daemon.node.node import NodeParts
from daemon.operate import metrics_now


class NodeHealth:
    """Answers the API's questions about the node's health: implements HealthPort (daemon/contracts.py)."""

    def __init__(self, node: NodeParts) -> None:
        self._node = node
        self.health, self.ready, self.probe = node.health, node.ready, node.probe
        self.num_open, self.residents = node.num_open, node.residents

    def metrics(self, model: str | None = None) -> bytes:
        return page.render(self._node.metric, metrics_now.now(self._node, model), model)
