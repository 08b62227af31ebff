"""Recipe sections of training. Needs no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from baton.policy.settings import DTypeName
from baton.settings import Settings
from baton.trainer.advantages import ESTIMATORS

Aggregation = Literal["sequence_mean", "token_mean"]
Decay = Literal["constant", "linear", "cosine"]
CorrectionName = Literal["none", "bypass", "token_tis", "sequence_tis", "icepop", "opsm", "second_moment"]


class AlgorithmSettings(Settings):
    """[algorithm] what is optimised."""

    name: str = "grpo"
    """Which advantages and which objective."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """The ratio of new to proximal probability is held above 1 − clip_low."""
    clip_high: float = Field(default=0.2, gt=0)
    """… and below 1 + clip_high; a larger one than clip_low (0.28 in DAPO) lets rare tokens grow faster."""
    aggregation: Aggregation = "sequence_mean"
    """`sequence_mean` gives every trajectory the same weight (GRPO), `token_mean` every token (DAPO)."""
    correction: CorrectionName = "token_tis"
    """How tokens sampled by another policy than the one that is trained are weighted (docs/algorithms.md)."""
    weight_cap: float = Field(default=2.0, ge=1)
    """Largest importance weight: truncated to it, or by `icepop` dropped above it."""
    weight_floor: float = Field(default=0.5, ge=0, le=1)
    """Smallest importance weight that `icepop` keeps."""
    opsm_delta: float = Field(default=1e-4, ge=0)
    """Nats per token by which the policy may have left a bad trajectory behind before `opsm` drops it."""
    second_moment_limit: float = Field(default=0.04, gt=0)
    """`second_moment` drops tokens until the mean square of the others' log weights is at most this."""

    @field_validator("name")
    @classmethod
    def _is_known(cls, name: str) -> str:
        if name not in ESTIMATORS:
            raise ValueError(f"allowed are {', '.join(sorted(ESTIMATORS))}")
        return name


class TrainerSettings(Settings):
    """[trainer] how the policy is updated."""

    lr: float = Field(default=1e-6, gt=0)
    """Peak learning rate of AdamW."""
    warmup_steps: int = Field(default=0, ge=0)
    """Train steps over which the learning rate rises linearly."""
    decay: Decay = "constant"
    """Course of the learning rate after the warm-up, over the run's train steps."""
    min_lr_frac: float = Field(default=0.0, ge=0, le=1)
    """Where the decay ends, as a share of `lr`."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of AdamW's first and second moment, each in [0, 1)."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay per unit of learning rate, on matrices only."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """The gradient of an update is scaled down to this Euclidean norm; `inf` leaves it as it is."""
    dtype: DTypeName = "float32"
    """In what the linear layers compute. Master weights and optimiser state are float32 always."""
    compile: bool = False
    """Whether torch compiles the model: on a CPU a third faster (bfloat16: a half) after half a minute or more at the
    start. Needs a C++ compiler. Which kernels it makes depends on the first batches, so a resumed run may differ in the
    last bits."""
    max_tokens_per_microbatch: int = Field(default=8192, gt=0)
    """Tokens, padding included, in one forward and backward pass; bounds memory and does not change the update."""
    num_minibatches: int = Field(default=1, gt=0)
    """Parts of a batch (whole groups, in order), each giving one optimiser update."""
    num_epochs: int = Field(default=1, gt=0)
    """Times that a train step goes through its batch."""

    @field_validator("betas")
    @classmethod
    def _are_rates(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError("each must be at least 0 and less than 1")
        return betas


class SftSettings(Settings):
    """[sft] supervised fine-tuning."""

    steps: int = Field(default=1000, ge=1)
    """Optimiser updates; a count, so that the result does not depend on the machine's speed."""
    batch_size: int = Field(default=128, ge=1)
    """Demonstrations per update."""
    max_tokens_per_microbatch: int = Field(default=4096, ge=1)
    """Tokens, padding included, in one forward and backward pass; bounds memory."""
    lr: float = Field(default=1e-3, gt=0)
    """Peak learning rate of AdamW."""
    warmup_steps: int = Field(default=100, ge=0)
    """Updates over which the learning rate rises linearly; from there it falls as a cosine."""
    min_lr_frac: float = Field(default=0.02, ge=0, le=1)
    """Where the decay ends, as a share of `lr`."""
    betas: tuple[float, float] = (0.9, 0.98)
    """Decay rates of AdamW's moments."""
    weight_decay: float = Field(default=0.05, ge=0)
    """Decoupled weight decay per unit of learning rate, on matrices only."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """The gradient is scaled down to this Euclidean norm."""
    dtype: DTypeName = "float32"
    """In what linear layers compute; master weights are float32 always."""
