"""Adds up what the experts of models have computed, as their engines report it, and computes how evenly it is spread."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from engine.protocol import ExpertTokens
from scheduler.node.groups import by_rank

Layers = dict[int, "array[int]"]  # layer -> how many tokens have passed through each of its experts


@dataclass(slots=True)
class ExpertCounts:
    """Tokens at experts since the daemon's start: a token counts once at each expert that it passes through. of_device: by (model,
    device). layers: by model. A model whose number of experts changes, because its files do, begins anew in `layers`."""

    of_device: defaultdict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    layers: dict[str, Layers] = field(default_factory=dict)

    def add(self, device: str, message: ExpertTokens) -> None:
        new = memoryview(message.counts).cast("q")
        num_own, layers = len(new) // len(message.layers), self.layers.setdefault(message.model, {})
        if any(len(counts) != message.num_experts for counts in layers.values()):
            layers.clear()
        for number, layer in enumerate(message.layers):
            if (counts := layers.get(layer)) is None:
                counts = layers[layer] = array("q", bytes(8 * message.num_experts))
            for expert, tokens in enumerate(new[number * num_own : (number + 1) * num_own], message.first_expert):
                counts[expert] += tokens
        self.of_device[message.model, device] += sum(new)

    def imbalances(self) -> Iterator[tuple[str, float]]:
        """Yields each model with its imbalance."""
        for model, layers in self.layers.items():
            yield model, imbalance(layers.values())

    def report(self, names: Iterable[str]) -> dict[str, Any]:
        """Returns, as a JSON object, what the experts of a model have computed. names: the model's replicas, whose counts are added
        up."""
        names = list(names)
        total, devices = self.of_layers(names), dict[str, int]()
        for name in names:
            for (model, device), tokens in self.of_device.items():
                if model == name:
                    devices[device] = devices.get(device, 0) + tokens
        return {
            "tokens": sum(map(sum, total.values())),
            "imbalance": imbalance(total.values()),
            "layers": [_row(layer, counts) for layer, counts in sorted(total.items())],
            "devices": {device: devices[device] for device in sorted(devices, key=by_rank)},
        }

    def of_layers(self, names: Iterable[str]) -> Layers:
        """Returns how many tokens have passed through each expert of each layer of a model. names: as in `report`."""
        total: Layers = {}
        for name in names:
            for layer, counts in self.layers.get(name, {}).items():
                before = total.get(layer, array("q", bytes(8 * len(counts))))
                if len(before) == len(counts):  # otherwise this replica's counts are those of other files
                    total[layer] = array("q", map(sum, zip(before, counts, strict=True)))
        return total


def imbalance(layers: Iterable[array[int]]) -> float:
    """Returns by how much the busiest expert exceeds the mean expert: the sum over all layers of the busiest expert's tokens,
    divided by the sum of the mean expert's; 1.0 if there are no tokens. layers: the counts of each layer's experts."""
    most = mean = 0.0
    for counts in layers:
        most += max(counts)
        mean += sum(counts) / len(counts)
    return round(most / mean, 4) if mean else 1.0


def _row(layer: int, counts: array[int]) -> dict[str, Any]:
    return {
        "layer": layer,
        "tokens": sum(counts),
        "busiest": counts.index(max(counts)),
        "busiest_tokens": max(counts),
        "imbalance": imbalance([counts]),
        "num_unused": counts.count(0),
        "counts": counts.tolist(),
    }
