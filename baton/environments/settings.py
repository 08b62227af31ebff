"""The recipe section for environments and the processes that run them."""

from __future__ import annotations

from pydantic import Field

from baton.settings import Settings


class EnvironmentSettings(Settings):
    """[environments] The processes that run environments. They start with the run."""

    processes: int = Field(default=2, ge=1)
    """Number of environment processes. All calls of an episode run in the same process. If this process ends, the
    episode continues in the process that replaces it."""
    max_concurrent: int = Field(default=64, ge=1)
    """Maximum number of calls that run at once in all processes together; further calls wait in a queue."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Maximum duration of one call to `reset` or `step` in seconds, without its time in the queue. If a call takes
    longer, its process is killed, and the other episodes of the process are rebuilt."""
    retries: int = Field(default=2, ge=0)
    """Maximum number of times that a call is repeated because its process ended or stopped responding."""
    max_failed_share: float = Field(default=0.5, gt=0, le=1)
    """The run ends if the environment causes more than this share of 100 consecutive episode attempts to fail; 1
    disables the check."""
    memory_gib: float = Field(default=8.0, ge=0)
    """Maximum memory that one process may allocate; 0 sets no limit."""
    max_observation_chars: int = Field(default=16_384, ge=1)
    """Maximum length of an observation in characters. A longer observation is cut, and a note is appended."""
    allow_network: bool = False
    """Whether environment processes may use the network."""
    env: tuple[str, ...] = ()
    """Names of environment variables that the processes get in addition to PATH and HOME, such as an API key."""
