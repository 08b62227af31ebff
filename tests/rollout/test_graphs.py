"""Which decode steps go by a graph. Capturing itself needs CUDA; here a recorder stands in for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from baton.rollout.engines.embedded.graphs import GraphedSteps, Step

pytestmark = pytest.mark.numerics

IDS, POSITIONS = torch.tensor([3, 5]), torch.tensor([7, 9])


class Recorder:
    """A step, and captures of it that overwrite what they returned before, as a graph does."""

    def __init__(self, *, error: float = 0.0, breaks_at: int | None = None) -> None:
        self.error, self.breaks_at = error, breaks_at
        self.eager: list[tuple[int, int]] = []
        self.captured: list[tuple[int, int]] = []
        self.replayed: list[tuple[int, int]] = []

    def step(self, ids_W: Tensor, position_W: Tensor, kv_length: int) -> Tensor:
        self.eager.append((len(ids_W), kv_length))
        return (ids_W * 100 + position_W + kv_length)[:, None].float()

    def capture(
        self, step: Step, ids_W: Tensor, position_W: Tensor, kv_length: int
    ) -> Callable[[Tensor, Tensor], Tensor]:
        if kv_length == self.breaks_at:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        self.captured.append((len(ids_W), kv_length))
        logits = torch.zeros(len(ids_W), 1)

        def run(ids_W: Tensor, position_W: Tensor) -> Tensor:
            self.replayed.append((len(ids_W), kv_length))
            return logits.copy_((ids_W * 100 + position_W + kv_length)[:, None] + self.error)

        return run


def test_a_shape_is_captured_once_proven_on_its_first_inputs_and_replayed_from_then_on() -> None:
    recorder = Recorder()
    steps = GraphedSteps(recorder.step, lambda: recorder.capture)
    first = steps(IDS, POSITIONS, 16)
    for _ in range(3):
        assert steps(IDS + 1, POSITIONS, 16).tolist() == [[423.0], [625.0]]
    assert first.tolist() == [[323.0], [525.0]], "not overwritten by later steps"
    steps(IDS[:1], POSITIONS[:1], 16)
    steps(IDS, POSITIONS, 32)
    assert recorder.captured == [(2, 16), (1, 16), (2, 32)]
    assert recorder.eager == recorder.captured
    assert recorder.replayed.count((2, 16)) == 5, "two to prove it"


def test_a_graph_that_recorded_nothing_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    """Its buffer may hold the logits of the step that was to be recorded, as it does on another device."""
    recorder = Recorder()

    def capture(step: Step, ids_W: Tensor, position_W: Tensor, kv_length: int) -> Callable[[Tensor, Tensor], Tensor]:
        logits = recorder.step(ids_W, position_W, kv_length)
        return lambda ids_W, position_W: logits

    steps = GraphedSteps(recorder.step, lambda: capture)
    for _ in range(2):
        assert steps(IDS, POSITIONS, 16).tolist() == [[323.0], [525.0]]
    assert "its logits are not bit-identical" in caplog.text
    assert len(recorder.eager) == 3, "both steps, and the capture"


def test_a_graph_of_other_bits_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(error=0.5)
    steps = GraphedSteps(recorder.step, lambda: recorder.capture)
    for _ in range(3):
        assert steps(IDS, POSITIONS, 16).tolist() == [[323.0], [525.0]]
    assert (len(recorder.eager), len(recorder.captured), len(recorder.replayed)) == (3, 1, 2)
    assert caplog.messages == [
        "decode steps of 2 rows over 16 positions run without a CUDA graph: its logits are not bit-identical"
    ]


def test_a_step_that_cannot_be_captured_is_done_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(breaks_at=16)
    steps = GraphedSteps(recorder.step, lambda: recorder.capture)
    for length in (16, 16, 32, 32):
        assert steps(IDS, POSITIONS, length).tolist() == [[307.0 + length], [509.0 + length]]
    assert (recorder.captured, recorder.replayed) == ([(2, 32)], [(2, 32)] * 3)
    assert "operation not permitted" in caplog.text
    assert "and more" not in caplog.text


def test_graphs_end_with_the_memory_that_they_read() -> None:
    recorder = Recorder()
    steps = GraphedSteps(recorder.step, lambda: recorder.capture)
    steps(IDS, POSITIONS, 16)
    steps.release()
    steps(IDS, POSITIONS, 16)
    assert recorder.captured == [(2, 16), (2, 16)]
