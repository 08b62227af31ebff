"""Imports reward functions, calls them by one of three calling conventions, and checks the values that they return.

| signature | called as                                                           | returns                            |
|-----------|---------------------------------------------------------------------|------------------------------------|
| `names`   | f(response, answer, …): prompt, response, parsed, any column        | a number, None, a mapping of parts |
| `trl`     | f(prompts=[…], completions=[…], completion_ids=[…], **columns)      | a list of numbers or None          |
| `verl`    | f(data_source=…, solution_str=…, ground_truth=…, extra_info=…)      | a number, or a dict with `score`   |

Functions of each convention may be `async`. A `trl` function is called once per group with all responses of the group.
Functions of the other conventions are called once per response. Arguments are passed by name: a function may have any
subset of the parameters. Functions score multi-turn episodes too. When a function scores an episode, each argument
named after a dataset column has the value from the dataset row, and each completion is a list of messages.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from numbers import Real
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from baton.errors import UserError
from baton.rewards.dataset_columns import find_reference
from baton.rewards.scorer_protocol import Call, CallFailure, CallValue, Outcome, ScoredTask, Signature, failed
from baton.types import FailureCause, Message

RewardFunction = Callable[..., Any]
MAX_REWARD = 1e6
"""Maximum magnitude of a reward and of each reward part. Statistics are computed in float32, which has 7 digits. Above
this limit, rewards that differ by 0.1 become equal; the square of a reward above 1.8e19 overflows."""
PASSED: dict[str, RewardFunction] = {}
"""The functions that a script passed to `baton.train`, by their path in the recipe. Other processes cannot call these
functions."""
BUILT_IN: dict[Signature, tuple[str, ...]] = {
    "names": ("prompt", "response", "parsed", "episode"),
    "trl": ("prompts", "completions", "completion_ids", "answer"),
    "verl": ("data_source", "solution_str", "ground_truth", "extra_info"),
}
"""Names of the arguments of each calling convention. With the conventions `names` and `trl`, every column of the
dataset row is an argument too."""


def import_function(path: str, what: str = "reward function") -> RewardFunction:
    """Return the function that a script passed (`PASSED`) or that is imported from `path`: `module:name` or
    `file.py:name`. The module may be in the current directory. Raises UserError if the import fails."""
    return PASSED[path] if path in PASSED else _imported(path, what)


@lru_cache(maxsize=64)
def _imported(path: str, what: str) -> RewardFunction:
    module_name, _, name = path.rpartition(":")
    if not module_name or not name:
        raise UserError(f"{what}: got {path!r}, allowed is 'module:name' or 'path/to/file.py:name'")
    try:
        module = _import_file(module_name) if module_name.endswith(".py") else _import_module(module_name)
        function = getattr(module, name)
    except Exception as error:
        reason = str(error) if isinstance(error, (ImportError, AttributeError, OSError)) else describe_error(error)
        if module_name == "__main__":
            reason = f"a script passed it to baton.train; define {name} and call baton.Run(…).resume() in a script"
        raise UserError(f"{what} {path!r} cannot be imported: {reason}") from error
    if not callable(function):
        raise UserError(f"{what} {path!r} is a {type(function).__name__}, not a function")
    return function  # type: ignore[no-any-return]


def detect_signature(function: RewardFunction) -> Signature:
    """Return the calling convention of a function. It is `verl` if the function is named `compute_score` or has verl's
    parameters, `trl` if the function has a parameter `completions`, and `names` otherwise."""
    if getattr(function, "__name__", "") == "compute_score":
        return "verl"
    try:
        names = inspect.signature(function).parameters.keys()
    except (TypeError, ValueError):  # a builtin without a signature
        return "names"
    if {"data_source", "solution_str", "ground_truth"} <= names:
        return "verl"
    return "trl" if "completions" in names else "names"


def check_arguments(path: str, function: RewardFunction, signature: Signature, tasks: Iterable[ScoredTask]) -> None:
    """Raise UserError if a task does not provide a required argument of a function. A task provides the arguments in
    `BUILT_IN` and, except for the convention `verl`, its columns."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise UserError(f"reward function {path!r}: its parameters cannot be read; wrap it in a function") from error
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in parameters if p.kind not in optional and p.default is inspect.Parameter.empty]
    for task in tasks:
        known = list(BUILT_IN[signature])
        if signature != "verl":
            known += ["answer"] * (task.scorer is not None) + sorted(task.columns)
        for name in needed:
            if name not in known:
                near = get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise UserError(
                    f"reward function {path!r} has the parameter {name!r}, but task {task.name!r} provides only "
                    f"{', '.join(dict.fromkeys(known))}{hint}"
                )


