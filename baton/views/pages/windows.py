"""Find the train steps of a trace, and select the time windows to draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from baton.records.trace import ASIDE, Span, gapless_periods

WHOLE = 5
"""Maximum number of train steps of a trace that is drawn in one window."""
FEW = 3
"""Number of train steps per window of a longer trace."""


@dataclass(frozen=True, slots=True)
class TracedStep:
    """The times of one train step in a trace."""

    number: int
    begin_s: float
    """Start of the wait for the step's batch. If the trace contains no such wait, end of the previous step."""
    train_s: float
    """Start of training."""
    end_s: float
    """End of the publication of the step's version."""


@dataclass(frozen=True, slots=True)
class Window:
    """A time window of a trace."""

    title: str
    spans: Sequence[Span]
    """All spans of one uninterrupted part of the trace: the part that contains the window."""
    steps: Sequence[TracedStep]
    begin_s: float
    end_s: float
    zero_s: float
    """The zero of the time axis: the start of the uninterrupted part."""


def steps_of(spans: Sequence[Span]) -> list[TracedStep]:
    """Return the train steps of one uninterrupted part of a trace, in order."""
    stages = sorted(
        (s for s in spans if s.actor == "trainer" and s.name in ("wait_for_batch", "train", "publish")),
        key=lambda s: s.begin_s,
    )
    steps: list[TracedStep] = []
    begin_s: float | None = min((span.begin_s for span in spans if span.lane != ASIDE), default=None)
    for span in stages:
        if span.name == "wait_for_batch":
            begin_s = span.begin_s
        elif span.name == "train":
            number = int(span.facts.get("step", span.facts.get("version", len(steps) + 1)))
            begin_s = steps[-1].end_s if begin_s is None else begin_s
            steps.append(TracedStep(number, begin_s, span.begin_s, span.end_s))
            begin_s = None
        elif steps:
            steps[-1] = replace(steps[-1], end_s=max(steps[-1].end_s, span.end_s))
    return steps


def choose_windows(spans: Sequence[Span]) -> list[Window]:
    """Return one window for a short trace; otherwise the first steps, the slowest step with its neighbours, and the
    last steps. No window contains a gap, such as the time between a kill and the resume."""
    parts = [(part, steps) for part in gapless_periods(spans) if (steps := steps_of(part))]
    if not parts:
        whole = [s for s in spans if s.end_s > s.begin_s]
        if not whole:
            return []
        begin_s, end_s = min(s.begin_s for s in whole), max(s.end_s for s in whole)
        return [Window("Whole trace", whole, (), begin_s, end_s, begin_s)]
    (first_part, first_steps), (last_part, last_steps) = parts[0], parts[-1]
    if len(parts) == 1 and len(first_steps) <= WHOLE:
        return [_window(_numbers("Step", first_steps), first_part, first_steps)]
    first = first_steps[:FEW]
    last = [step for step in _with_leases(last_part, last_steps)[-FEW:] if step not in first]
    windows = [_window(_numbers("The first steps:", first), first_part, first)]
    shown = {id(step) for step in (*first, *last)}
    others = [(part, steps, i) for part, steps in parts for i, step in enumerate(steps) if id(step) not in shown]
    if others:
        part, steps, i = max(others, key=lambda one: one[1][one[2]].end_s - one[1][one[2]].begin_s)
        title = f"The slowest other step: {steps[i].number}, with its neighbours"
        windows.append(_window(title, part, steps[max(0, i - 1) : i + 2]))
    if last:
        what = "The last steps:" if last[-1] is last_steps[-1] else "The last steps with generation:"
        windows.append(_window(_numbers(what, last), last_part, last))
    return windows


def _with_leases(part: Sequence[Span], steps: Sequence[TracedStep]) -> Sequence[TracedStep]:
    """Return the steps up to the last step during which a lease ran; all steps if the trace has no lease."""
    leases = [s for s in part if s.name == "generate"]
    for count in range(len(steps), 0, -1):
        if any(s.begin_s < steps[count - 1].end_s and s.end_s > steps[count - 1].begin_s for s in leases):
            return steps[:count]
    return steps


def _window(title: str, part: Sequence[Span], steps: Sequence[TracedStep]) -> Window:
    return Window(title, part, steps, steps[0].begin_s, steps[-1].end_s, min(span.begin_s for span in part))


def _numbers(what: str, steps: Sequence[TracedStep]) -> str:
    first, last = steps[0].number, steps[-1].number
    return f"{what} {first}" if first == last else f"{what} {first} to {last}"
