"""[algorithm] of a recipe: which objective is optimised, and the presets that carry the names of papers.

A preset is nothing but values for the keys below, and for some keys of [rollout]; a recipe may override any of them.
Needs no torch.
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
"""Advantages that compare the trajectories of a group, and need two of them."""


class AlgorithmSettings(Settings):
    """[algorithm] what is optimised. `algorithm = "dapo"` at the top of a recipe is short for its name alone."""

    name: str = "grpo"
    """Preset: what every key below is unless the recipe gives it; `baton algorithms` lists them."""
    objective: ObjectiveName = "clipped"
    """The surrogate: `clipped` (PPO, GRPO, DAPO), `gspo`, `cispo` or `policy_gradient` (no clip)."""
    advantage: AdvantageName = "group_std"
    """`group_std` (GRPO), `group_mean` (Dr.GRPO), `leave_one_out` (RLOO), `return_to_go` (REINFORCE++), `gae` (PPO)."""
    normalize_advantages: bool = False
    """Whether advantages are brought to mean 0 and standard deviation 1 (divisor N) over the N policy tokens of the
    batch."""
    aggregation: Aggregation = "sequence_mean"
    """Each trajectory the same weight (GRPO); `token_mean` each token (DAPO); `sequence_sum` the sum over tokens per
    trajectory (RLOO); `length_constant` that sum divided by rollout.max_new_tokens (Dr.GRPO)."""
    clip_low: float = Field(default=0.2, gt=0, le=1)
    """The ratio of current to proximal probability is held above 1 − clip_low; 1 switches this side off."""
    clip_high: float = Field(default=0.2, gt=0)
    """… and below 1 + clip_high; a larger one than clip_low (0.28 in DAPO) lets rare tokens grow faster."""
    num_minibatches: int = Field(default=1, gt=0)
    """Parts of a batch (whole groups, in order), each giving one optimiser update."""
    num_epochs: int = Field(default=1, gt=0)
    """Times that a train step goes through its batch."""
    correction: CorrectionName = "token_tis"
    """How tokens sampled by another policy than the one that is trained are weighted (docs/algorithms.md)."""
    weight_cap: float = Field(default=2.0, ge=1)
    """Largest importance weight: truncated to it, or by `icepop` dropped above it (5 unless given, as IcePop has)."""
    weight_floor: float = Field(default=0.5, ge=0, le=1)
    """Smallest importance weight that `icepop` keeps; 0 for no lower bound (AReaL)."""
    opsm_delta: float = Field(default=1e-4, ge=0)
    """Nats per token by which the policy may have left a bad trajectory behind before `opsm` drops it; 1e-4 is for
    engines that agree with the trainer to float32, bfloat16 engines want more."""
    second_moment_limit: float = Field(default=0.04, gt=0)
    """`second_moment` drops tokens until the mean square of the others' log weights is at most this."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence to the reference model; 0 loads none."""
    kl_estimator: KlEstimator = "k3"
    """`k1` log ratio, `k2` half its square, `k3` positive, at most 10 (GRPO). In the loss k1's gradient has mean 0."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Whether the KL is a term of the loss, or is taken off the reward token by token; there `group_std` scales it up
    where a group's rewards are equal, and the run warns."""
    reference: str | None = None
    """Directory of the reference model; without it, the model the run begins with."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per policy token, of `return_to_go` and `gae`."""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """λ of generalised advantage estimation."""
    critic: Literal["separate", "shared"] = "separate"
    """Critic of `gae`: a model of its own that begins as a copy of the policy, or a value head on the policy."""
    critic_lr: float | None = Field(default=None, gt=0)
    """Learning rate of a separate critic, with the policy's warm-up and decay; without it ten times trainer.lr, since a
    critic begins knowing nothing. A shared one's head has the policy's."""
    value_coef: float = Field(default=0.5, gt=0)
    """Weight of the value loss beside the policy's, of a shared critic."""
    value_clip: float = Field(default=0.2, gt=0)
    """Values may move by this much from those at the start of the train step before their gain is cut; `inf` never."""
    overlong_frac: float = Field(default=0.0, ge=0, lt=1)
    """Last share of rollout.max_new_tokens over which the reward falls linearly by `overlong_penalty` (DAPO)."""
    overlong_penalty: float = Field(default=1.0, gt=0)
    """What a response of the longest length loses."""
    overlong_filter: bool = False
    """Whether trajectories cut off at the longest length get no gradient; they stay in their group's statistics."""

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
                "the others, such as 'token_tis', which weigh behavior to proximal apart"
            )
        if self.objective == "gspo" and self.has_token_advantages:
            raise ValueError(
                f"objective: gspo gives a trajectory one ratio and one advantage, but advantage = {self.advantage!r} "
                "differs from token to token; allowed are group_std, group_mean and leave_one_out"
            )
        return self

    @property
    def has_token_advantages(self) -> bool:
        """Whether advantages differ within a trajectory."""
        return self.advantage == "gae" or (self.advantage == "return_to_go" and (self.gamma < 1 or self.has_reward_kl))

    @property
    def needs_model_for_advantages(self) -> bool:
        """Whether advantages need a forward pass: a critic's values, or a KL divergence in the reward."""
        return self.advantage == "gae" or self.has_reward_kl

    @property
    def has_reward_kl(self) -> bool:
        """Whether a KL divergence is taken off the reward."""
        return self.kl_coef > 0 and self.kl_in == "reward"

    @property
    def has_loss_kl(self) -> bool:
        """Whether a KL divergence is a term of the loss."""
        return self.kl_coef > 0 and self.kl_in == "loss"

    @property
    def fewest_judged(self) -> int:
        """Judged trajectories that a group needs to be trained."""
        return 2 if self.advantage in GROUP_RELATIVE else 1

    @property
    def num_updates(self) -> int:
        """Optimiser updates of a train step: num_minibatches × num_epochs."""
        return self.num_minibatches * self.num_epochs

    @property
    def overrides(self) -> dict[str, Any]:
        """Keys whose values are not the preset's."""
        preset = AlgorithmSettings(name=self.name)
        return {key: value for key, value in self if value != getattr(preset, key)}

    def notes(self, rollout: Mapping[str, Any]) -> list[str]:
        """Return what a user should know of this choice before the run, in sentences; `rollout` are the keys there."""
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
        if self.num_updates == 1 and self.correction != "bypass" and self.objective != "policy_gradient":
            found.append(
                "one update per train step: every ratio to the proximal policy is 1 and clipping is idle "
                "(algorithm.num_minibatches, algorithm.num_epochs)"
            )
        if self.has_loss_kl and self.kl_estimator == "k1":
            found.append("algorithm.kl_estimator = 'k1' in the loss has a gradient of mean 0: k2 or k3 hold the policy")
        if self.has_reward_kl and self.advantage == "group_std":
            found.append(
                "algorithm.kl_in = 'reward' with advantage = 'group_std': in a group of equal rewards only the KL "
                "differs, and divided by its own deviation it gives advantages of about ±1 however small it is (such "
                "as 5e-4); use kl_in = 'loss', or advantage = 'group_mean' or 'leave_one_out', which keep its size"
            )
        return found


