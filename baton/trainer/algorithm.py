"""The [algorithm] section of a recipe: the objective, and presets named after the algorithms of papers.

A preset is a set of values for keys of [algorithm] and for some keys of [rollout]. A recipe may override any of these
values. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from baton.settings import Settings

Aggregation = Literal["sequence_mean", "token_mean", "sequence_sum", "length_constant"]
AdvantageName = Literal["group_std", "group_mean", "leave_one_out", "return_to_go", "gae"]
ObjectiveName = Literal["clipped", "gspo", "cispo", "policy_gradient"]
CorrectionName = Literal["none", "bypass", "token_tis", "sequence_tis", "icepop", "opsm", "second_moment"]
KlEstimator = Literal["k1", "k2", "k3"]

GROUP_RELATIVE = frozenset({"group_std", "group_mean", "leave_one_out"})
"""Advantage estimators that compare the episodes of a group, and therefore need two scored episodes in each group."""


class AlgorithmSettings(Settings):
    """[algorithm] The optimisation objective. At the top of a recipe, `algorithm = "dapo"` is short for this section
    with only `name = "dapo"`."""

    name: str = "grpo"
    """Name of the preset, which supplies values for the keys below that the recipe does not set. `baton algorithms`
    lists the presets."""
    objective: ObjectiveName = "clipped"
    """Surrogate objective: `clipped` (PPO, GRPO, DAPO), `gspo`, `cispo` or `policy_gradient` (no clip)."""
    advantage: AdvantageName = "group_std"
    """`group_std` (GRPO), `group_mean` (Dr.GRPO), `leave_one_out` (RLOO), `return_to_go` (REINFORCE++), `gae` (PPO)."""
    turn_rewards: bool = False
    """Give each token of a multi-turn episode the sum of the rewards of its own turn and of all later turns, discounted
    by the task's `discount`. False gives all tokens the reward of the whole episode."""
    normalize_advantages: bool = False
    """Normalise advantages to mean 0 and standard deviation 1 (divisor N) over the N policy tokens of the batch."""
    aggregation: Aggregation = "sequence_mean"
    """How token losses are combined: `sequence_mean` weights episodes equally (GRPO); `token_mean` weights tokens
    equally (DAPO); `sequence_sum` sums over the tokens of each episode (RLOO); `length_constant` divides the sum of
    each episode by rollout.max_new_tokens (Dr.GRPO)."""
    clip_low: float = Field(default=0.2, gt=0, le=1)
    """Lower clip: the ratio of current to proximal probability (with the correction `bypass`, to behavior probability)
    is at least 1 − clip_low. The value 1 disables the lower clip."""
    clip_high: float = Field(default=0.2, gt=0)
    """Upper clip: the ratio is at most 1 + clip_high. A value above clip_low (0.28 in DAPO) favours rare tokens."""
    num_minibatches: int = Field(default=1, gt=0)
    """Number of minibatches in a batch. A minibatch consists of whole groups, in the order of the batch, and gets one
    optimiser update."""
    num_epochs: int = Field(default=1, gt=0)
    """Number of passes of a train step over its batch."""
    correction: CorrectionName = "token_tis"
    """Correction for tokens that a policy other than the proximal policy sampled (docs/algorithms.md)."""
    weight_cap: float = Field(default=2.0, ge=1)
    """Maximum importance weight. Larger weights are truncated to this value; with `icepop`, tokens of larger weight are
    dropped instead. The default with `icepop` is 5, as in the IcePop paper."""
    weight_floor: float = Field(default=0.5, ge=0, le=1)
    """Minimum importance weight: `icepop` drops tokens of smaller weight; 0 disables this bound, as in AReaL."""
    opsm_delta: float = Field(default=1e-4, ge=0)
    """Threshold of `opsm` in nats per token: an episode of negative advantage is dropped when the mean of log
    π_behavior − log π_θ over its tokens exceeds the threshold. The default suits an engine that computes in float32; an
    engine that computes in bfloat16 needs a larger value."""
    second_moment_limit: float = Field(default=0.04, gt=0)
    """`second_moment` drops tokens until the mean squared log weight of the remaining tokens is at most this number."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Coefficient of the KL divergence to the reference model. With 0, no reference model is loaded."""
    kl_estimator: KlEstimator = "k3"
    """KL estimator: `k1` is the log ratio, `k2` is half the square of the log ratio, and `k3` (GRPO) is non-negative
    and at most 10 nats. In the loss, use `k2` or `k3`, because the gradient of `k1` has mean 0."""
    kl_in: Literal["loss", "reward"] = "loss"
    """`loss` adds the KL divergence to the loss; `reward` subtracts the divergence from the reward of each token. The
    run warns if `reward` is combined with the advantage `group_std`, which amplifies the divergence in groups of equal
    rewards."""
    reference: str | None = None
    """Directory of the reference model; by default the model that the run starts from."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Coefficient of the entropy bonus."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount factor per policy token in the advantage estimators `return_to_go` and `gae`."""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """λ of generalised advantage estimation."""
    critic: Literal["separate", "shared"] = "separate"
    """Critic for `advantage = "gae"`: `separate` is a second model, initialised as a copy of the policy; `shared` is a
    value head on the policy."""
    critic_lr: float | None = Field(default=None, gt=0)
    """Peak learning rate of a separate critic, with the policy's warm-up and decay. Default: ten times trainer.lr,
    because the value head is untrained at the start. A shared critic's head uses the policy's learning rate."""
    value_coef: float = Field(default=0.5, gt=0)
    """Coefficient of a shared critic's value loss in the total loss."""
    value_clip: float = Field(default=0.2, gt=0, allow_inf_nan=True)
    """Value clip. If a token's value has moved towards its return by more than this number since the start of the train
    step, the token gets no value gradient. `inf` disables the clip."""
    overlong_frac: float = Field(default=0.0, ge=0, lt=1)
    """DAPO's penalty for long responses: the reward decreases linearly, by `overlong_penalty` in total, over this last
    fraction of rollout.max_new_tokens. 0 disables the penalty."""
    overlong_penalty: float = Field(default=1.0, gt=0)
    """Amount by which the reward of a response of maximum length is reduced."""
    overlong_filter: bool = False
    """Exclude from the gradient all trajectories that reached the maximum length. Excluded trajectories still count in
    their group's statistics (mean and standard deviation of rewards)."""

    @model_validator(mode="before")
    @classmethod
    def _from_preset(cls, given: Any) -> Any:
        preset = preset_of(given)
        given = {"name": given} if isinstance(given, str) else given
        if preset is None or not isinstance(given, dict):
            return given
        correction = CORRECTION_SETS.get(given.get("correction", ""), {})
        return {**preset.sets, **correction, **given}

    @field_validator("name")
    @classmethod
    def _is_known(cls, name: str) -> str:
        if name not in PRESETS:
            raise ValueError(f"allowed are {', '.join(PRESETS)}")
        return name

    @model_validator(mode="after")
    def _fits_together(self) -> AlgorithmSettings:
        if self.objective == "gspo" and self.correction == "bypass":
            raise ValueError(
                "correction: got 'bypass', but GSPO's ratio is a mean over tokens of different versions; allowed are "
                "the other corrections, such as 'token_tis', which apply behavior → proximal as a separate weight"
            )
        if self.objective == "gspo" and self.has_token_advantages:
            cause = "turn_rewards = true" if self.turn_rewards else f"advantage = {self.advantage!r}"
            raise ValueError(
                f"objective: gspo gives a trajectory one ratio and one advantage, but with {cause} the advantage "
                "differs from token to token; allowed are group_std, group_mean and leave_one_out without turn_rewards"
            )
        return self

    @property
    def has_token_advantages(self) -> bool:
        """Return whether advantages may differ between the tokens of a trajectory."""
        discounts = self.advantage == "return_to_go" and (self.gamma < 1 or self.has_reward_kl)
        return self.advantage == "gae" or discounts or self.turn_rewards

    @property
    def compares_episodes(self) -> bool:
        """Return whether a ratio or weight is computed from all tokens of an episode, over all its paths."""
        return self.objective == "gspo" or self.correction in ("sequence_tis", "opsm")

    @property
    def needs_model_for_advantages(self) -> bool:
        """Return whether advantages need a forward pass, for a critic's values or the KL divergence in the reward."""
        return self.advantage == "gae" or self.has_reward_kl

    @property
    def has_reward_kl(self) -> bool:
        """Return whether a KL divergence is subtracted from the reward."""
        return self.kl_coef > 0 and self.kl_in == "reward"

    @property
    def has_loss_kl(self) -> bool:
        """Return whether a KL divergence is a term of the loss."""
        return self.kl_coef > 0 and self.kl_in == "loss"

    @property
    def is_flat(self) -> bool:
        """Return whether the loss has no gradient at tokens of advantage 0."""
        return not (self.has_loss_kl or self.entropy_coef or self.advantage == "gae")

    @property
    def trains_equal_rewards(self) -> bool:
        """Return whether trajectories get a gradient if all rewards of their group are equal."""
        is_zero = self.advantage in GROUP_RELATIVE and not (self.has_reward_kl or self.normalize_advantages)
        return not (self.is_flat and is_zero)

    @property
    def needs_all_tokens(self) -> bool:
        """Return whether an update depends on the logprobs of episodes whose advantages are all 0."""
        return not self.is_flat or self.needs_model_for_advantages or self.correction == "second_moment"

    @property
    def fewest_judged(self) -> int:
        """Minimum number of scored trajectories in a group that is trained."""
        return 2 if self.advantage in GROUP_RELATIVE else 1

    @property
    def num_updates(self) -> int:
        """Number of optimiser updates per train step: num_minibatches × num_epochs."""
        return self.num_minibatches * self.num_epochs

    @property
    def overrides(self) -> dict[str, Any]:
        """Keys whose values differ from the values of the preset."""
        preset = AlgorithmSettings(name=self.name)
        return {key: value for key, value in self if value != getattr(preset, key)}

    def notes(self, rollout: Mapping[str, Any]) -> list[str]:
        """Return notes on these settings for the user. `rollout`: the keys of [rollout]."""
        found = []
        changed = self.overrides
        for key, value in PRESETS[self.name].rollout.items():
            if rollout[key] == value:
                found.append(f"algorithm {self.name} sets rollout.{key} = {value!r}")
            else:
                changed[f"rollout.{key}"] = rollout[key]
        if changed:
            values = ", ".join(f"{key} = {value!r}" for key, value in changed.items())
            found.append(f"algorithm {self.name}, but with {values}")
        asks_to_clip = self.overrides.keys() & {"clip_low", "clip_high", "num_minibatches", "num_epochs"}
        ratio_is_one = self.num_updates == 1 and self.correction != "bypass"
        if asks_to_clip and ratio_is_one and self.objective != "policy_gradient":
            found.append(
                "one update per train step: every ratio to the proximal policy is 1, so clipping has no effect "
                "(algorithm.num_minibatches, algorithm.num_epochs)"
            )
        if self.has_loss_kl and self.kl_estimator == "k1":
            found.append(
                "algorithm.kl_estimator = 'k1' in the loss has a gradient of mean 0, so it does not keep the policy "
                "near the reference: use k2 or k3"
            )
        if self.has_reward_kl and self.advantage == "group_std":
            found.append(
                "algorithm.kl_in = 'reward' with advantage = 'group_std': in a group of equal rewards only the KL "
                "differs. Division by its standard deviation turns even tiny differences (such as 5e-4) into "
                "advantages of about ±1; use kl_in = 'loss', or advantage = 'group_mean' or 'leave_one_out', which do "
                "not divide"
            )
        return found


