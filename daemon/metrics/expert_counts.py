"""Adds up how many tokens have passed through each expert of each model, as the engines report it, and computes how evenly the
tokens are spread over the experts.
"""

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
    """The numbers of tokens that have passed through experts since the daemon's start; a token counts once for each expert.
    of_device: (model, device) -> tokens. layers: model -> the tokens of each expert of each layer. If a model's files change and
    with them its number of experts, its entry in `layers` starts again from 0."""

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
        """Yields (model, imbalance) for each model with counts. The imbalance is the tokens of the busiest expert divided by those
        of the mean expert, over all layers; 1.0 if all experts had equally many."""
        for model, layers in self.layers.items():
            yield model, imbalance(layers.values())

    def report(self, names: Iterable[str]) -> dict[str, Any]:
        """Returns the counts of a model as a JSON object: its tokens, imbalance, layers and devices. names: the model's replicas,
        whose counts are added up."""
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
        """Returns how many tokens have passed through each expert of each layer of a model. names: the model's replicas, whose
        counts are added up."""
        total: Layers = {}
        for name in names:
            for layer, counts in self.layers.get(name, {}).items():
                before = total.get(layer, array("q", bytes(8 * len(counts))))
                if len(before) == len(counts):  # otherwise this replica's counts are those of other files
                    total[layer] = array("q", map(sum, zip(before, counts, strict=True)))
        return total


def imbalance(layers: Iterable[array[int]]) -> float:
    """Returns the tokens of the busiest expert, summed over all layers, divided by those of the mean expert, summed in the same
    way; 1.0 if there are no tokens. layers: for each layer, the tokens of each expert."""
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
