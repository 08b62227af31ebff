"""Environments made of tools: functions whose calls are read from the text of a turn.

| family    | models                      | a call                                                                    |
|-----------|-----------------------------|---------------------------------------------------------------------------|
| `hermes`  | Qwen 2.5 and 3, Hermes      | `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number        |
| `llama3`  | Llama 3.1 to 3.3            | `{"name": …, "parameters": {…}}`, with or without `<|python_tag|>` before |
| `mistral` | Mistral                     | `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`                          |

A turn without a call ends the episode. If a call is unreadable or a tool raises an exception, the policy receives the
error message.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from numbers import Real
from typing import Any

import msgspec

from baton.environments.calls import EnvironmentSpec, ToolFormat
from baton.errors import UserError
from baton.rewards.functions import import_function, waited

FAMILIES = ("hermes", "llama3", "mistral")
CALL_MARKERS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>")
"""Tags of calls, which are special tokens of some tokenizers."""
MAX_ERROR_CHARS = 500
_FORMAT = {
    "hermes": (
        "For each call return a JSON object within <tool_call></tool_call> tags:\n"
        '<tool_call>\n{"name": <function-name>, "arguments": <arguments-object>}\n</tool_call>'
    ),
    "llama3": (
        "To call a function, answer only with a JSON object: "
        '{"name": <function-name>, "parameters": <arguments-object>}'
    ),
    "mistral": 'To call functions, answer: [TOOL_CALLS][{"name": <function-name>, "arguments": <arguments-object>}]',
}


_schemas: dict[Callable[..., Any], dict[str, Any]] = {}


class ToolCall(msgspec.Struct, frozen=True):
    """A call that was read from a turn."""

    name: str
    arguments: dict[str, Any]
    error: str | None = None
    """Reason why the call cannot be read; None if it was read."""


def tool_calls(text: str, family: str) -> list[ToolCall]:
    """Read the calls of a turn."""
    if family == "hermes":
        found = re.findall(r"<tool_call>(.*?)(?:</tool_call>|$)", text.rpartition("</think>")[2], re.DOTALL)
        return [_call(part) for part in found]
    text = re.sub(r"<\|\w+\|>\s*$", "", text.strip()).strip()  # the end of the turn
    if family == "llama3":
        text = text.removeprefix("<|python_tag|>").strip()
        return [_call(text)] if re.match(r'\{\s*"(name|type|function)"', text) else []
    before, mark, calls = text.removesuffix("</s>").partition("[TOOL_CALLS]")
    if not mark and not re.match(r'\[\s*\{\s*"name"', before):
        return []
    try:
        parsed = json.loads(calls if mark else before)
    except (ValueError, RecursionError) as error:
        return [ToolCall("", {}, f"the calls are not JSON: {error}")]
    return [_call(part) for part in (parsed if isinstance(parsed, list) else [parsed])]


def _call(source: Any) -> ToolCall:
    try:
        found = json.loads(source) if isinstance(source, str) else source
    except (ValueError, RecursionError) as error:
        return ToolCall("", {}, f"the call is not JSON: {error}")
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return ToolCall("", {}, "the call has no name")
    arguments = found.get("arguments", found.get("parameters", {}))
    if not isinstance(arguments, dict):
        return ToolCall(found["name"], {}, "the arguments are not a JSON object")
    return ToolCall(found["name"], arguments)


def tool_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the JSON schema of a function, derived from its annotations and its docstring in Google's style. Raises
    UserError if annotations or docstring are incomplete."""
    from transformers.utils.chat_template_utils import get_json_schema

    known = getattr(function, "__func__", function)  # each episode has its own bound method
    if known in _schemas:
        return _schemas[known]
    try:
        _schemas[known] = get_json_schema(function)
    except Exception as error:
        name = getattr(function, "__name__", repr(function))
        said = " ".join(str(error).split())[:MAX_ERROR_CHARS]
        raise UserError(f"tool {name!r} needs type hints and a docstring with a section 'Args:' ({said})") from error
    return _schemas[known]


def prompt_text(prompt: Any) -> str:
    """Return the text of a prompt that is a string or a list of messages."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(str(message["content"]) for message in prompt)


def split_prompt(prompt: Any) -> tuple[list[tuple[str, str]], str]:
    """Return the messages of a prompt before its last user message as (role, text), and the text of the rest."""
    messages = [] if isinstance(prompt, str) else [(str(m["role"]), str(m["content"])) for m in prompt]
    last = next((at for at in reversed(range(len(messages))) if messages[at][0] == "user"), 0)
    return messages[:last], prompt_text(prompt if isinstance(prompt, str) else prompt[last:])


def accepted_by(function: Callable[..., Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return the values whose names are parameters of a function; all values if it has a `**` parameter."""
    parameters = inspect.signature(function).parameters
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    return {name: value for name, value in values.items() if takes_all or name in parameters}


