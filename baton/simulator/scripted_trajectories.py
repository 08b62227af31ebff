"""Prompt lengths, response lengths and rewards of trajectories. Lengths and rewards depend only on the seed and on the
trajectory's ids. If two runs differ only in the decisions of the scheduler, their trajectories therefore have the same
lengths and rewards.

Lengths follow a `Lengths` distribution. Lengths within a group are correlated (`correlation`), because all responses to
a hard prompt tend to be long. `drift` changes the lengths during training. Alternatively, the lengths are taken from
the groups of a recorded run, in the same order. In this case, `correlation` and `drift` are not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from baton.simulator.seeds import generator
from baton.specs.workload import Lengths
from baton.types import Lease, Prompt, SamplingParams

BLOCK = 256
"""Number of groups that are drawn together."""
KEPT_BLOCKS = 256
"""Maximum number of cached blocks. A block that was dropped from the cache is drawn again, with the same numbers, when
it is needed."""
_NORMAL_CDF = np.frompyfunc(NormalDist().cdf, 1, 1)


@dataclass(frozen=True, slots=True)
class ScriptedGroup:
    """The prompt length and response lengths of a group, and whether the group has advantages."""

    prompt: int
    lengths: Sequence[int]
    """Number of response tokens of each member."""
    teaches: bool
    """Whether the rewards of the group's members differ."""


@dataclass(frozen=True, slots=True)
class TrajectoryWork:
    """Distributions of the lengths and rewards of trajectories."""

    prompt: Lengths
    output: Lengths
    correlation: float = 0.0
    """Correlation of the lengths within a group, 0 to 1. Each length is computed from a normally distributed score, and
    `correlation` is the correlation between the scores of two members."""
    drift: float = 0.0
    """Growth of all lengths per train step, as a share of the initial lengths. Lengths never exceed the longest length
    of `output`."""
    trained_share: float = 1.0
    """Share of groups whose rewards differ."""
    recorded: tuple[ScriptedGroup, ...] = ()
    """Groups of a recorded run, which replace the distributions. They are used in order; after the last group, the
    first is used again. Empty if the user asked for a `correlation` or a `drift` (`SimulationOptions`)."""


class Script:
    """Lengths and rewards of one simulated run."""

    def __init__(self, work: TrajectoryWork, seed: int, batch_groups: int, group_size: int) -> None:
        self.work, self._seed = work, seed
        self._batch_groups, self._group_size = batch_groups, group_size
        self._block = lru_cache(KEPT_BLOCKS)(self._draw)

    def prompt(self, group_id: int) -> int:
        return self._group(group_id).prompt

    def length(self, group_id: int, sample_index: int) -> int:
        """Return the number of response tokens of the complete trajectory."""
        lengths = self._group(group_id).lengths
        return lengths[sample_index % len(lengths)]

    def limited(self, lease: Lease) -> Lease:
        """Return a lease whose limit is the scripted length of its trajectory."""
        known = lease.trajectory
        sampling = SamplingParams(self.length(known.group_id, known.sample_index))
        return Lease(lease.lease_id, known, sampling, lease.noise_seed, lease.version, lease.is_exact)

    def reward(self, group_id: int, sample_index: int) -> float:
        """Return a reward of 0 or 1. In a group without advantages, all members have the same reward."""
        return float((sample_index if self._group(group_id).teaches else group_id) % 2)

    def _group(self, group_id: int) -> ScriptedGroup:
        if recorded := self.work.recorded:
            return recorded[group_id % len(recorded)]
        return self._block(group_id // BLOCK)[group_id % BLOCK]

    def _draw(self, number: int) -> list[ScriptedGroup]:
        """Draw the groups from `number · BLOCK` to `(number + 1) · BLOCK - 1`."""
        work, size = self.work, self._group_size
        shared = generator(self._seed, "length of groups", number).standard_normal(BLOCK)
        own = generator(self._seed, "length of trajectories", number).standard_normal((BLOCK, size))
        # the squares of the two weights sum to 1, so the score has variance 1
        score = work.correlation**0.5 * shared[:, None] + (1 - work.correlation) ** 0.5 * own
        step = (number * BLOCK + np.arange(BLOCK)) // self._batch_groups
        factor = np.maximum(1e-3, 1 + work.drift * step)[:, None]
        drawn = _pick(work.output, np.asarray(_NORMAL_CDF(score), dtype=float)) * factor
        lengths = np.clip(np.rint(drawn), 1, max(1, int(work.output.longest))).astype(int)
        prompts = np.maximum(1, np.rint(_pick(work.prompt, generator(self._seed, "prompts", number).random(BLOCK))))
        teaches = generator(self._seed, "rewards", number).random(BLOCK) < work.trained_share
        return list(map(ScriptedGroup, prompts.astype(int).tolist(), lengths.tolist(), teaches.tolist()))


class ScriptedPrompts:
    """The `PromptSource` of a simulated run."""

    def __init__(self, script: Script) -> None:
        self._script, self.position = script, {"prompts": 0}

    def take(self) -> tuple[Prompt, tuple[int, ...]]:
        number = self.position["prompts"]
        self.position["prompts"] = number + 1
        return Prompt(str(number), "simulated", ()), tuple(range(self._script.prompt(number)))


def _pick(lengths: Lengths, shares: NDArray[np.float64]) -> NDArray[np.float64]:
    values = np.asarray(lengths.values)
    found: NDArray[np.float64] = values[np.minimum((shares * len(values)).astype(int), len(values) - 1)]
    return found
