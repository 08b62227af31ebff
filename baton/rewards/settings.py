"""The recipe section for calls of reward scorers."""

from __future__ import annotations

from pydantic import Field

from baton.settings import Settings


class JudgeSettings(Settings):
    """[judge] calls of reward scorers. Worker processes start when the first call needs one."""

    workers: int = Field(default=2, ge=1)
    """Worker processes for scorers that may hang or crash; each makes one call at a time."""
    deadline_s: float = Field(default=10.0, gt=0)
    """Maximum seconds of one call, unless its [[reward]] sets its own; a call that exceeds it is killed."""
    retries: int = Field(default=2, ge=0)
    """Further attempts, with growing pauses, after a crash or when a remote scorer is unreachable."""
    load_timeout_s: float = Field(default=120.0, gt=0)
    """Maximum seconds for a worker process to start and import its scorers."""
    network: bool = False
    """Whether worker processes may use the network, for example to call a model behind a URL."""
    env: tuple[str, ...] = ()
    """Environment variables passed to worker processes besides PATH, HOME and similar names, such as an API key."""
    memory_gib: float = Field(default=8.0, ge=0)
    """Maximum memory that one worker process may allocate; 0 sets no limit."""
