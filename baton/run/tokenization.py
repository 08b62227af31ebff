"""Converts between text and token ids for the rollout controller, which handles only token ids."""

from __future__ import annotations

import time
from collections.abc import Sequence

from baton.environments.calls import ToolFormat
from baton.environments.token_bridge import TokenBridge
from baton.errors import UserError, first_line
from baton.policy.tokenizer import Tokenizer
from baton.records.trace import Tracer
from baton.rewards.scorer import Finished, Response, RewardScorer
from baton.tasks.stream import ProblemSettings, PromptStream
from baton.types import Message, Prompt, ScoredTrajectory, Trajectory

MAX_SPAN_S = 1.0
"""Maximum seconds of a trace span of scoring. A longer period of scoring is written as several spans, so that a kill of
the process loses only the last span."""


class PromptEncoder:
    """Converts prompts to token ids. In multi-turn tasks, only the chat template adds special tokens."""

    def __init__(self, tokenizer: Tokenizer, tasks: Sequence[ProblemSettings] = ()) -> None:
        """Raises UserError if a task is multi-turn and the chat template does not allow turns."""
        self.tokenizer = tokenizer
        self._multi_turn = {task.name for task in tasks if task.environment is not None}
        self.bridge = TokenBridge(tokenizer) if self._multi_turn else None

    @property
    def tool_format(self) -> ToolFormat | None:
        """Format in which the chat template writes tools; None if the format is unknown or if no task is multi-turn."""
        return None if self.bridge is None else self.bridge.tool_format

    def ids(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the ids of a prompt, including the ids that start the policy's turn. Raises UserError if the chat
        template refuses the messages of a single-turn prompt."""
        if self.bridge is None or prompt.task not in self._multi_turn:
            try:
                return self.tokenizer.prompt_ids(prompt.messages)
            except Exception as error:  # a template is a program and may raise any exception
                roles = ", ".join(message.role for message in prompt.messages)
                advice = "change the messages in the data, or choose another model"
                if not prompt.is_conversation and len(prompt.messages) > 1:
                    advice = "set answer.instruct = false, and state the answer format in the prompts"
                where = f"task {prompt.task!r}" if prompt.task else "data"
                raise UserError(
                    f"{where}: the model's chat template refuses messages with the roles {roles}: "
                    f"{first_line(error)}; {advice}"
                ) from error
        return self.bridge.prompt(prompt.messages, prompt.metadata.get("tools", ()))

    def num_tokens(self, prompt: Prompt) -> int:
        return len(self.ids(prompt))


class TokenizedPrompts:
    """The `PromptSource` of a run: the prompts of a stream with their token ids."""

    def __init__(self, stream: PromptStream, encoder: PromptEncoder) -> None:
        self._stream, self._encoder = stream, encoder

    @property
    def position(self) -> dict[str, int]:
        return self._stream.position

    def take(self) -> tuple[Prompt, tuple[int, ...]]:
        (prompt,) = self._stream.take(1)
        return prompt, self._encoder.ids(prompt)


def response_of(finished: Finished, tokenizer: Tokenizer) -> Response:
    """Return the text of a trajectory, or the turns and observations of a multi-turn episode as messages."""
    if isinstance(finished, Trajectory):
        return tokenizer.text(finished.token_ids)
    assert finished.episode is not None
    found: list[Message] = []
    for exchange in finished.episode.exchanges:
        found.append(Message("assistant", exchange.action))
        if exchange.observation:
            found.append(Message("user" if exchange.tool is None else "tool", exchange.observation))
    last, path = finished.trajectory, len(finished.paths) - 1
    if all((e.path, e.token_offset) != (path, last.num_tokens) for e in finished.episode.exchanges):
        found.append(Message("assistant", tokenizer.text(last.turn_ids)))  # a turn that was not sent to the environment
    return found


class ResponseScorer:
    """The `TrajectoryScorer` of a run: it decodes finished trajectories and submits their text to the reward scorer.

    A multi-turn episode already has the reward that its environment gave; the values of reward functions are added to
    this reward. The scorer writes a trace span for each period in which trajectories wait for rewards.
    """

    def __init__(self, scorer: RewardScorer, tokenizer: Tokenizer, tracer: Tracer) -> None:
        self._scorer, self._tokenizer, self._tracer = scorer, tokenizer, tracer
        self.sees_groups, self.scores_episodes = scorer.sees_groups, scorer.scores_episodes
        self._num_waiting = self._num_scored = 0
        self._since_s = 0.0

    def submit(self, finished: Sequence[Finished], prompt: Prompt) -> None:
        if not self._num_waiting:
            self._since_s = time.monotonic()
        self._num_waiting += len(finished)
        self._scorer.submit(finished, prompt, [response_of(one, self._tokenizer) for one in finished])

    def collect(self, timeout_s: float = 0.0) -> list[ScoredTrajectory]:
        found = self._scorer.collect(timeout_s)
        self._num_waiting -= len(found)
        self._num_scored += len(found)
        now_s = time.monotonic()
        if (found and not self._num_waiting) or (self._num_waiting and now_s - self._since_s > MAX_SPAN_S):
            self._tracer.span("judge", "judges", 0, self._since_s, now_s, trajectories=self._num_scored)
            self._since_s, self._num_scored = now_s, 0
        return found