@dataclass(frozen=True, slots=True)
class Preset:
    """An algorithm from a paper, as values of `AlgorithmSettings`."""

    paper: str
    """arXiv id."""
    idea: str
    updates: str
    """Number of optimiser updates per batch in the paper."""
    sets: Mapping[str, Any] = field(default_factory=dict)
    """Keys of [algorithm] that differ from the defaults."""
    rollout: Mapping[str, Any] = field(default_factory=dict)
    """Keys of [rollout] that are part of the algorithm. Values in the recipe take precedence."""


CORRECTION_SETS: Mapping[str, Mapping[str, Any]] = {"icepop": {"weight_floor": 0.5, "weight_cap": 5.0}}
"""Value of `algorithm.correction` → values that the paper of this correction gives for other keys of [algorithm]."""

PRESETS: Mapping[str, Preset] = {
    "grpo": Preset(
        "2402.03300",
        "Rewards standardised within the group replace a critic.",
        "1; the paper also has kl_coef 0.04, which later work omits",
    ),
    "dr_grpo": Preset(
        "2503.20783",
        "GRPO without its biases: no division by the standard deviation or by the response's length.",
        "not fixed by the objective; 1 here",
        {"advantage": "group_mean", "aggregation": "length_constant"},
    ),
    "dapo": Preset(
        "2503.14476",
        "A higher upper clip, equal weight of all tokens, a soft length penalty, no training on truncated responses.",
        "16 (512 prompts × 16 in minibatches of 512)",
        {
            "aggregation": "token_mean",
            "clip_high": 0.28,
            "num_minibatches": 16,
            "overlong_frac": 0.2,
            "overlong_filter": True,
        },
        {"dynamic_sampling": True},
    ),
    "gspo": Preset(
        "2507.18071",
        "The clip applies to one ratio per episode, the geometric mean of its tokens' ratios.",
        "4",
        {"objective": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "num_minibatches": 4},
    ),
    "cispo": Preset(
        "2506.13585",
        "The clip bounds the importance weight and not the gradient, so that every token keeps a gradient.",
        "16",
        {"objective": "cispo", "aggregation": "token_mean", "clip_low": 1.0, "clip_high": 4.0, "num_minibatches": 16},
    ),
    "rloo": Preset(
        "2402.14740",
        "REINFORCE with the mean reward of the group's other trajectories as baseline; a response is one action.",
        "1",
        {"objective": "policy_gradient", "advantage": "leave_one_out", "aggregation": "sequence_sum"},
    ),
    "reinforce_pp": Preset(
        "2501.03262",
        "PPO's clip without group or critic: returns standardised over the tokens of the whole batch.",
        "several minibatches, number not given; 4 here",
        {
            "advantage": "return_to_go",
            "normalize_advantages": True,
            "aggregation": "token_mean",
            "num_minibatches": 4,
            "kl_estimator": "k1",
            "kl_in": "reward",
        },
    ),
    "reinforce_pp_baseline": Preset(
        "2501.03262",
        "REINFORCE++ with the group's mean reward as the baseline, for several trajectories per prompt.",
        "several minibatches, number not given; 4 here",
        {
            "advantage": "group_mean",
            "normalize_advantages": True,
            "aggregation": "token_mean",
            "num_minibatches": 4,
            "kl_estimator": "k2",
        },
    ),
    "ppo": Preset(
        "1707.06347",
        "A critic estimates the expected return at each token (GAE); the clip bounds the update.",
        "8 minibatches, one epoch, in InstructGPT (2203.02155)",
        {
            "advantage": "gae",
            "normalize_advantages": True,
            "aggregation": "token_mean",
            "num_minibatches": 8,
            "kl_estimator": "k1",
            "kl_in": "reward",
        },
    ),
    "decoupled_ppo": Preset(
        "2110.00641",
        "The clip is relative to the policy at the start of the train step; importance weights correct older samples, "
        "and weights above 5 drop the token (AReaL, 2505.24298).",
        "4 minibatches in AReaL",
        {
            "aggregation": "token_mean",
            "num_minibatches": 4,
            "correction": "icepop",
            "weight_floor": 0.0,
            "weight_cap": 5.0,
        },
    ),
}
"""Value of `algorithm.name` → preset; the first is the default."""


def preset_of(algorithm: Any) -> Preset | None:
    """Return the preset named by `algorithm` (a name, a mapping or settings), or None if it is unknown."""
    name = algorithm.get("name", "grpo") if isinstance(algorithm, Mapping) else getattr(algorithm, "name", algorithm)
    return PRESETS.get(name) if isinstance(name, str) else None
