"""Recipe sections of training. Needs no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from baton.policy.settings import DTypeName
from baton.settings import Settings

Decay = Literal["constant", "linear", "cosine"]


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
    packing: Literal["auto", "always", "never"] = "auto"
    """Whether trajectories are laid one behind the other instead of padded, sorted by length: `auto` does on CUDA."""
    activation_checkpointing: bool = False
    """Whether blocks compute their activations again on the way back: less memory for a third more computation."""

    moe_replay: Literal["off", "proximal", "engine"] = "off"
    """Mixtures of experts: whether the updates of a train step route each token to the experts that the policy at the
    step's start chose for it, or all passes to those that the engine chose (with engine.report_routing)."""

    ranks: int = Field(default=1, ge=1)
    """Processes that share the model, its gradients and its optimiser state among them; 1 is this one alone."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Ranks that share each matrix product, by the model's own plan; `ranks` is a multiple of it."""
    shard_gradients: bool = False
    """Whether ranks reduce gradients after each microbatch, so that none ever holds a whole model's; costs time."""
    rank_timeout_s: float = Field(default=1800.0, gt=0)
    """Seconds that the ranks may take to start, for a train step or for a checkpoint, before they are given up."""

    @field_validator("betas")
    @classmethod
    def _are_rates(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError("each must be at least 0 and less than 1")
        return betas

    @model_validator(mode="after")
    def _ranks_fit(self) -> TrainerSettings:
        if self.ranks % self.tensor_parallel:
            raise ValueError(
                f"tensor_parallel: got {self.tensor_parallel} with ranks = {self.ranks}; allowed are divisors of it"
            )
        if self.ranks > 1 and self.compile:
            raise ValueError("compile: got true with ranks above 1; allowed there is false")
        if self.ranks > 1 and self.moe_replay != "off":
            raise ValueError(
                f"moe_replay: got {self.moe_replay!r} with ranks above 1, where experts are recorded by nobody; "
                "allowed there is 'off'"
            )
        return self


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
