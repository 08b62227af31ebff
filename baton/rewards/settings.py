"""The recipe sections for reward parts and for calls of reward scorers."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from baton.rewards.scorer_protocol import Signature
from baton.settings import Settings


class RewardSettings(Settings):
    """[[reward]] one part of the reward; the reward is the weighted sum of the parts."""

    kind: Literal["correct", "score", "exact", "format", "math", "function", "http"]
    """correct: 1 for a full score of the task's scorer, else 0. score: the scorer's value with its partial credit.
    exact: 1 when the answer equals the reference as text. format: 1 when the answer format is met. math: 1 when the
    answer equals the reference by math-verify. function: your own function. http: a scorer behind a URL."""
    name: str = ""
    """Name in metrics; the default is the kind, or the name of the function."""
    weight: float = Field(default=1.0, allow_inf_nan=False)
    """Factor of this part in the sum."""
    function: str | None = None
    """`module:name` or `file.py:name`, for kind = "function"."""
    signature: Signature | None = None
    """Calling convention of the function; the default is detected from its name and parameters."""
    isolate: bool = True
    """True to run the function in a worker process that can be killed. False runs it in the controller process without
    a deadline: only for functions that always return."""
    url: str | None = None
    """URL to POST to, for kind = "http"."""
    deadline_s: float | None = Field(default=None, gt=0)
    """Maximum seconds of one call; the default is judge.deadline_s."""
    concurrency: int = Field(default=32, ge=1)
    """Maximum concurrent calls of an async function or a remote scorer."""

    @model_validator(mode="before")
    @classmethod
    def _named(cls, data: Any) -> Any:
        if isinstance(data, dict) and not data.get("name"):
            function = data.get("function")
            name = function.rpartition(":")[2] if isinstance(function, str) else data.get("kind")
            return {**data, "name": name or ""}
        return data

    @model_validator(mode="after")
    def _fits_its_kind(self) -> RewardSettings:
        if (self.kind == "function") != (self.function is not None):
            raise ValueError('function = "module:name" belongs to kind = "function" and is required there')
        if (self.kind == "http") != (self.url is not None):
            raise ValueError('url = "http://…" belongs to kind = "http" and is required there')
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url: got {self.url!r}, allowed is http://… or https://…")
        if self.kind != "function" and (self.signature is not None or not self.isolate):
            raise ValueError('signature and isolate belong to kind = "function"')
        return self


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
    """True to allow worker processes the network, for example to call a model behind a URL."""
    env: tuple[str, ...] = ()
    """Environment variables passed to worker processes besides PATH, HOME and similar names, such as an API key."""
    memory_gib: float = Field(default=8.0, ge=0)
    """Maximum memory that one worker process may allocate; 0 sets no limit."""
