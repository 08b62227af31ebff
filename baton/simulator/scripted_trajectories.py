"""Prompt lengths, response lengths and rewards of trajectories. Lengths and rewards depend only on the seed and on the
trajectory's ids. If two runs differ only in the decisions of the scheduler, their trajectories therefore have the same
lengths and rewards.

Lengths follow a `Lengths` distribution. Lengths within a group are correlated (`correlation`), because all responses to
a hard prompt tend to be long. `drift` changes the lengths during training. Alternatively, the lengths are taken from
the groups of a recorded run, in the same order. In this case, `correlation` and `drift` are not used.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
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
class RecordedGroup:
    """A group of a recorded run."""

    prompt: int
    lengths: tuple[int, ...]
    teaches: bool
    """Whether the rewards of the group's members differ."""


@dataclass(frozen=True, slots=True)
class TrajectoryWork:
    """Distributions of the lengths and rewards of trajectories."""

    prompt: Lengths
    output: Lengths
    correlation: float = 0.0
    """Correlation of the lengths within a group, 0 to 1. Each length is computed from a normally distributed score;
    this is the correlation between the scores of two members."""
    drift: float = 0.0
    """Growth of all lengths per train step, as a share of the initial lengths. Lengths never exceed the longest length
    of `output`."""
    trained_share: float = 1.0
    """Share of groups whose rewards differ."""
    recorded: tuple[RecordedGroup, ...] = ()
    """Groups of a recorded run. If groups are given, they replace the distributions. They are used in order; after the
    last group, the first is used again."""


@dataclass(frozen=True, slots=True)
class _Block:
    prompts: list[int]
    lengths: list[list[int]]
    teaches: list[bool]


class Script:
    """Lengths and rewards of one simulated run."""

    def __init__(self, work: TrajectoryWork, seed: int, batch_groups: int, group_size: int) -> None:
        self.work, self._seed = work, seed
        self._batch_groups, self._group_size, self._recorded = batch_groups, group_size, work.recorded
        self._blocks: OrderedDict[int, _Block] = OrderedDict()
        self._last: tuple[int, _Block] = (-1, _Block([], [], []))

    def prompt(self, group_id: int) -> int:
        if self._recorded:
            return self._recorded[group_id % len(self._recorded)].prompt
        return self._block(group_id).prompts[group_id % BLOCK]

    def length(self, group_id: int, sample_index: int) -> int:
        """Return the number of response tokens of the complete trajectory."""
        if self._recorded:
            lengths = self._recorded[group_id % len(self._recorded)].lengths
            return lengths[sample_index % len(lengths)]
        return self._block(group_id).lengths[group_id % BLOCK][sample_index]

    def limited(self, lease: Lease) -> Lease:
        """Return a lease whose limit is the scripted length of its trajectory."""
        known = lease.trajectory
        sampling = SamplingParams(self.length(known.group_id, known.sample_index))
        return Lease(lease.lease_id, known, sampling, lease.noise_seed, lease.version, lease.is_exact)

    def reward(self, group_id: int, sample_index: int) -> float:
        """Return a reward of 0 or 1. In a group without advantages, all members have the same reward."""
        if not self._teaches(group_id):
            return float(group_id % 2)
        return float(sample_index % 2)

    def _teaches(self, group_id: int) -> bool:
        if self._recorded:
            return self._recorded[group_id % len(self._recorded)].teaches
        return self._block(group_id).teaches[group_id % BLOCK]

    def _block(self, group_id: int) -> _Block:
        number = group_id // BLOCK
        if self._last[0] != number:
            if number not in self._blocks:
                self._blocks[number] = self._draw(number)
                if len(self._blocks) > KEPT_BLOCKS:
                    self._blocks.popitem(last=False)
            self._last = number, self._blocks[number]
        return self._last[1]

    def _draw(self, number: int) -> _Block:
        work, size = self.work, self._group_size
        shared = generator(self._seed, "length of groups", number).standard_normal(BLOCK)
        own = generator(self._seed, "length of trajectories", number).standard_normal((BLOCK, size))
        # the squares of the two weights sum to 1, so the score has variance 1
        score = work.correlation**0.5 * shared[:, None] + (1 - work.correlation) ** 0.5 * own
        step = (number * BLOCK + np.arange(BLOCK)) // self._batch_groups
        factor = np.maximum(1e-3, 1 + work.drift * step)[:, None]
        drawn = _pick(work.output, np.asarray(_NORMAL_CDF(score), dtype=float)) * factor
        lengths = np.clip(np.rint(drawn), 1, max(1, int(work.output.longest))).astype(int)
        prompts = _pick(work.prompt, generator(self._seed, "prompts", number).random(BLOCK))
        teaches = generator(self._seed, "rewards", number).random(BLOCK) < work.trained_share
        return _Block(np.maximum(1, np.rint(prompts)).astype(int).tolist(), lengths.tolist(), teaches.tolist())


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
