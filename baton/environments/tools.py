"""Environments made of tools: functions whose calls are read from the text of a turn.

| family    | models                      | a call                                                                    |
|-----------|-----------------------------|---------------------------------------------------------------------------|
| `hermes`  | Qwen 2.5 and 3, Hermes      | `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number        |
| `llama3`  | Llama 3.1 to 3.3            | `{"name": …, "parameters": {…}}`, with or without `<|python_tag|>` before |
| `mistral` | Mistral                     | `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`                          |

A turn without a call ends the episode. An unreadable call and an exception of a tool are reported to the policy.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from baton.errors import UserError
from baton.rewards.functions import import_function

FAMILIES = ("hermes", "llama3", "mistral")
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
    """Reason why the call cannot be read; None if it can."""


def family_of(chat_template: str) -> str:
    """Return the family of a chat template. Raises UserError if its tool calls have none of the known forms."""
    if "<tool_call>" in chat_template and "<function=" not in chat_template and "<arg_key>" not in chat_template:
        return "hermes"
    if "[TOOL_CALLS]" in chat_template and "[ARGS]" not in chat_template:
        return "mistral"
    if "<|start_header_id|>" in chat_template and '"parameters"' in chat_template:
        return "llama3"
    raise UserError(f"tool calls of this model's chat template cannot be read; known are {', '.join(FAMILIES)}")


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
    except ValueError as error:
        return [ToolCall("", {}, f"the calls are not JSON: {error}")]
    return [_call(part) for part in (parsed if isinstance(parsed, list) else [parsed])]


def _call(source: Any) -> ToolCall:
    try:
        found = json.loads(source) if isinstance(source, str) else source
    except ValueError as error:
        return ToolCall("", {}, f"the call is not JSON: {error}")
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return ToolCall("", {}, "the call has no name")
    arguments = found.get("arguments", found.get("parameters", {}))
    if not isinstance(arguments, dict):
        return ToolCall(found["name"], {}, "the arguments are not a JSON object")
    return ToolCall(found["name"], arguments)


def tool_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the JSON schema of a function from its annotations and Google-style docstring. Raises UserError."""
    from transformers.utils.chat_template_utils import get_json_schema

    known = getattr(function, "__func__", function)  # each episode has its own bound method
    if known in _schemas:
        return _schemas[known]
    try:
        _schemas[known] = get_json_schema(function)
    except Exception as error:
        name = getattr(function, "__name__", repr(function))
        said = " ".join(str(error).split())[:MAX_ERROR_CHARS]
        raise UserError(f"tool {name!r} needs type hints and a docstring with Args: {said}") from error
    return _schemas[known]


def prompt_text(prompt: Any) -> str:
    """Return the text of a prompt that is a string or a list of messages."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(str(message["content"]) for message in prompt)


class ToolEnvironment:
    """An environment whose turns call functions. The first observation is the row's `prompt`."""

    def __init__(
        self,
        tools: Sequence[str | Callable[..., Any]],
        *,
        family: str = "hermes",
        reward: str | None = None,
        max_turns: int = 10,
    ) -> None:
        """`tools`: functions or import paths. `reward`: path of a function of (response, **row) that scores the last
        turn; without it the reward is 0. Raises UserError."""
        if family not in FAMILIES:
            raise UserError(f"tools: got family {family!r}; allowed are {', '.join(FAMILIES)}")
        functions = [import_function(one, what="tool") if isinstance(one, str) else one for one in tools]
        self._tools: dict[str, Callable[..., Any]] = {one.__name__: one for one in functions}
        self._family, self._max_turns, self._turn = family, max_turns, 0
        self._reward = None if reward is None else import_function(reward, what="reward of the tools")
        self.instructions = _instructions(tuple(functions), family)

    def reset(self, *, seed: int, **row: Any) -> str:
        """Return the prompt of the row."""
        self._row = row
        return prompt_text(row.get("prompt", ""))

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Execute the calls of a turn; a turn without calls ends the episode and is scored."""
        self._turn += 1
        calls = tool_calls(action, self._family)
        if not calls:
            reward, info = self.score(action)
            return "", reward, True, False, {"num_calls": 0, **info}
        results = [self._execute(call) for call in calls]
        info = {"tool": calls[0].name, "num_calls": len(calls), "num_errors": sum(not ok for _, ok in results)}
        is_over = self._turn >= self._max_turns
        reward, scored = self.score(action) if is_over else (0.0, {})
        return "\n".join(text for text, _ in results), reward, False, is_over, {**info, **scored}

    def score(self, response: str) -> tuple[float, dict[str, Any]]:
        """Return the reward of the last turn, and its info."""
        return (0.0 if self._reward is None else self._reward(response, **self._row)), {}

    def _execute(self, call: ToolCall) -> tuple[str, bool]:
        if call.error is not None:
            return f"error: {call.error}", False
        if call.name not in self._tools:
            return f"error: there is no tool {call.name!r}; the tools are {', '.join(self._tools)}", False
        try:
            result = self._tools[call.name](**call.arguments)
            if inspect.isawaitable(result):
                result = asyncio.run(_awaited(result))
            return result if isinstance(result, str) else json.dumps(result, default=str), True
        except Exception as error:  # noqa: BLE001 - reported to the policy, as TRL does
            return f"error: {type(error).__name__}: {error}"[:MAX_ERROR_CHARS], False


async def _awaited(result: Any) -> Any:
    return await result


def _instructions(functions: tuple[Callable[..., Any], ...], family: str) -> str:
    schemas = "\n".join(json.dumps(tool_schema(one)) for one in functions)
    return f"You may call these functions:\n<tools>\n{schemas}\n</tools>\n\n{_FORMAT[family]}"
