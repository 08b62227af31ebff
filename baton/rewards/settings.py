"""The recipe sections for the answer format, for reward parts and for calls of reward scorers."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from baton.rewards.answer import AnswerFormat
from baton.rewards.patterns import check_pattern
from baton.rewards.scorer_protocol import Signature
from baton.settings import Settings
from baton.specs.vllm_arguments import refusal_of
from baton.types import ENVIRONMENT

LOAD_TIMEOUT_S = 300.0
"""Maximum time in which a worker process must start and import its scorers."""

SERVER_START_S = 900.0
"""Maximum time in which the vLLM server of a generative reward model must start and load its model."""


class AnswerSettings(Settings):
    """[answer] Format in which a response states its answer."""

    format: AnswerFormat = "tags"
    """`tags`, `boxed`, `last_line`, `last_number`, `letter` or `regex`; see docs/tasks.md."""
    pattern: str = ""
    """Regular expression for format = "regex". The answer is the first group of its last match. If matching takes
    more than 30 s of CPU time, the response has no answer."""
    instruct: bool = True
    """True: prompts begin with a system message that asks for the format. No message exists for `regex`."""

    @model_validator(mode="after")
    def _has_its_pattern(self) -> AnswerSettings:
        if (self.format == "regex") != bool(self.pattern):
            raise ValueError('pattern belongs to format = "regex", which requires it')
        check_pattern(self.pattern)
        return self


ANY_NUMBER = r"(-?\d+(?:\.\d+)?)"
"""Default of `RewardSettings.pattern`."""


class RewardSettings(Settings):
    """[[reward]] One part of the reward. The reward is the weighted sum of the parts."""

    kind: Literal["correct", "score", "exact", "format", "math", "function", "http", "model"]
    """Value of the part. correct: 1 if the task's scorer returns 1, else 0. score: the value of the task's scorer,
    which may be partial credit. exact: 1 if the answer equals the reference as text. format: 1 if the response follows
    the answer format. math: 1 if math-verify finds answer and reference equal. function: the value of your function.
    http: the value of a scorer behind a URL. model: the score of a reward model. Without `template`, this model is a
    Hugging Face sequence classifier with one label. With `template`, it is a generative model, for which Baton starts a
    vLLM server; the score is the number in its reply."""
    name: str = ""
    """Name of the part in metrics; the default is `kind`, or for kind = "function" the name of the function."""
    weight: float = 1.0
    """Factor of this part in the sum."""
    function: str | None = None
    """Reward function as `module:name` or `file.py:name`, for kind = "function"."""
    signature: Signature | Literal["auto"] = "auto"
    """Calling convention of the function. auto: detected from the function's name and parameters."""
    isolate: bool = True
    """True: run the function in a worker process that can be killed. False: run the function in a thread of the
    controller process; the run stops if a call exceeds its deadline."""
    url: str | None = None
    """URL that receives a POST request for each response, for kind = "http"."""
    template: str = ""
    """Message to a generative reward model, with {prompt}, {response} and {reference}, for kind = "model" or "http".
    For "http" with `template`, `url` is the address of the chat completions of an OpenAI API, such as
    http://127.0.0.1:8000/v1/chat/completions."""
    pattern: str = ANY_NUMBER
    """Regular expression for the reply to `template`. The reward is the number in the first group of the last match."""
    model: str | None = None
    """Directory of a reward model, or its name on the Hugging Face hub, for kind = "model". For kind = "http" with
    `template`, the name of the model in the server."""
    max_new_tokens: int = Field(default=1024, ge=1)
    """Maximum tokens of a reply to `template`. A reply that is cut before its number gives no reward."""
    context_tokens: int = Field(default=8192, ge=2)
    """Maximum tokens of a message and its reply together, for kind = "model" with `template`. The server's KV cache has
    room for `concurrency` sequences of this length."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the vLLM server, such as {reasoning_parser = "qwen3"}, for kind = "model" with
    `template`."""
    devices: tuple[str, ...] = ()
    """Devices of the reward model, such as ["cuda:2", "cuda:3"]. A process on each device holds the whole model. By
    default, the model uses a GPU that neither the trainer nor an engine uses. If there is no such GPU, the model shares
    the GPU of an engine. If the run uses the CPU, so does the model."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of the reward model. auto: bfloat16 on CUDA, float32 on a CPU."""
    batch_tokens: int = Field(default=16384, ge=1)
    """Maximum number of tokens that the reward model scores in one batch, including padding. On a CPU, the model scores
    one conversation at a time instead."""
    deadline_s: float | None = Field(default=None, gt=0)
    """Maximum duration of one call in seconds; the default is judge.deadline_s, but 120 for kind = "model"."""
    concurrency: int = Field(default=32, ge=1)
    """Maximum concurrent calls of an async function, a remote scorer, or a reward model on one device."""

    @field_validator("arguments")
    @classmethod
    def _leaves_the_others(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        for name, value in arguments.items():
            if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name):
                raise ValueError(
                    f"{name!r}: allowed is the name of an argument of vLLM, such as max_num_batched_tokens"
                )
            if refusal := refusal_of("reward", name, value):
                raise ValueError(f"{name}: {refusal}")
        return arguments

    @property
    def starts_server(self) -> bool:
        """Whether the part is a generative reward model, for which Baton starts a vLLM server."""
        return self.kind == "model" and bool(self.template)

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
            raise ValueError('function = "module:name" belongs to kind = "function", which requires it')
        if (self.kind == "http") != (self.url is not None):
            raise ValueError('url = "http://…" belongs to kind = "http", which requires it')
        if (self.kind == "model" or bool(self.template)) != (self.model is not None):
            raise ValueError('model = "name" belongs to kind = "model" or to template, which require it')
        if self.template and self.kind not in ("http", "model"):
            raise ValueError('template belongs to kind = "http" or "model"')
        if not check_pattern(self.pattern):
            raise ValueError(f"pattern: got {self.pattern!r}, but the number must be in a group, such as ([0-9]+)")
        if self.kind != "model" and (key := self.first_given("batch_tokens", "devices", "dtype")):
            raise ValueError(f'{key} belongs to kind = "model"')
        if not self.starts_server and (key := self.first_given("context_tokens", "arguments")):
            raise ValueError(f'{key} belongs to kind = "model" with template')
        if self.starts_server and self.first_given("batch_tokens"):
            raise ValueError('batch_tokens belongs to kind = "model" without template')
        if self.starts_server and self.context_tokens <= self.max_new_tokens:
            raise ValueError(
                f"context_tokens: got {self.context_tokens}, but a reply may have max_new_tokens = "
                f"{self.max_new_tokens}; context_tokens must be larger"
            )
        if len(set(self.devices)) < len(self.devices):
            raise ValueError(f"devices: got {list(self.devices)}, but each process needs a device of its own")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url: got {self.url!r}, allowed is http://… or https://…")
        if self.name == ENVIRONMENT:
            raise ValueError(f"name: {ENVIRONMENT!r} is the part that environments give; choose another name")
        if self.kind != "function" and self.first_given("signature", "isolate"):
            raise ValueError('signature and isolate belong to kind = "function"')
        return self


class JudgeSettings(Settings):
    """[judge] Calls of reward scorers. One worker process starts with the run; further worker processes start when a
    call needs them."""

    workers: int = Field(default=2, ge=1)
    """Maximum number of worker processes that each execute one scorer call at a time. Async functions share one further
    process, and each reward model has one further process per device."""
    deadline_s: float = Field(default=10.0, gt=0)
    """Maximum seconds of one call. After this time, the call's process is killed. A [[reward]] may have its own
    `deadline_s`."""
    retries: int = Field(default=2, ge=0)
    """Maximum repetitions of a call, with growing pauses, after a crash or if a remote scorer is unreachable."""
    network: bool = False
    """True: worker processes may use the network, for example to call a model behind a URL."""
    env: tuple[str, ...] = ()
    """Names of environment variables that worker processes get in addition to PATH and HOME, such as an API key."""
    memory_gib: float = Field(default=8.0, ge=0)
    """Maximum memory that one worker process may allocate; 0 sets no limit."""
