"""The order of the passes of pipeline stages: complete, within its bound of activations, and without deadlock."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.trainer.parallel.schedule import Pass, exchanges, schedule

STAGES, TRAINED, SCORED = st.integers(1, 9), st.integers(0, 24), st.integers(0, 5)


def test_three_stages_and_four_microbatches_are_those_of_the_drawing() -> None:
    def drawn(stage: int) -> str:
        return " ".join(f"{'F' if each.is_forward else 'B'}{each.place}" for each in schedule(stage, 3, 4))

    assert drawn(0) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert drawn(1) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert drawn(2) == "F0 B0 F1 B1 F2 B2 F3 B3"


@given(STAGES, TRAINED, SCORED)
def test_a_stage_runs_every_pass_once_in_order_and_keeps_few_activations(
    stages: int, trained: int, scored: int
) -> None:
    for stage in range(stages):
        passes = schedule(stage, stages, trained, scored)
        assert [each.place for each in passes if each.is_forward] == list(range(trained + scored))
        assert [each.place for each in passes if not each.is_forward] == list(range(trained))
        waiting: set[int] = set()
        most = 0
        for each in passes:
            if not each.is_forward:
                waiting.remove(each.place)  # fails for a backward pass before its forward pass
            elif each.place < trained:
                waiting.add(each.place)
            most = max(most, len(waiting))
        assert most <= stages - stage
        assert most == min(stages - stage, trained)  # and it does run ahead


Message = tuple[int, int, Pass]
"""From a stage, to a stage, the pass of the sender."""


def messages(stage: int, stages: int, sent: Pass | None, received: Pass | None) -> tuple[set[Message], set[Message]]:
    """What an exchange of a stage sends and receives."""
    to = None if sent is None else sent.output_to(stage, stages)
    source = None if received is None else received.input_from(stage, stages)
    return (
        set() if sent is None or to is None else {(stage, to, sent)},
        set() if received is None or source is None else {(source, stage, received)},
    )


@given(STAGES, TRAINED, SCORED)
def test_exchanges_never_wait_for_each_other(stages: int, trained: int, scored: int) -> None:
    """Rendezvous: a message passes only while both its stages are in the exchanges that send and receive it, and an
    exchange ends when all its messages have passed. The input of a pass is the output of the same pass next door."""
    waiting = [
        [messages(stage, stages, *pair) for pair in exchanges(schedule(stage, stages, trained, scored))]
        for stage in range(stages)
    ]
    while any(waiting):
        now = [line[0] if line else (set(), set()) for line in waiting]
        passing = set().union(*(sent for sent, _ in now)) & set().union(*(received for _, received in now))
        for sent, received in now:
            sent -= passing
            received -= passing
        ended = [line.pop(0) for line in waiting if line and line[0] == (set(), set())]
        assert passing or ended, f"deadlock: {now}"
