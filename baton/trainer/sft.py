"""Supervised fine-tuning: cross-entropy on the response tokens of demonstrations."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import torch
from transformers import PreTrainedModel

from baton.errors import TrainingDiverged
from baton.policy.load import torch_dtype
from baton.policy.logprobs import compute_in, padded_scores, prefer_float32_attention
from baton.trainer.optimizer import Schedule, make_optimizer, set_learning_rate
from baton.trainer.settings import SftSettings

LENGTH_MULTIPLE = 8
"""Multiple to which row lengths are rounded up, because bfloat16 kernels on a CPU are compiled for each shape."""
BETAS = (0.9, 0.98)
WEIGHT_DECAY = 0.05
"""AdamW's weight-decay coefficient; applies only to parameters with two or more dimensions."""
MIN_LR_FRAC = 0.02
"""Final learning rate of the cosine decay, as a fraction of the peak."""
MAX_GRAD_NORM = 1.0


class Demonstration(msgspec.Struct, frozen=True):
    """One tokenised example."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    """Token ids of the response, including the end-of-sequence id."""

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


def schedule_of(settings: SftSettings) -> Schedule:
    """Return the schedule of the learning rate."""
    return Schedule(settings.warmup_steps, "cosine", settings.steps, MIN_LR_FRAC)


def fine_tune(
    model: PreTrainedModel,
    examples: Iterator[Demonstration],
    settings: SftSettings,
    *,
    on_step: Callable[[int, float, int], None],
) -> None:
    """Train the float32 `model` in place for `settings.steps` updates.

    `on_step` receives the update's number, its loss in nats per response token, and the number of processed tokens
    including padding. Raises TrainingDiverged when the gradient is not finite, before the weights change.
    """
    if torch_dtype(settings.dtype, model.device) is torch.bfloat16:
        prefer_float32_attention(model)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = make_optimizer(parameters, lr=settings.lr, betas=BETAS, weight_decay=WEIGHT_DECAY)
    model.eval()  # type: ignore[no-untyped-call]  # no dropout, as in RL
    for step in range(1, settings.steps + 1):
        rows = sorted((next(examples) for _ in range(settings.batch_size)), key=lambda row: -row.num_tokens)
        num_targets = sum(len(row.response_ids) for row in rows)
        loss, num_tokens = 0.0, 0
        for part in _microbatches(rows, settings.max_tokens_per_microbatch):
            summed, processed = _loss_sum(model, part, settings)
            (summed / num_targets).backward()  # type: ignore[no-untyped-call]
            loss += float(summed.detach()) / num_targets
            num_tokens += processed
        norm = torch.nn.utils.clip_grad_norm_(parameters.values(), MAX_GRAD_NORM)
        if not torch.isfinite(norm):
            raise TrainingDiverged(f"warm start step {step}: the gradient is not finite (loss {loss})")
        set_learning_rate(optimizer, schedule_of(settings).learning_rate(step, settings.lr))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        on_step(step, loss, num_tokens)


def _microbatches(rows: list[Demonstration], max_tokens: int) -> Iterator[list[Demonstration]]:
    """Split `rows` (longest first) into parts of at most `max_tokens` padded tokens. A row longer than `max_tokens`
    forms a part alone."""
    begin = 0
    while begin < len(rows):
        end = begin + max(1, max_tokens // _padded(rows[begin]))
        yield rows[begin:end]
        begin = end


def _padded(row: Demonstration) -> int:
    return -(-row.num_tokens // LENGTH_MULTIPLE) * LENGTH_MULTIPLE


def _loss_sum(model: PreTrainedModel, rows: list[Demonstration], settings: SftSettings) -> tuple[torch.Tensor, int]:
    """Return the summed cross-entropy of the response tokens in nats, and the number of tokens including padding."""
    first = min(len(row.prompt_ids) for row in rows)
    ids_BS = torch.zeros((len(rows), _padded(rows[0])), dtype=torch.long)
    is_target_BS = torch.zeros_like(ids_BS, dtype=torch.bool)
    for place, row in enumerate(rows):
        ids_BS[place, : row.num_tokens] = torch.tensor(row.prompt_ids + row.response_ids)
        is_target_BS[place, len(row.prompt_ids) : row.num_tokens] = True
    ids_BS, is_target_BS = ids_BS.to(model.device), is_target_BS.to(model.device)
    with compute_in(torch_dtype(settings.dtype, model.device), model.device):
        logprobs_BK = padded_scores(model, ids_BS, first=first).logprobs
    return -logprobs_BK[is_target_BS[:, first:]].sum(), ids_BS.numel()
