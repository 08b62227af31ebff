"""Input and output of rescoring a trajectory's tokens. Needs no torch; `engines/embedded/rescore.py` computes it.

N: policy tokens of one trajectory under one policy version.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.types import SamplingParams, Trajectory


@dataclass(frozen=True, slots=True)
class Claim:
    """A trajectory as a worker reported it, with the sampling parameters and noise seed of its lease."""

    trajectory: Trajectory
    sampling: SamplingParams
    noise_seed: int


@dataclass(frozen=True, slots=True)
class Rescored:
    """The policy tokens that a claim attributes to one version, scored by the weights of that version."""

    name: str
    """`group/sample` of the trajectory."""
    version: int
    temperature: float
    """0 is greedy."""
    places: tuple[int, ...]
    """[N] token positions after the prompt."""
    token_ids: tuple[int, ...]
    """[N]"""
    behavior_logprobs: tuple[float, ...]
    """[N] nats, as reported."""
    logprobs: tuple[float, ...]
    """[N] nats, the correct values up to rounding: at the sampling temperature, over the whole vocabulary."""
    draw_gaps: tuple[float, ...]
    """[N] nats. 0 where the keyed draw selects this token; otherwise the distance in log-odds from the draw to the
    token's interval of the distribution function. Greedy: the largest logit minus the token's logit."""
    tail_masses: tuple[float, ...]
    """[N] total probability, in the distribution sampled from, of all tokens that are not more likely than this one,
    itself included; 1 for greedy."""
