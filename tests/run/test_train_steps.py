"""A stop request in the middle of a train step leaves a state from which the run can be resumed."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

from baton.rollout.settings import RolloutSettings
from baton.run.train_steps import TrainSteps
from baton.stop import Stopped
from baton.types import FinishReason, Group, Message, Prompt, RewardResult, ScoredTrajectory, Segment, Trajectory


class Interrupted:
    """A controller whose draw of a prompt is interrupted by a stop request during the train step."""

    def __init__(self) -> None:
        self.rules = RolloutSettings(mode="async").rules()
        self.is_stopping = False
        self.cursor, self.calls = "after", list[str]()
        member = ScoredTrajectory(
            Trajectory(0, 0, (2,), (Segment((3,), (-1.0,), 0),), FinishReason.STOP), RewardResult(1.0, {}, False)
        )
        self.groups = [Group(0, Prompt("p", "t", (Message("user", "1"),)), (member,))]
        self.scheduler = SimpleNamespace(take_step_counts=lambda: None)

    def next_batch(self, done: Any) -> list[Group]:
        return self.groups

    def run_until(self, is_over: Any) -> None:
        self.is_stopping = True
        raise Stopped

    def publish(self, *_: Any) -> None:
        self.calls.append("publish")

    def version_trained(self, step: int) -> None:
        self.calls.append("version_trained")


def test_a_train_step_is_completed_if_a_stop_interrupts_the_draw_of_a_prompt_beside_it() -> None:
    """The trainer has the version of this step then, so a checkpoint must not be one of the step before."""
    controller: Any = Interrupted()

    class Trainer:
        def start(self, batch: Any, *, in_background: bool) -> Any:
            return SimpleNamespace(wait=lambda timeout_s: True, result=lambda: {"loss": 0.5}, close=lambda: None)

    @contextmanager
    def stage(*_: Any) -> Any:
        yield

    records: Any = SimpleNamespace(write=lambda *_: None, read=lambda step: None)
    port: Any = SimpleNamespace(consumed=lambda *_: None)
    clock: Any = SimpleNamespace(stage=stage)
    trainer: Any = Trainer()
    steps = TrainSteps(
        controller, port, trainer, None, records, 9, lambda step: True, 2, None, clock,  # type: ignore[arg-type]
        phase=lambda name, total: nullcontext(lambda done: None),
    )  # fmt: skip
    steps.has_begun = True
    assert steps.next().metrics == {"loss": 0.5}
    assert (steps.step, steps.cursor, controller.calls) == (3, "after", [])
