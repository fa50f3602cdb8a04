"""The parameters of a generated trace. This module imports little, because every `hearth` command shows its defaults as help."""

from __future__ import annotations

from dataclasses import dataclass

ARRIVALS = ("bursty", "poisson")


@dataclass(slots=True, frozen=True)
class TraceShape:
    """The parameters of a generated trace of requests. The model of rank k (from 1) gets a share of the requests proportional to
    k^-zipf; ranks are given to models at random. input_tokens, output_tokens: (least, most), between which the lengths of prompts
    and outputs are sampled uniformly, both included.

    arrivals "bursty": each model is requested at random moments in phases of burst_s seconds on average (exponential), which take
    up active_share of the time (a Markov-modulated Poisson process whose number of requests is given). "poisson": at random moments
    over the whole time."""

    models: tuple[str, ...]
    requests_per_s: float = 2.0
    duration_s: float = 1200.0
    zipf: float = 1.0
    arrivals: str = "bursty"
    burst_s: float = 30.0
    active_share: float = 0.2
    input_tokens: tuple[int, int] = (16, 128)
    output_tokens: tuple[int, int] = (16, 128)
    seed: int = 1
