"""Full-parameter training on one device."""

from __future__ import annotations

import logging
import math
import os
import platform
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

import baton
from baton.errors import TrainingDiverged, UserError
from baton.policy.load import load_model, torch_dtype
from baton.policy.logprobs import compute_in, prefer_float32_attention, token_logprobs
from baton.policy.tensors import policy_tensors, weights_digest
from baton.policy.tokenizer import Tokenizer
from baton.trainer.advantages import ESTIMATORS
from baton.trainer.alarms import Alarms
from baton.trainer.batch import (
    ANY_SHAPE,
    FEW_SHAPES,
    MicroBatch,
    MiniBatch,
    batch_metrics,
    minibatches,
    oldest_trained,
)
from baton.trainer.checkpoint import State, read_optimizer, read_state, write_checkpoint
from baton.trainer.corrections import CORRECTIONS, CorrectionShape, second_moment_cutoff
from baton.trainer.losses import OBJECTIVES, LossInputs, LossShape, divisor
from baton.trainer.optimizer import (
    check_schedule,
    learning_rate,
    load_optimizer_tensors,
    make_optimizer,
    optimizer_tensors,
    set_learning_rate,
)
from baton.trainer.settings import AlgorithmSettings, TrainerSettings
from baton.trainer.totals import Totals
from baton.trainer.trainer import Weights
from baton.types import Batch, PolicyVersion

logger = logging.getLogger(__name__)

_Proximal = Sequence[torch.Tensor | None]
"""[B, K] for each microbatch; None where the update's own logprobs are the proximal ones."""