def is_async(function: RewardFunction) -> bool:
    """Return whether a call to the function returns an awaitable."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def call_sync(function: RewardFunction, signature: Signature, calls: Sequence[Call]) -> tuple[Outcome, ...]:
    """Call a function as `call_function` does, but from a thread that runs no event loop."""
    try:
        result = waited(_call(function, signature, calls))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the function is the user's and may raise anything
        return failed(calls, FailureCause.RAISED, f"raised {describe_error(error, function)}")
    return _outcomes(result, signature, calls)


def waited(result: Any) -> Any:
    """If `result` is awaitable, await it in a new event loop and return its value. Otherwise return `result`
    unchanged."""

    async def outcome() -> Any:
        return await result

    return asyncio.run(outcome()) if inspect.isawaitable(result) else result


async def call_function(function: RewardFunction, signature: Signature, calls: Sequence[Call]) -> tuple[Outcome, ...]:
    """Call a function, async or not. If the function raises an exception, return a failure for each call."""
    try:
        result = _call(function, signature, calls)
        if inspect.isawaitable(result):
            result = await result
    except (Exception, SystemExit) as error:  # noqa: BLE001 - as above
        return failed(calls, FailureCause.RAISED, f"raised {describe_error(error, function)}")
    return _outcomes(result, signature, calls)


def _outcomes(result: Any, signature: Signature, calls: Sequence[Call]) -> tuple[Outcome, ...]:
    """Convert the result of a function to one outcome for each response; an invalid result becomes a failure."""
    if signature != "trl":
        return tuple(_outcome(result, signature) for _ in calls)
    try:
        if not isinstance(result, (list, tuple)) and not hasattr(result, "tolist"):
            raise TypeError("is not a list; a TRL reward function returns a list with one number per completion")
        values = list(result) if isinstance(result, (list, tuple)) else result.tolist()
        if len(values) != len(calls):
            raise ValueError(f"has {len(values)} values for {len(calls)} completion(s)")
    except Exception as error:  # noqa: BLE001 - the result may be any object
        return (malformed(result, str(error)),) * len(calls)
    return tuple(CallValue(None) if value is None else _outcome(value, signature) for value in values)


def _outcome(result: Any, signature: Signature) -> Outcome:
    try:
        if signature == "verl" and isinstance(result, dict):
            return number(result["score"]) if "score" in result else malformed(result, "has no 'score'")
        if signature == "names" and (result is None or isinstance(result, Mapping)):
            return _parts(result or {})
        return number(result)
    except Exception as error:  # noqa: BLE001 - the result may be any object
        return malformed(result, f"cannot be read ({describe_error(error)})")


def _parts(result: Mapping[str, Any]) -> Outcome:
    """Convert named parts to a value, which is their sum. A part that is None is left out. If all parts are None, the
    value is None: the function does not apply to the response."""
    parts: dict[str, float] = {}
    for name, value in result.items():
        outcome = CallValue(None) if value is None else number(value)
        if isinstance(outcome, CallFailure):
            return CallFailure(outcome.cause, f"for the part {name!r} {outcome.detail}")
        if outcome.value is not None:
            parts[str(name)] = outcome.value
    total = number(sum(parts.values())) if parts else CallValue(None)
    return msgspec.structs.replace(total, parts=parts) if isinstance(total, CallValue) else total


def number(result: Any) -> Outcome:
    """Convert a result to a value. Valid results are numbers of Python, numpy or torch, and bools, which count as 0 or
    1. Other objects, and numbers that are not finite or exceed `MAX_REWARD` in magnitude, become a failure."""
    if not isinstance(result, Real) and getattr(result, "ndim", None) == 0:
        result = result.item()  # a scalar of numpy or torch
    if not isinstance(result, Real):
        return malformed(result, "is not a number; return a float")
    try:
        value = float(result)
    except OverflowError:  # an integer or a fraction too large for a float
        value = math.inf
    else:
        if not math.isfinite(value):
            return malformed(result, "is not finite")
    if abs(value) > MAX_REWARD:
        return malformed(result, f"is larger than {MAX_REWARD:g} in magnitude; scale it down")
    return CallValue(value)


def malformed(result: Any, why: str) -> CallFailure:
    """Return the failure for an invalid result. `why`: predicate of the result, such as `has no 'score'`."""
    try:
        shown = repr(result)
    except Exception:  # noqa: BLE001 - such as an integer with more digits than Python prints
        shown = "a value that cannot be printed"
    shown = shown if len(shown) <= 80 else shown[:77] + "…"
    return CallFailure(FailureCause.MALFORMED, f"returned {shown} ({type(result).__name__}), which {why}")


def describe_error(error: BaseException, function: RewardFunction | None = None) -> str:
    """Describe an error in one line: its type, the first line of its message, and a line of the traceback. This is the
    innermost line in the file of `function`, or the innermost of all lines if no line is in this file."""
    text = str(error).strip().splitlines()
    shown = type(error).__name__
    if text:  # the text may quote a response, so control characters are escaped
        shown += ": " + "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[0][:200])
    frames = [f for f in reversed(traceback.extract_tb(error.__traceback__)) if "importlib" not in f.filename]
    own = getattr(getattr(function, "__code__", None), "co_filename", None)
    where = next((f for f in frames if f.filename == own), frames[0] if frames else None)
    if where is None or Path(where.filename).parent == Path(__file__).parent:
        # the traceback has no line of the function: the call failed, for example because of wrong arguments
        return shown
    return f"{shown} ({Path(where.filename).name}, line {where.lineno})"


def _call(function: RewardFunction, signature: Signature, calls: Sequence[Call]) -> Any:
    call = calls[0]
    prompt, episode = call.prompt, call.episode
    columns = prompt.metadata if episode is None else prompt.metadata["row"]
    assert signature == "trl" or len(calls) == 1, f"a {signature} function is called with {len(calls)} responses"
    if signature == "names":
        text = [_plain(m) for m in prompt.messages] if prompt.is_conversation else prompt.messages[-1].content
        built_in = {"prompt": text, "response": call.response, "parsed": call.answer, "episode": episode}
        answer = prompt.answer if episode is None else find_reference(columns)
        reference = {} if answer is None else {"answer": answer}
        return function(**_accepted(function, {**columns, **reference, **built_in}))
    if signature == "verl":
        raw, extra_info = find_reference(columns), columns.get("extra_info")
        if episode is None:
            raw = prompt.answer if raw is None or isinstance(raw, str) else raw
        else:
            played = {"num_turns": 1 + len(call.turns), "turn_scores": [one.reward for one in episode.exchanges]}
            extra_info = {**(extra_info or {}), **played}
        source = columns.get("data_source", prompt.task)
        texts = {"solution_str": call.response, "ground_truth": raw}
        return function(**_accepted(function, {"data_source": source, **texts, "extra_info": extra_info}))
    arguments = {name: [value] * len(calls) for name, value in {"answer": prompt.answer, **columns}.items()}
    if prompt.is_conversation:
        arguments["prompts"] = [[_plain(m) for m in prompt.messages] for _ in calls]
        arguments["completions"] = [[_plain(m) for m in c.turns or (Message("assistant", c.response),)] for c in calls]
    else:
        arguments["prompts"] = [prompt.messages[-1].content] * len(calls)
        arguments["completions"] = [c.response for c in calls]
    arguments["completion_ids"] = [list(c.token_ids) for c in calls]
    return function(**_accepted(function, arguments))


def _accepted(function: RewardFunction, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that the function takes. A required argument is None if the row has no such column."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return arguments
    named = [p for p in parameters if p.kind is not inspect.Parameter.VAR_POSITIONAL]
    return {p.name: arguments.get(p.name) for p in named if p.name in arguments or p.default is inspect.Parameter.empty}


def _plain(message: Message) -> dict[str, str]:
    return {"role": message.role, "content": message.content}


def _import_module(name: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # needed because sys.path[0] of an installed command is the directory of the command
    return importlib.import_module(name)


def _import_file(path: str) -> Any:
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {path!r} (relative to {Path.cwd()})")
    whole = file.resolve()
    # files of different directories may have the same name
    name = f"baton_reward_{file.stem}_{blake3(os.fsencode(whole)).hexdigest(8)}"
    spec = importlib.util.spec_from_file_location(name, whole)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
