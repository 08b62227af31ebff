"""A pipeline stage: runs the passes of `schedule.py`, and exchanges hidden states and gradients with its neighbours.

All stages have the whole batch and cut the same microbatches from it. A receiver therefore knows the shape of each
tensor that it receives, so a message contains only the tensor. Shapes differ between microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from baton.trainer.parallel.schedule import Pass, exchanges, schedule

Shape = tuple[int, ...]


class Pipeline:
    """One stage of a pipeline. By default, the pipeline has only one stage, which exchanges nothing."""

    def __init__(
        self,
        stage: int = 0,
        ranks: Sequence[int] = (0,),
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        """`ranks`: for each stage, the rank that computes the same rows as this rank. `dtype`: dtype of the hidden
        states."""
        self.stage, self.num_stages = stage, len(ranks)
        self.is_last = stage == len(ranks) - 1
        self._ranks, self._dtype, self._device = ranks, dtype, device

    def run(
        self,
        shapes: Sequence[Shape],
        num_trained: int,
        forward: Callable[[int, Tensor | None], Tensor],
        backward: Callable[[int, Tensor, Tensor | None], None],
    ) -> None:
        """Run the passes of all microbatches. The first `num_trained` microbatches also get a backward pass.

        `shapes`: for each microbatch, the shape of the hidden states between two stages. `forward` gets the index of a
        microbatch and the output of the previous stage (None on the first stage), and returns this stage's output (the
        loss on the last stage). `backward` gets the index of a microbatch, the result of `forward` and the gradient of
        this result (None for the loss).
        """
        kept: dict[int, tuple[Tensor | None, Tensor]] = {}
        leaving: Tensor | None = None
        for done, following in exchanges(schedule(self.stage, self.num_stages, num_trained, len(shapes) - num_trained)):
            arrived = self._exchange(leaving, done, following, shapes)
            if following is None:
                return
            if following.is_forward:
                if arrived is not None and following.place < num_trained:
                    arrived.requires_grad_()
                leaving = forward(following.place, arrived)
                if following.place < num_trained:
                    kept[following.place] = arrived, leaving
                leaving = leaving.detach()
            else:
                received, output = kept.pop(following.place)
                backward(following.place, output, arrived)
                leaving = None if received is None else received.grad

    def receive(self, shape: Shape) -> Tensor | None:
        """Receive and return the previous stage's output of a forward pass. Return None on the first stage."""
        return self._exchange(None, None, Pass(0, True), [shape])

    def send(self, output: Tensor) -> None:
        """Send the output of a forward pass to the next stage. Do nothing on the last stage."""
        self._exchange(output, Pass(0, True), None, ())

    @torch.no_grad()
    def add_other_end(self, values: Tensor) -> None:
        """On the first and the last stage, replace `values` in place by the sum of the values of both stages."""
        other = torch.empty_like(values)
        rank = self._ranks[0 if self.is_last else -1]
        transfer([dist.P2POp(dist.isend, values, rank), dist.P2POp(dist.irecv, other, rank)])
        values.add_(other)

    def _exchange(
        self, leaving: Tensor | None, done: Pass | None, following: Pass | None, shapes: Sequence[Shape]
    ) -> Tensor | None:
        """Send the output of pass `done`, and return the input of pass `following` (None if this pass has no input)."""
        operations, arriving = [], None
        to = None if done is None else done.output_to(self.stage, self.num_stages)
        source = None if following is None else following.input_from(self.stage, self.num_stages)
        if to is not None:
            assert leaving is not None
            operations.append(dist.P2POp(dist.isend, leaving.to(self._dtype).contiguous(), self._ranks[to]))
        if source is not None:
            assert following is not None
            arriving = torch.empty(shapes[following.place], dtype=self._dtype, device=self._device)
            operations.append(dist.P2POp(dist.irecv, arriving, self._ranks[source]))
        transfer(operations)
        return arriving


def transfer(operations: list[dist.P2POp]) -> None:
    """Send and receive tensors together. Raises RuntimeError after the timeout of the process group."""
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
