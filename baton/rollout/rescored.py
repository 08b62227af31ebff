"""What a second look at a trajectory's tokens is asked, and what it says. Needs no torch; `engines/rescore.py` looks.

`N` policy tokens of one trajectory under one policy version.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.types import SamplingParams, Trajectory


@dataclass(frozen=True, slots=True)
class Claim:
    """A trajectory as a worker reports it, with what its lease asked for."""

    trajectory: Trajectory
    sampling: SamplingParams
    noise_seed: int


@dataclass(frozen=True, slots=True)
class Rescored:
    """The policy tokens that a claim says are of one version, scored by the weights of that version."""

    name: str
    """Of the trajectory."""
    version: int
    temperature: float
    """0 is greedy."""
    places: tuple[int, ...]
    """[N] token positions after the prompt."""
    token_ids: tuple[int, ...]
    """[N]"""
    behavior_logprobs: tuple[float, ...]
    """[N] as reported."""
    logprobs: tuple[float, ...]
    """[N] as they should be, up to rounding: at the sampling temperature, over the whole vocabulary."""
    draw_gaps: tuple[float, ...]
    """[N] nats. 0 where the keyed draw selects this token; else how far the draw lies from the token's interval of the
    distribution function, in log-odds. Greedy: how far the token's logit lies below the largest."""
    tail_masses: tuple[float, ...]
    """[N] probability of all tokens that are no likelier than this one, itself included, where it was drawn from; 1
    where it is greedy."""
