"""The recipe section for environments and the processes that run them."""

from __future__ import annotations

from pydantic import Field

from baton.settings import Settings


class EnvironmentSettings(Settings):
    """[environments] the processes that run environments. They start with the run."""

    processes: int = Field(default=2, ge=1)
    """Environment processes. All calls of an episode run in the same one."""
    max_concurrent: int = Field(default=64, ge=1)
    """Maximum number of calls that run at once in all processes together; further calls wait in a queue."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Maximum seconds of one call of `reset` or `step`, without its time in the queue. The process of a call that
    exceeds it is killed; the other episodes of that process are rebuilt."""
    retries: int = Field(default=2, ge=0)
    """Further attempts of a call whose process ended or stopped responding."""
    max_failed_share: float = Field(default=0.5, gt=0, le=1)
    """Maximum share of attempts that may fail because of their environment, out of 100 consecutive attempts at
    episodes. Above it the run ends; 1 disables this check."""
    memory_gib: float = Field(default=8.0, ge=0)
    """Maximum memory that one process may allocate; 0 sets no limit."""
    max_observation_chars: int = Field(default=16_384, ge=1)
    """Longer observations are shortened, and a note about it is appended."""
    allow_network: bool = False
    """Whether environment processes may use the network."""
    env: tuple[str, ...] = ()
    """Environment variables passed to the processes besides PATH, HOME and similar names, such as an API key."""