def with_success(reward: Any) -> tuple[Any, dict[str, Any]]:
    """Return a reward and its `info`. If the reward is a number, `info["success"]` states whether it is at least 1."""
    reward = waited(reward)
    return reward, {"success": float(reward) >= 1.0} if isinstance(reward, Real) else {}


class ConversationPrompt:
    """Base class of Baton's environments whose prompt may be a conversation."""

    earlier_messages: Sequence[tuple[str, str]] = ()
    """After a reset: role and text of the messages before the observation."""


class ToolEnvironment(ConversationPrompt):
    """An environment whose turns call functions. The first observation is the row's `prompt`."""

    instructions = ""
    """Text before the first observation. A subclass may set it; `configure` appends instructions for the tools."""

    def __init__(
        self,
        tools: Sequence[str | Callable[..., Any]],
        *,
        family: str | None = None,
        reward: str | None = None,
        max_turns: int | None = None,
    ) -> None:
        """`tools`: functions or import paths. `family`: form of calls; the default is the form that the chat template
        uses. `reward`: import path of a function that scores the last turn. The function receives the turn's text, and
        the columns of the row that it accepts as arguments. Without a function, the reward is 0. `max_turns`: maximum
        number of turns; the task's `max_turns` is the default and the upper limit. Raises UserError for an unknown
        family, or for a function that cannot be imported or has no schema."""
        if family not in (None, *FAMILIES):
            raise UserError(f"tools: got family {family!r}; allowed are {', '.join(FAMILIES)}")
        functions = [import_function(one, what="tool") if isinstance(one, str) else one for one in tools]
        self._tools: dict[str, Callable[..., Any]] = {one.__name__: one for one in functions}
        self._schemas = [tool_schema(one) for one in functions]
        self._format = None if family is None else ToolFormat(family)
        self._max_turns, self._turn = max_turns, 0
        self._reward = None if reward is None else import_function(reward, what="reward of the tools")

    def configure(self, spec: EnvironmentSpec) -> None:
        """Set the number of turns and the format of calls. The format is that of the model's chat template, unless the
        constructor received a `family`. Raises UserError if there are tools but the format of their calls is
        unknown."""
        if self._max_turns is None or (spec.max_turns is not None and spec.max_turns < self._max_turns):
            self._max_turns = spec.max_turns
        of_model = spec.tool_format
        if self._format is None or (of_model is not None and self._format.family == of_model.family):
            self._format = of_model
        if self._tools and self._format is None:
            raise UserError(
                "the model's chat template writes tool calls in an unsupported form; supported are the forms of "
                f"{', '.join(FAMILIES)}; use another model, or set params.family to the form that the model writes"
            )
        if self._tools and self._format is not None and not self._format.is_rendered:
            schemas = "\n".join(map(json.dumps, self._schemas))
            text = f"You may call these functions:\n<tools>\n{schemas}\n</tools>\n\n{_FORMAT[self._format.family]}"
            self.instructions = f"{self.instructions}\n\n{text}".lstrip()

    @property
    def rendered_tools(self) -> list[dict[str, Any]]:
        """Schemas for the chat template; empty if the template does not render schemas."""
        return self._schemas if self._format is not None and self._format.is_rendered else []

    def reset(self, *, seed: int, **row: Any) -> str:
        self._row = row
        self.earlier_messages, text = split_prompt(row.get("prompt", ""))
        return text

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Execute the calls of a turn; a turn without calls ends the episode and is scored."""
        self._turn += 1
        assert self._format is not None or not self._tools, "tools need a family: give one, or call `configure`"
        calls = [] if self._format is None else tool_calls(action, self._format.family)
        if not calls:
            reward, info = self.score(action)
            return "", reward, True, False, {"num_calls": 0, **info}
        results = [self._execute(call) for call in calls]
        info = {"tool": calls[0].name, "num_calls": len(calls), "num_errors": sum(not ok for _, ok in results)}
        is_over = self._is_last_turn
        reward, scored = self.score(action) if is_over else (0.0, {})
        return "\n".join(text for text, _ in results), reward, False, is_over, {**info, **scored}

    @property
    def _is_last_turn(self) -> bool:
        return self._max_turns is not None and self._turn >= self._max_turns

    def score(self, response: str) -> tuple[float, dict[str, Any]]:
        """Return the reward of the last turn, and its info."""
        if self._reward is None:
            return 0.0, {}
        scored = partial(self._reward, response)
        return with_success(scored(**accepted_by(scored, self._row)))

    def _execute(self, call: ToolCall) -> tuple[str, bool]:
        if call.error is not None:
            return f"error: {call.error}", False
        if call.name not in self._tools:
            return f"error: there is no tool {call.name!r}; the tools are {', '.join(self._tools)}", False
        try:
            result = waited(self._tools[call.name](**call.arguments))
            return result if isinstance(result, str) else json.dumps(result, default=str), True
        except Exception as error:  # noqa: BLE001 - reported to the policy, as TRL does
            return f"error: {type(error).__name__}: {error}"[:MAX_ERROR_CHARS], False
