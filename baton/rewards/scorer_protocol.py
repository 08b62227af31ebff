"""What a judge is asked and what it says, in memory and between a run and its worker processes.

      run                                       worker process
      ScorerSetup: what it will be asked about  ──▶
                                          ◀──   Ready: loaded, or why not
      ScoreRequest: one call                       ──▶
                                          ◀──   Answer: a value, or why there is none

A frame is four bytes of length (big-endian) and a msgpack body.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import msgspec

from baton.types import FailureCause, Prompt

Signature = Literal["baton", "trl", "verl"]
"""Convention in which a reward function is called; docs/tasks.md draws the three."""


class Call(msgspec.Struct, frozen=True):
    """One response to be judged."""

    prompt: Prompt
    response: str
    answer: str | None
    """Extracted from the response; None where the answer format was not met."""
    token_ids: tuple[int, ...] = ()
    """[L] of the response, as the engine sampled them."""


class CallValue(msgspec.Struct, frozen=True, tag="Value"):
    """What a judge said."""

    value: float | None
    """Finite; None where the judge says that it does not apply (TRL's convention only)."""


class CallFailure(msgspec.Struct, frozen=True, tag="Failed"):
    """Why a judge said nothing."""

    cause: FailureCause
    detail: str
    """One sentence without the name of the judge."""


Outcome = CallValue | CallFailure


def failed(calls: Sequence[Call], cause: FailureCause, detail: str) -> tuple[Outcome, ...]:
    """Return the same failure for each of the responses that were judged together."""
    return (CallFailure(cause, detail),) * len(calls)


class FunctionSpec(msgspec.Struct, frozen=True, tag="FunctionSpec"):
    """A reward function by import path."""

    path: str
    signature: Signature

    def __str__(self) -> str:
        return f"reward function {self.path!r}"


class ScorerSpec(msgspec.Struct, frozen=True, tag="ScorerSpec"):
    """The scorer of a task, by the import path of the function that makes it."""

    task: str
    path: str
    """`module:function`: takes `arguments` by name and returns a `Score`."""
    arguments: dict[str, Any]

    def __str__(self) -> str:
        return f"the scorer of task {self.task!r}"


class MathSpec(msgspec.Struct, frozen=True, tag="MathSpec"):
    """math-verify."""

    def __str__(self) -> str:
        return "math-verify"


Spec = FunctionSpec | ScorerSpec | MathSpec
"""What a worker process can be asked about."""
Score = Callable[[Call], Outcome]
"""Scores one response. What it raises is a failure of the scorer."""
Scorer = Spec | Literal["inline"] | None
"""Who scores the answers of a task: `inline` calls `score` in place; a spec tells a worker process what to load,
because some answers may never let the scorer return; None has no scorer, so that reward functions judge alone."""


class ScoredTask(Protocol):
    """What a reward needs of a task."""

    @property
    def name(self) -> str:
        """The name the recipe gives it."""

    @property
    def scorer(self) -> Scorer:
        """Where `score` may be called."""

    def portable(self, metadata: dict[str, Any]) -> dict[str, Any]:
        """Return what `score` may be given in place of `metadata` in another process, to save it work."""

    def score(self, answer: str | None, reference: str | None, metadata: dict[str, Any]) -> float:
        """Score an extracted answer in 0..1; only 1 is correct, less is partial credit."""


class ScorerSetup(msgspec.Struct, frozen=True, tag="Setup"):
    """The first message to a worker process."""

    specs: tuple[Spec, ...]
    sys_path: tuple[str, ...]
    """Where the run imports from, so that the worker finds the same modules."""
    memory_bytes: int
    """Most that the process may allocate; 0 sets no limit."""


class ScorerReady(msgspec.Struct, frozen=True, tag="Ready"):
    """The answer to `ScorerSetup`."""

    error: str | None = None
    """Why something could not be loaded."""
    isolation: str = ""
    """What the process is kept from."""


class ScoreRequest(msgspec.Struct, frozen=True, tag="Ask"):
    """Responses to be judged in one call of the judge: one, or those of a group."""

    call_id: int
    spec: int
    """Place in `ScorerSetup.specs`."""
    calls: tuple[Call, ...]
    deadline_s: float


class CallResult(msgspec.Struct, frozen=True, tag="Answer"):
    """What came of one call of the judge."""

    call_id: int
    outcomes: tuple[Outcome, ...]
    """As many as `ScoreRequest.calls`, in their order."""


FromWorker = ScorerReady | CallResult
