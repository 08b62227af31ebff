"""Recipe sections [trainer] and [sft]. This module does not import torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from baton.policy.settings import DTypeChoice
from baton.settings import Settings
from baton.specs.trainer_shapes import can_train

Decay = Literal["constant", "linear", "cosine"]
OptimizerName = Literal["adamw", "adamw8bit"]
Limit = Annotated[float, Field(allow_inf_nan=True)]


class TrainerSettings(Settings):
    """[trainer] Optimisation of the policy."""

    optimizer: OptimizerName = "adamw"
    """`adamw` is AdamW with moments in float32. `adamw8bit` (torchao: `baton-rl[optimizer]`) keeps the moments in 8
    bits, with one scale per 256 values. Weights, gradients and moments then take 10 instead of 16 bytes per parameter.
    The moments of tensors with fewer than 4,096 values stay in float32. The update of `adamw8bit` is compiled at the
    first step; on a CPU, compiling requires a C++ compiler."""
    lr: float = Field(default=1e-6, gt=0)
    """Peak learning rate of AdamW."""
    warmup_steps: int = Field(default=0, ge=0)
    """Number of train steps in which the learning rate rises linearly to `lr`."""
    decay: Decay = "constant"
    """Schedule of the learning rate from the end of the warm-up to the last train step of the run."""
    min_lr_frac: float = Field(default=0.0, ge=0, le=1)
    """Final learning rate of the decay, as a fraction of `lr`."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of AdamW's first and second moments, each in [0, 1)."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's weight-decay coefficient; applies only to parameters with two or more dimensions."""
    max_grad_norm: float = Field(default=1.0, gt=0, allow_inf_nan=True)
    """Maximum Euclidean norm of an update's gradient; larger gradients are scaled down. `inf` disables clipping."""
    dtype: DTypeChoice = "auto"
    """Data type in which linear layers compute: bfloat16 or float32; `auto` is bfloat16 on CUDA and float32 on a CPU.
    Master weights are always float32. Matrix products in float32 use TF32 on CUDA."""
    compile: bool = False
    """Compile the model's transformer blocks with `torch.compile`, with or without `packing`. On a CPU, steps become
    faster by about a third, and in bfloat16 by about a half. The startup takes at least half a minute longer. Requires
    a C++ compiler. The compiled kernels depend on the first batches, so a resumed run may differ in the last bits."""
    max_mismatch_kl: tuple[Limit, Limit] = (0.01, 0.5)
    """Two limits of the KL divergence between engine and trainer under equal weights, in nats per token. Above the
    first limit, the run logs a warning. Above the second limit, the train step fails before its next update. The
    divergence is typically 1e-9 in float32 on a CPU, and 1e-4 to 1e-3 in bfloat16. `inf` disables a limit."""
    max_logprob_diff: tuple[Limit, Limit] = (5.0, 15.0)
    """Two limits of the difference between the engine's and the trainer's logprob of the same token, in nats. The
    largest difference of all tokens is compared with the limits. As in `max_mismatch_kl`, the first limit causes a
    warning and the second an error."""
    max_tokens_per_microbatch: int = Field(default=8192, gt=0)
    """Maximum number of tokens, including padding, in one forward and backward pass. A smaller number saves memory;
    apart from rounding errors, the update stays the same. A longer trajectory forms a microbatch alone."""
    packing: Literal["auto", "always", "never"] = "auto"
    """Concatenate trajectories instead of sorting them by length and padding them. `auto` concatenates only on CUDA."""
    share_prompts: bool = False
    """Compute the prompt of a group once for all trajectories of the group in a microbatch. A minibatch shares prompts
    only if sharing reduces its estimated cost. Apart from rounding errors, the update stays the same. Requires one
    rank; cannot be combined with `compile` or `moe_replay`."""
    metrics_of_all_tokens: bool = False
    """Also run a forward pass for episodes whose advantages are all 0. The metrics of entropy, mismatch and importance
    weights are then means over all trained tokens, including tokens without a gradient. The update does not change.
    With `false`, episodes whose advantages are all 0 get a forward pass only if the loss depends on them."""
    activation_checkpointing: bool = False
    """Recompute each block's activations in the backward pass. Saves memory, but needs about a third more
    computation."""

    moe_replay: Literal["off", "proximal", "engine"] = "off"
    """Routing replay for mixture-of-experts models. `proximal`: updates use the experts that the policy chose at the
    start of the step. `engine`: all passes use the experts that the engine chose (requires engine.report_routing)."""

    ranks: int = Field(default=1, ge=1)
    """Number of processes that shard model, gradients and optimiser state. With 1, the controller process trains."""
    stages: int | tuple[int, ...] = 1
    """Number of pipeline stages, or a list with the number of layers of each stage, such as [10, 14, 6]. The number of
    stages must divide `ranks`; the ranks of a stage share its layers. The first stage also has the embedding, the last
    stage the head."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Number of ranks that split each matrix product, according to the model's tensor-parallel plan in transformers.
    Must divide `ranks`."""
    shard_size: int | None = Field(default=None, ge=1)
    """Number of consecutive ranks that share one copy of the model, or of a stage (HSDP). Must divide the number of
    ranks per stage. With a smaller number, all ranks of a copy can be on one machine and communicate faster, but each
    rank needs more memory. Default: all ranks share one copy."""
    speeds: tuple[float, ...] = ()
    """Relative speeds of the data-parallel ranks of each stage, in rank order, such as [2, 1]. Each rank gets rows in
    proportion to its speed. Each rank's `max_tokens_per_microbatch` is multiplied by the ratio of its speed to the
    largest speed. Apart from rounding errors, the update does not depend on the speeds. `baton train --plan` sets this
    key for ranks on two GPU types, or on CPUs with different numbers of cores. Default: all ranks are equally fast."""
    shard_gradients: bool = False
    """Reduce gradients after every microbatch, so that no rank holds the gradients of all parameters. Saves memory, but
    takes more time."""

    @field_validator("max_mismatch_kl", "max_logprob_diff")
    @classmethod
    def _ascend(cls, limits: tuple[float, float]) -> tuple[float, float]:
        if not 0 < limits[0] <= limits[1]:
            raise ValueError("must be two numbers above 0: a warning limit, then an error limit that is not lower")
        return limits

    @field_validator("betas")
    @classmethod
    def _are_rates(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError("each must be at least 0 and less than 1")
        return betas

    @property
    def num_stages(self) -> int:
        return self.stages if isinstance(self.stages, int) else len(self.stages)

    @property
    def data_ranks(self) -> int:
        """Number of ranks of a pipeline stage that train different rows."""
        return self.ranks // self.num_stages // self.tensor_parallel

    @model_validator(mode="after")
    def _stages_fit(self) -> TrainerSettings:
        numbers = [self.stages] if isinstance(self.stages, int) else [self.num_stages, *self.stages]
        if min(numbers) < 1 or self.ranks % self.num_stages:
            raise ValueError(
                f"stages: got {self.stages if isinstance(self.stages, int) else list(self.stages)} with ranks = "
                f"{self.ranks}; allowed are a divisor of ranks, or a list of positive layer counts whose length "
                "is a divisor of ranks"
            )
        has_shape = can_train(self.num_stages, self.tensor_parallel)
        if not has_shape or (self.num_stages > 1 and self.moe_replay == "engine"):
            key = "moe_replay" if has_shape else "tensor_parallel"
            raise ValueError(
                f"stages: got {self.num_stages} with {key} = {getattr(self, key)!r}, which were not tested together; "
                "allowed is 1"
            )
        return self

    @model_validator(mode="after")
    def _ranks_fit(self) -> TrainerSettings:
        if self.ranks % self.tensor_parallel:
            raise ValueError(
                f"tensor_parallel: got {self.tensor_parallel} with ranks = {self.ranks}; allowed are divisors of it"
            )
        if self.shard_size is not None and (self.data_ranks % self.shard_size or self.tensor_parallel > 1):
            raise ValueError(
                f"shard_size: got {self.shard_size} with ranks = {self.ranks} and tensor_parallel = "
                f"{self.tensor_parallel}; it must divide ranks / stages, and tensor_parallel must be 1; omit the "
                "key to share one copy of the model among all ranks"
            )
        if self.speeds and (len(self.speeds) != self.data_ranks or not all(speed > 0 for speed in self.speeds)):
            raise ValueError(
                f"speeds: got {list(self.speeds)}; allowed is an empty list, or {self.data_ranks} positive "
                "numbers: one for each data-parallel rank of a stage"
            )
        for key in ("ranks", "compile", "moe_replay"):
            if self.share_prompts and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(
                    f"share_prompts: got true with {key} = {getattr(self, key)!r}, which were not tested together; "
                    "allowed is false"
                )
        if self.ranks > 1 and self.compile:
            raise ValueError("compile: got true with ranks above 1; allowed with several ranks is false")
        return self


class SftSettings(Settings):
    """[sft] Supervised fine-tuning."""

    steps: int = Field(default=1000, ge=1)
    """Number of optimiser updates."""
    batch_size: int = Field(default=128, ge=1)
    """Number of demonstrations per update."""
    max_tokens_per_microbatch: int = Field(default=4096, ge=1)
    """Maximum number of tokens, including padding, in one forward and backward pass. This number bounds memory."""
    lr: float = Field(default=1e-3, gt=0)
    """Peak learning rate of AdamW."""
    warmup_steps: int = Field(default=100, ge=0)
    """Number of updates in which the learning rate rises linearly to `lr`, before it decays along a cosine."""
    dtype: DTypeChoice = "auto"
    """Data type in which linear layers compute: bfloat16 or float32; `auto` is bfloat16 on CUDA and float32 on a CPU.
    Master weights are always float32."""
