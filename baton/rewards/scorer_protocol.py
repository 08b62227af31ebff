"""Types of a scorer call, and the messages between a run and its worker processes.

      run                                worker process
      ScorerSetup: scorers to load  ──▶
                                    ◀──  ScorerReady: loaded, or the error
      ScoreRequest: one call        ──▶
                                    ◀──  CallResult: a value or a failure for each response

A message is a frame: four bytes of length (big-endian), then a msgpack body.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, Protocol

import msgspec

from baton.types import Episode, FailureCause, Message, Prompt, plain

Signature = Literal["names", "trl", "verl"]
"""Calling convention of a reward function; docs/rewards.md describes the three conventions."""


class Call(msgspec.Struct, frozen=True):
    """One response to score."""

    prompt: Prompt
    response: str
    answer: str | None
    """Answer extracted from the response; None if the response does not follow the answer format."""
    token_ids: tuple[int, ...] = ()
    """Token ids of the response as sampled, [L]. If the trajectory is an episode, these are the ids of all its paths,
    including the ids of observations."""
    episode: Episode | None = None
    """The episode, reduced to the last of its paths; None for a single-turn task."""
    turns: tuple[Message, ...] = ()
    """Turns and observations of an episode. `response` is their text, and `answer` is the answer in the last turn."""


class CallValue(msgspec.Struct, frozen=True, tag="Value"):
    """Outcome of a call: the value that the scorer returned."""

    value: float | None
    """Finite value. None means that the scorer does not apply to the response."""
    parts: dict[str, float] = msgspec.field(default_factory=dict)
    """Named parts, if the function returned a mapping; their sum is the value."""


class CallFailure(msgspec.Struct, frozen=True, tag="Failed"):
    """Outcome of a call: the reason why the scorer returned no value."""

    cause: FailureCause
    detail: str
    """Verb phrase that follows the scorer's name in messages, such as `gave no answer within 10 s`."""


Outcome = CallValue | CallFailure
Calls = tuple[Call, ...]
Outcomes = tuple[Outcome, ...]


def failed(calls: Sequence[Call], cause: FailureCause, detail: str) -> Outcomes:
    """Return the same failure for each response of a call."""
    return (CallFailure(cause, detail),) * len(calls)


class FunctionSpec(msgspec.Struct, frozen=True, tag="FunctionSpec"):
    """A reward function, identified by its import path."""

    path: str
    signature: Signature

    def __str__(self) -> str:
        return f"reward function {self.path!r}"


class ScorerSpec(msgspec.Struct, frozen=True, tag="ScorerSpec"):
    """The scorer of a task, identified by the import path of the function that constructs it."""

    task: str
    path: str
    """`module:function`; the function takes `arguments` by name and returns a `Score`."""
    arguments: dict[str, Any]

    def __str__(self) -> str:
        return f"the scorer of task {self.task!r}"


class MathSpec(msgspec.Struct, frozen=True, tag="MathSpec"):
    """The scorer that compares answer and reference with math-verify."""

    def __str__(self) -> str:
        return "math-verify"


class RewardModelSpec(msgspec.Struct, frozen=True, tag="RewardModelSpec"):
    """A reward model on one device, which a worker process loads."""

    model: str
    device: str
    dtype: Literal["auto", "float32", "bfloat16"]
    batch_tokens: int

    def __str__(self) -> str:
        return f"reward model {self.model!r} on {self.device}"


class GenerativeModelSpec(msgspec.Struct, frozen=True, tag="GenerativeModelSpec"):
    """A generative reward model on one device, for which a worker process starts a vLLM server. The fields are keys of
    a [[reward]]."""

    model: str
    device: str
    dtype: Literal["auto", "float32", "bfloat16"]
    template: str
    pattern: str
    max_new_tokens: int
    context_tokens: int
    concurrency: int
    arguments: dict[str, Any]

    def __str__(self) -> str:
        return f"generative reward model {self.model!r} on {self.device}"


ModelSpecs = RewardModelSpec | GenerativeModelSpec
Spec = FunctionSpec | ScorerSpec | MathSpec | ModelSpecs
"""A scorer that a worker process can load."""
Score = Callable[[Call], Outcome]
"""Function that scores one response. An exception counts as a failure of the scorer."""
Scorer = Spec | Literal["inline"] | None
"""Where the answers of a task are scored. `inline`: in the run's process, by `ScoredTask.score`. A `Spec`: in a worker
process, because the scorer may hang. None: the task has no scorer, and only reward functions score the responses."""


class ScoredTask(Protocol):
    """The part of a task that reward scorers use."""

    @property
    def name(self) -> str:
        """Name of the task in the recipe."""

    @property
    def scorer(self) -> Scorer:
        """How answers are scored: inline, in a worker process, or not at all."""

    @property
    def columns(self) -> Collection[str]:
        """Keys of the metadata that at least one prompt of the task has."""

    def portable(self, metadata: dict[str, Any]) -> dict[str, Any]:
        """Return the metadata to send to a worker process. The result may have additional values that make `score`
        faster in that process."""

    def score(self, answer: str | None, reference: str | None, metadata: dict[str, Any]) -> float:
        """Return the score of an extracted answer: 1 means correct; a score between 0 and 1 is partial credit."""


class ScorerSetup(msgspec.Struct, frozen=True, tag="Setup"):
    """First message to a worker process: the scorers to load."""

    specs: tuple[Spec, ...]
    sys_path: tuple[str, ...]
    """The run's `sys.path`, so that the worker process imports the same modules."""
    memory_bytes: int
    """Maximum memory that the worker process may allocate; 0 sets no limit."""


class ScorerReady(msgspec.Struct, frozen=True, tag="Ready"):
    """Reply to `ScorerSetup`."""

    error: str | None = None
    """Reason why a scorer could not be loaded; None if all are loaded."""
    isolation: str = ""
    """Line for the user that describes the isolation of the process."""


class ScoreRequest(msgspec.Struct, frozen=True, tag="Ask"):
    """One call of a scorer, with one response or with all responses of a group."""

    call_id: int
    spec: int
    """Index in `ScorerSetup.specs`."""
    calls: tuple[Call, ...]
    deadline_s: float


class CallResult(msgspec.Struct, frozen=True, tag="Answer"):
    """Result of one call of a scorer."""

    call_id: int
    outcomes: tuple[Outcome, ...]
    """One outcome per element of `ScoreRequest.calls`, in the same order."""


FromWorker = ScorerReady | CallResult
HEADER_BYTES = 4


def frame(message: msgspec.Struct) -> bytes:
    """Return a frame: the length of the encoded message in bytes, then the encoded message."""
    body = encode(message)
    return len(body).to_bytes(HEADER_BYTES, "big") + body


def encode(message: msgspec.Struct) -> bytes:
    """Return a message as msgpack."""
    return msgspec.msgpack.encode(message, enc_hook=plain)