class LocalTrainer:
    """Updates all parameters of one model on one device. See `Trainer` for the contract.

    The model's parameters are the float32 master weights; bfloat16 is a matter of autocast. The model stays in eval
    mode: dropout would make a policy differ from itself between rollout, proximal logprobs and update. Nothing here
    is random, so equal batches give equal bits wherever torch's kernels do.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        settings: TrainerSettings,
        algorithm: AlgorithmSettings,
        *,
        temperature: float,
        total_steps: int,
        version: PolicyVersion,
        max_staleness: int | None = None,
    ) -> None:
        """Take over `model`. Raises UserError for settings that contradict each other.

        `temperature` is the one the rollout samples at; `total_steps` is the run's length, for the learning rate.
        Tokens more than `max_staleness` versions old stay in context and reward and get no gradient; None trains all.
        """
        if not temperature > 0:
            raise UserError(f"training needs sampled trajectories: got temperature {temperature}, allowed is above 0")
        check_schedule(warmup_steps=settings.warmup_steps, decay=settings.decay, total_steps=total_steps)
        for name, parameter in model.named_parameters():
            assert parameter.dtype is torch.float32, f"master weights are float32: {name} is {parameter.dtype}"
        self.model = model
        model.eval()  # type: ignore[no-untyped-call]
        if settings.dtype == "bfloat16":
            prefer_float32_attention(model)
        if settings.compile:
            _check_compiler(model.device)
            model.compile(dynamic=True)
        self._tokenizer, self._settings, self._algorithm = tokenizer, settings, algorithm
        self._temperature, self._total_steps, self._version = temperature, total_steps, version
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._optimizer = make_optimizer(
            self._parameters, lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay
        )
        self._num_updates = 0
        self._max_staleness = max_staleness
        self._alarms = Alarms(algorithm)

    @property
    def version(self) -> PolicyVersion:
        """The weights as they are now; the digest is empty until they are published or saved."""
        return self._version

    def step(self, batch: Batch) -> dict[str, float]:
        """Run one train step and return its metrics by name. Raises TrainingDiverged, leaving the weights as they were.

        Metrics of tokens are means over trained tokens (over all passes, where there are several updates);
        `policy/mismatch_kl` and `policy/logprob_diff_*` compare engine and trainer on tokens of the version that the
        trainer holds, and are absent when the batch has none.
        """
        settings, start = self._settings, self._version
        assert batch.step == start.number + 1, f"batch of train step {batch.step} came to version {start.number}"
        oldest = oldest_trained(batch, self._max_staleness)
        parts = minibatches(
            batch.groups,
            ESTIMATORS[self._algorithm.name](batch.groups),
            oldest=oldest,
            num_minibatches=settings.num_minibatches,
            max_tokens_per_microbatch=settings.max_tokens_per_microbatch,
            device=self.model.device,
            multiples=self._multiples(),
        )
        lr = learning_rate(
            batch.step,
            lr=settings.lr,
            warmup_steps=settings.warmup_steps,
            decay=settings.decay,
            total_steps=self._total_steps,
            min_lr_frac=settings.min_lr_frac,
        )
        set_learning_rate(self._optimizer, lr)
        num_updates = settings.num_epochs * settings.num_minibatches
        # The only update of a step starts from the proximal policy, so its own logprobs are the proximal ones. It also
        # needs no copy to go back to: divergence is noticed before the weights change.
        is_known = num_updates > 1 or self._algorithm.correction == "second_moment"
        proximal = [self._proximal(part) if is_known else [None] * len(part.microbatches) for part in parts]
        before = self._snapshot() if num_updates > 1 else None
        totals = Totals(version=start.number)
        try:
            for _ in range(settings.num_epochs):
                for part, fixed in zip(parts, proximal, strict=True):
                    self._update(batch.step, part, fixed, totals)
        except TrainingDiverged:
            self._optimizer.zero_grad()
            if before is not None:
                self._go_back(before)
            raise
        self._num_updates += num_updates
        self._version = PolicyVersion(start.lineage, batch.step)
        metrics = {**batch_metrics(batch, oldest=oldest), **totals.metrics(), "policy/lr": lr}
        self._alarms.watch(metrics)
        return metrics

    def publish(self) -> Weights:
        """Return a copy of the current weights, on the trainer's device, under their `state_dict` names."""
        tensors = {name: tensor.clone() for name, tensor in policy_tensors(self.model).items()}
        self._version = PolicyVersion(self._version.lineage, self._version.number, weights_digest(tensors))
        return Weights(self._version, tensors)

    def save(self, directory: Path) -> None:
        """Write a checkpoint (see `checkpoint.py`), whole or not at all."""
        digest = weights_digest(policy_tensors(self.model))
        self._version = PolicyVersion(self._version.lineage, self._version.number, digest)
        state = State(
            version=self._version,
            num_updates=self._num_updates,
            libraries=_libraries(),
            num_threads=torch.get_num_threads(),
        )
        optimizer = optimizer_tensors(self._optimizer, self._parameters)
        write_checkpoint(directory, model=self.model, tokenizer=self._tokenizer.hf, optimizer=optimizer, state=state)

    def restore(self, directory: Path) -> None:
        """Continue from what `save` wrote. Raises UserError, changing nothing, when it does not fit this trainer.

        Number and digest of the version come from the checkpoint; the lineage stays the one this trainer was built
        with, because a run that goes back starts a new one.
        """
        state, moments = read_state(directory), read_optimizer(directory)
        saved = policy_tensors(load_model(str(directory), dtype=torch.float32, device=torch.device("cpu")))
        own = policy_tensors(self.model)
        shapes = [{name: tuple(t.shape) for name, t in tensors.items()} for tensors in (saved, own)]
        if differing := sorted(dict(shapes[0].items() ^ shapes[1].items())):
            raise UserError(
                f"{directory} holds another model than the one in training: {differing[0]} has shape "
                f"{shapes[0].get(differing[0], 'none')} there and {shapes[1].get(differing[0], 'none')} here "
                f"({len(differing)} tensors differ)"
            )
        if (digest := weights_digest(saved)) != state.version.digest:
            raise UserError(f"{directory} is damaged: its weights have digest {digest}, not {state.version.digest}")
        if state.num_updates and not moments:
            raise UserError(f"{directory} cannot be resumed: its optimizer state is empty")
        load_optimizer_tensors(self._optimizer, self._parameters, moments)
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(saved[name])
        self._num_updates = state.num_updates
        self._version = PolicyVersion(self._version.lineage, state.version.number, digest)
        _warn_of_other_bits(state)

    def _multiples(self) -> tuple[int, int]:
        """On a CPU, bfloat16 kernels are made anew for each shape that is met."""
        makes_kernels = self._settings.dtype == "bfloat16" and self.model.device.type == "cpu"
        return FEW_SHAPES if makes_kernels else ANY_SHAPE

    def _logprobs(self, micro: MicroBatch, *, with_entropy: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        with compute_in(torch_dtype(self._settings.dtype), self.model.device):
            return token_logprobs(
                self.model,
                micro.input_ids,
                first=micro.first,
                temperature=self._temperature,
                with_entropy=with_entropy,
            )

    @torch.no_grad()
    def _proximal(self, part: MiniBatch) -> list[torch.Tensor | None]:
        """[B, K] for each microbatch, under the weights as they are now."""
        return [self._logprobs(micro, with_entropy=False)[0] for micro in part.microbatches]

    def _update(self, step: int, part: MiniBatch, proximal: _Proximal, totals: Totals) -> None:
        """Make one optimiser update, or raise TrainingDiverged before the weights change."""
        algorithm = self._algorithm
        shape = LossShape(
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            aggregation=algorithm.aggregation,
            divisor=divisor(part.num_trajectories, part.num_trained_tokens, algorithm.aggregation),
        )
        correction = correction_shape(algorithm, part, proximal)
        self._optimizer.zero_grad(set_to_none=True)
        part_loss = 0.0
        for micro, fixed in zip(part.microbatches, proximal, strict=True):
            with torch.set_grad_enabled(micro.has_gradient):
                logprobs, entropy = self._logprobs(micro, with_entropy=True)
                assert entropy is not None
                inputs = LossInputs(
                    logprobs=logprobs,
                    proximal_logprobs=logprobs.detach() if fixed is None else fixed,
                    behavior_logprobs=micro.behavior_logprobs,
                    advantages=micro.advantages,
                    mask=micro.mask,
                )
                anchor = CORRECTIONS[algorithm.correction](inputs, correction)
                loss = OBJECTIVES[algorithm.name](inputs, anchor, shape)
            if micro.has_gradient:
                loss.loss.backward()  # type: ignore[no-untyped-call]
            value = totals.add(micro, inputs, anchor, loss, entropy)
            part_loss += _finite(value, "the loss", step, self._version, [micro])
        if not any(micro.has_gradient for micro in part.microbatches):
            for parameter in self._parameters.values():
                parameter.grad = torch.zeros_like(parameter)  # an update all the same: its moments decay
        norm = torch.nn.utils.clip_grad_norm_(self._parameters.values(), self._settings.max_grad_norm).item()
        totals.grad_norms.append(_finite(norm, "the gradient's norm", step, self._version, part.microbatches))
        totals.losses.append(part_loss)
        self._optimizer.step()

    def _snapshot(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Copy weights and optimiser state to the host."""
        weights = {name: p.detach().to("cpu", copy=True) for name, p in self._parameters.items()}
        moments = optimizer_tensors(self._optimizer, self._parameters)
        return weights, {name: tensor.to("cpu", copy=True) for name, tensor in moments.items()}

    @torch.no_grad()
    def _go_back(self, snapshot: tuple[dict[str, torch.Tensor], dict[str, Any]]) -> None:
        weights, moments = snapshot
        for name, parameter in self._parameters.items():
            parameter.copy_(weights[name])
        load_optimizer_tensors(self._optimizer, self._parameters, moments)


def correction_shape(algorithm: AlgorithmSettings, part: MiniBatch, proximal: _Proximal) -> CorrectionShape:
    """Return what a correction is told of a whole minibatch; `second_moment` needs its proximal logprobs."""
    cutoff = math.inf
    if algorithm.correction == "second_moment":
        apart = [
            (fixed - micro.behavior_logprobs)[micro.mask]
            for micro, fixed in zip(part.microbatches, proximal, strict=True)
            if fixed is not None
        ]
        cutoff = second_moment_cutoff(apart, algorithm.second_moment_limit)
    return CorrectionShape(algorithm.weight_cap, algorithm.weight_floor, algorithm.opsm_delta, cutoff)


def _finite(value: float, what: str, step: int, version: PolicyVersion, micros: Iterable[MicroBatch]) -> float:
    if math.isfinite(value):
        return value
    groups = sorted({group_id for micro in micros for group_id in micro.group_ids})
    raise TrainingDiverged(
        f"train step {step}: {what} is {value} over groups {', '.join(map(str, groups))}; "
        f"the weights stay those of version {version.number}"
    )


def _check_compiler(device: torch.device) -> None:
    if device.type == "cpu" and not any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++")):
        raise UserError("trainer.compile needs a C++ compiler (g++ or clang++), and none was found on the PATH")


def _libraries() -> dict[str, str]:
    return {
        "baton": baton.__version__,
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def _warn_of_other_bits(state: State) -> None:
    made_with = {**state.libraries, "threads": str(state.num_threads)}
    now = {**_libraries(), "threads": str(torch.get_num_threads())}
    changed = [f"{name} {made_with.get(name)} → {now[name]}" for name in now if made_with.get(name) != now[name]]
    if changed:
        logger.warning("resuming with %s: the last bits may differ from an unbroken run", ", ".join(changed))
