"""The recipe's section about judging."""

from __future__ import annotations

from pydantic import Field

from baton.settings import Settings


class JudgeSettings(Settings):
    """[judge] how judges are called. Worker processes start when the first call needs one."""

    workers: int = Field(default=2, ge=1)
    """Worker processes for judges that may hang or crash; each makes one call at a time."""
    deadline_s: float = Field(default=10.0, gt=0)
    """Seconds for one call, unless its [[reward]] says otherwise; after it the call is killed, and recorded."""
    retries: int = Field(default=2, ge=0)
    """Further attempts, with growing pauses, after a crash or where a remote judge cannot be reached."""
    load_timeout_s: float = Field(default=120.0, gt=0)
    """Seconds for a worker process to start and import what it judges with."""
    network: bool = False
    """Whether worker processes may use the network, as a function does that asks a model behind a URL."""
    env: tuple[str, ...] = ()
    """Environment variables that worker processes get besides PATH, HOME and the like, such as an API key's."""
    memory_gib: float = Field(default=8.0, ge=0)
    """Most that one worker process may allocate; 0 sets no limit."""
