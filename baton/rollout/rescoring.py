"""Input and output of rescoring: computing the logprobs of reported tokens again, to verify a worker.

`engines/embedded/rescore.py` does the computation; this module needs no torch. Shapes: N policy tokens of one
trajectory under one policy version.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.types import SamplingParams, Trajectory


@dataclass(frozen=True, slots=True)
class Claim:
    """A trajectory as reported by a worker, with the sampling parameters and noise seed of its lease."""

    trajectory: Trajectory
    sampling: SamplingParams
    noise_seed: int


@dataclass(frozen=True, slots=True)
class Rescored:
    """The policy tokens of a `Claim` that were sampled under one version, and their scores under that version's
    weights."""

    name: str
    """Name of the trajectory: `group/sample`."""
    version: int
    temperature: float
    """Sampling temperature; 0 is greedy."""
    places: tuple[int, ...]
    """[N] Token positions after the prompt."""
    token_ids: tuple[int, ...]
    """[N] Ids of these tokens."""
    behavior_logprobs: tuple[float, ...]
    """[N] Reported logprobs, nats."""
    logprobs: tuple[float, ...]
    """[N] Recomputed logprobs at the sampling temperature, nats. If the worker reported a sampling mask, the logprobs
    are normalised over the mask."""
    draw_gaps: tuple[float, ...]
    """[N] Distance in log-odds (nats) between the uniform random number and the token's interval of the cumulative
    distribution function; 0 if the number selects the token. For greedy decoding: the largest logit minus the token's
    logit."""
    tail_masses: tuple[float, ...]
    """[N] Sum of the sampling probabilities of the token and of all tokens that are at most as likely as this token; 1
    for greedy decoding."""
    mask_gaps: tuple[float, ...] = ()
    """[N] Distance in nats between the reported sampling mask and the recomputed mask of top-k and top-p; 0 if the two
    masks are equal. Empty if the worker reported no masks."""
