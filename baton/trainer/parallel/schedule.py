"""Pipeline stages: their numbers of layers, the order of their passes (1F1B), and the exchanges between stages.

Does not import torch.

    stages 3, microbatches 4      time ─▶
    stage 0    F0 F1 F2          B0 F3       B1       B2       B3
    stage 1       F0 F1       B0 F2       B1 F3    B2       B3
    stage 2          F0    B0 F1       B1 F2    B2 F3    B3

Before each pass, a stage sends the output of the previous pass and receives the input of this pass, in one exchange of
at most two messages. Exchanges do not deadlock, even if a sender blocks until the receiver is ready (simulated in
`tests/trainer/test_schedule.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.errors import UserError


def stage_layers(stages: int | Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Return the number of layers of each stage. `stages`: the number of stages, or the number of layers of each stage.

    If `num_layers` is not a multiple of the number of stages, the first stages get one more layer each, because the
    last stage also computes the head. Raises UserError if the layers do not add up to `num_layers`, or a stage has
    none.
    """
    if isinstance(stages, int):
        found = tuple(num_layers // stages + (stage < num_layers % stages) for stage in range(stages))
    else:
        found = tuple(stages)
    if sum(found) != num_layers or min(found) < 1:
        raise UserError(
            f"trainer.stages: got {stages if isinstance(stages, int) else list(stages)}, but the model has "
            f"{num_layers} layers; allowed are at most {num_layers} stages, or layer counts above 0 with this sum"
        )
    return found


@dataclass(frozen=True, slots=True)
class Pass:
    """A forward or backward pass of a stage."""

    place: int
    """Index of the microbatch."""
    is_forward: bool

    def input_from(self, stage: int, num_stages: int) -> int | None:
        """Return the stage that computes the input of this pass; None if there is none."""
        return _stage(stage - 1 if self.is_forward else stage + 1, num_stages)

    def output_to(self, stage: int, num_stages: int) -> int | None:
        """Return the stage that needs the output of this pass; None if there is none."""
        return _stage(stage + 1 if self.is_forward else stage - 1, num_stages)


def _stage(stage: int, num_stages: int) -> int | None:
    return stage if 0 <= stage < num_stages else None


def schedule(stage: int, num_stages: int, num_trained: int, num_scored: int = 0) -> list[Pass]:
    """Return a stage's passes: forward and backward for `num_trained` microbatches, then forward for `num_scored` more.

    Before its first backward pass, a stage runs `num_stages − stage` forward passes (at most `num_trained`). At
    any time, at most this number of microbatches wait for their backward pass.
    """
    ahead = min(num_stages - 1 - stage, num_trained)
    forwards = [Pass(place, True) for place in range(num_trained + num_scored)]
    backwards = [Pass(place, False) for place in range(num_trained)]
    alternating = [each for pair in zip(forwards[ahead:num_trained], backwards, strict=False) for each in pair]
    return [*forwards[:ahead], *alternating, *backwards[num_trained - ahead :], *forwards[num_trained:]]


def exchanges(passes: Sequence[Pass]) -> list[tuple[Pass | None, Pass | None]]:
    """For each exchange, return the pass whose output is sent and the pass whose input is received. The first exchange
    sends nothing, and the last exchange receives nothing (None)."""
    return list(zip([None, *passes], [*passes, None], strict=True))