@dataclass(frozen=True, slots=True)
class Preset:
    """An algorithm of the literature as values of `AlgorithmSettings`."""

    paper: str
    """arXiv id."""
    idea: str
    """In one sentence."""
    updates: str
    """What its paper says of optimiser updates per batch."""
    sets: Mapping[str, Any] = field(default_factory=dict)
    """Keys whose values are not the defaults."""
    rollout: Mapping[str, Any] = field(default_factory=dict)
    """Keys of [rollout] that are part of the algorithm. A recipe that gives them has its own."""


CORRECTION_SETS: Mapping[str, Mapping[str, Any]] = {"icepop": {"weight_floor": 0.5, "weight_cap": 5.0}}
"""Correction that a recipe names → keys that its paper gives with it."""

PRESETS: Mapping[str, Preset] = {
    "grpo": Preset(
        "2402.03300",
        "Rewards standardised within the group take the place of a critic.",
        "1; the paper also has kl_coef 0.04, which later work leaves out",
    ),
    "dr_grpo": Preset(
        "2503.20783",
        "GRPO without its biases: no division by the deviation, nor by each response's own length.",
        "not fixed by the objective; 1 here",
        {"advantage": "group_mean", "aggregation": "length_constant"},
    ),
    "dapo": Preset(
        "2503.14476",
        "Clip higher than lower, every token the same weight, long responses penalised softly, cut ones left out.",
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
        "One ratio per trajectory, the geometric mean of its tokens', is clipped as a whole.",
        "4",
        {"objective": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "num_minibatches": 4},
    ),
    "cispo": Preset(
        "2506.13585",
        "The importance weight is clipped, not the gradient, so that no token is silenced.",
        "16",
        {
            "objective": "cispo",
            "aggregation": "token_mean",
            "clip_low": 1.0,
            "clip_high": 4.0,
            "num_minibatches": 16,
        },
    ),
    "rloo": Preset(
        "2402.14740",
        "REINFORCE with the other trajectories' mean reward as the baseline; the whole response is one action.",
        "1",
        {"objective": "policy_gradient", "advantage": "leave_one_out", "aggregation": "sequence_sum"},
    ),
    "reinforce_pp": Preset(
        "2501.03262",
        "No group and no critic: rewards to go, standardised over the tokens of the whole batch, with PPO's clip.",
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
        "A critic says what was to be expected at each token (GAE); the clip bounds the step.",
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
        "AReaL (2505.24298): the clip is around the policy of the step's start; older samples are weighted to it, or "
        "dropped where the weight exceeds 5.",
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
"""Name in `algorithm = "..."` → what it sets; the first is the default."""


def preset_of(algorithm: Any) -> Preset | None:
    """Return the preset that a recipe's `algorithm` names, however it is given; None for an unknown name."""
    name = algorithm.get("name", "grpo") if isinstance(algorithm, Mapping) else getattr(algorithm, "name", algorithm)
    return PRESETS.get(name) if isinstance(name, str) else None
