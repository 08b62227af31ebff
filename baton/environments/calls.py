"""Messages between a run and its environment processes, as msgpack frames over a socket pair.

run                                            environment process
EnvironmentSetup: the classes and limits  ──▶
                                          ◀──  EnvironmentReady: loaded, or why not
ActRequest: execute one turn              ──▶
                                          ◀──  Observation or ActFailure
CloseEpisode: the episode is over         ──▶
                                          ◀──  Alive: every second while calls are running
"""

from __future__ import annotations

from typing import Any

import msgspec
from blake3 import blake3

from baton.environments.environment import Replay
from baton.types import FailureCause, Message


class ToolFormat(msgspec.Struct, frozen=True):
    """How the chat template of the model writes tool definitions."""

    family: str
    """Syntax in which the template writes tool calls: one of `FAMILIES` in `tools.py`."""
    is_rendered: bool = False
    """Whether the template renders the schemas of tools. If not, the instructions contain the schemas."""


class EnvironmentSpec(msgspec.Struct, frozen=True, tag="EnvironmentSpec"):
    """One environment of a run."""

    name: str
    path: str
    """Import path of a class, or of a function that returns an instance: `module:Class` or `path/to/file.py:Class`."""
    args: dict[str, Any] = {}
    """Keyword arguments of the class, as plain JSON values."""
    replay: Replay | None = None
    """Overrides the class's own `replay`."""
    tool_format: ToolFormat | None = None
    """Format of tool calls in the model's chat template; None if the format is unknown."""
    max_turns: int | None = None


class EpisodeKey(msgspec.Struct, frozen=True):
    """Identity of one episode's instance. If an episode is restarted, `attempt` increases by 1."""

    stream: int
    """Distinguishes training from evaluations, whose group ids may be equal."""
    group_id: int
    sample_index: int
    attempt: int = 0


class Turn(msgspec.Struct, frozen=True):
    """An executed turn, as the log of an episode records it."""

    action: str
    digest: str
    """Digest of the observation after the turn; see `digest_of`."""


class ActRequest(msgspec.Struct, frozen=True, tag="Act"):
    """Execute one turn of an episode, or only reset it. Requests are idempotent: a turn that the instance has executed
    is answered with the stored observation."""

    key: EpisodeKey
    environment: str
    seed: int
    row: dict[str, Any] = {}
    log: tuple[Turn, ...] = ()
    """The turns before `action`. If the process has no instance of the episode, it builds an instance from these turns.
    If the process has an instance that has executed all these turns, the pool sends only the last of them."""
    action: str | None = None
    """Text of the turn to execute. None: return the observation after the last turn of `log`, or after the reset."""
    first_digest: str = ""
    """Digest of the first observation, which the prompt contains. If this field is empty, no digest is compared."""
    num_left_out: int = 0
    """Number of earlier turns of the episode that `log` does not contain."""

    @property
    def turn(self) -> int:
        """Number of actions of the episode, including the requested action."""
        return self.num_left_out + len(self.log) + (self.action is not None)

    def without_executed_turns(self) -> ActRequest:
        """Return the request for an instance that has executed all turns of `log`. This request contains only the last
        of these turns, so its size does not grow with the episode."""
        return msgspec.structs.replace(self, log=self.log[-1:], num_left_out=max(0, len(self.log) - 1))


class CloseEpisode(msgspec.Struct, frozen=True, tag="CloseEpisode"):
    """Close the instance of an episode."""

    key: EpisodeKey


class Observation(msgspec.Struct, frozen=True, tag="Observation"):
    """The environment's reply to one turn."""

    key: EpisodeKey
    turn: int
    """Number of actions that the instance has executed; 0 after the reset."""
    text: str
    reward: float
    is_terminated: bool
    is_truncated: bool
    digest: str
    seconds: float
    """Seconds spent in `reset` or `step`, without the time that the call waited for other calls."""
    tool: str | None = None
    is_success: bool | None = None
    """Whether the episode counts as correct; None if the environment did not report it."""
    metrics: dict[str, float] = {}
    instructions: str = ""
    """After a reset: text that precedes the observation in the prompt."""
    canonical: str = ""
    """After a reset: canonical form of the problem, which is the same text for all equivalent problems."""
    tools: tuple[dict[str, Any], ...] = ()
    """After a reset: JSON schemas of tools that the chat template renders in the prompt."""
    earlier: tuple[Message, ...] = ()
    """After a reset: messages of the prompt before the observation, such as a system message."""


class ActFailure(msgspec.Struct, frozen=True, tag="ActFailure"):
    """The answer to a request that failed. The instance is closed. Whether the turn had effects is unknown."""

    key: EpisodeKey
    turn: int
    cause: FailureCause
    message: str
    """Reason, in one sentence."""
    blame: float = 1.0
    """Number that this failure adds to the count of failed attempts, normally 1. If the process ended and the episode
    cannot be replayed, the number is 1 divided by the number of calls that were running in the process. It is 0 if the
    episode had no running call, or if the process was killed because another call exceeded its deadline."""


class EnvironmentSetup(msgspec.Struct, frozen=True, tag="EnvironmentSetup"):
    """The first message to an environment process."""

    specs: tuple[EnvironmentSpec, ...]
    sys_path: tuple[str, ...]
    memory_bytes: int
    """Maximum memory of the process; 0 sets no limit."""
    timeout_s: float
    """Maximum seconds of one call to `reset` or `step`."""
    max_observation_chars: int


class EnvironmentReady(msgspec.Struct, frozen=True, tag="EnvironmentReady"):
    """The reply to `EnvironmentSetup`."""

    error: str | None = None
    """Reason why a class could not be loaded; None if all are loaded."""
    isolation: str = ""
    """Line for the user that describes the isolation of the process."""
    never_replayed: tuple[str, ...] = ()
    """Names of the environments whose `replay` is "never"."""


class Alive(msgspec.Struct, frozen=True, tag="Alive"):
    """A process sends this message while its calls are running. If no message arrives, the process has stopped;
    otherwise its calls are only slow."""


ToEnvironment = EnvironmentSetup | ActRequest | CloseEpisode
FromEnvironment = EnvironmentReady | Observation | ActFailure | Alive
MAX_FRAME_BYTES = 64 * 1024**2


def digest_of(text: str, reward: float, is_terminated: bool, is_truncated: bool) -> str:
    """Return the digest of an observation's full text (before it is cut), its reward and its flags."""
    return blake3(msgspec.msgpack.encode((text, reward, is_terminated, is_truncated))).hexdigest(length=12)
