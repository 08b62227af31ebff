"""Tools: schemas from signatures, calls read per model family, and errors that the policy sees."""

from __future__ import annotations

from typing import Any

import pytest
from environment_cases import request, turns_of

from baton.environments.adapters import load_environment
from baton.environments.calculator import Calculator
from baton.environments.calls import EnvironmentSpec, Observation, ToolFormat
from baton.environments.instances import EnvironmentInstances
from baton.environments.tools import ToolCall, ToolEnvironment, tool_calls, tool_schema
from baton.errors import UserError


def weather(city: str, days: int = 1) -> dict[str, object]:
    """
    Look the weather up.

    Args:
        city: The name of the city.
        days: For how many days.
    """
    if city == "Atlantis":
        raise KeyError(city)
    return {"city": city, "sunny": True, "days": days}


async def later(x: int) -> int:
    """
    Return a number.

    Args:
        x: The number.
    """
    return x


def undocumented(x):  # type: ignore[no-untyped-def]
    return x


def reward_of_rome(response: str, city: str) -> float:
    return float(city in response)


def reward(response: str, answer: str = "", **_: object) -> float:
    return float(answer in response)


ONE = [ToolCall("weather", {"city": "Rome"})]


@pytest.mark.parametrize(
    ("family", "text", "calls"),
    [
        ("hermes", '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>', ONE),
        (
            "hermes",
            'I look.<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>' * 2,
            ONE * 2,
        ),
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}', ONE),
        ("hermes", '<think><tool_call>{"name": "a"}</tool_call></think>No call.', []),
        ("hermes", "No call.", []),
        ("llama3", '<|python_tag|>{"name": "weather", "parameters": {"city": "Rome"}}<|eot_id|>', ONE),
        ("llama3", '{"type": "function", "name": "weather", "parameters": {"city": "Rome"}}', ONE),
        ("llama3", 'The call would be {"name": "weather"}', []),
        ("mistral", '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome"}}]</s>', ONE),
        ("mistral", 'text [TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome"}}]', ONE),
        ("mistral", '[{"name": "weather", "arguments": {"city": "Rome"}}]', ONE),
        ("mistral", "It is sunny.", []),
    ],
)
def test_calls_are_read_in_the_form_of_the_family(family: str, text: str, calls: list[ToolCall]) -> None:
    assert tool_calls(text, family) == calls


@pytest.mark.parametrize(
    ("family", "text", "error"),
    [
        ("hermes", '<tool_call>{"name": "weather", }</tool_call>', "the call is not JSON"),
        ("hermes", "<tool_call>[1]</tool_call>", "the call has no name"),
        ("hermes", '<tool_call>{"name": "a", "arguments": "x"}</tool_call>', "the arguments are not a JSON object"),
        ("mistral", "[TOOL_CALLS]weather", "the calls are not JSON"),
        ("llama3", '{"name": "weather"', "the call is not JSON"),
        pytest.param("hermes", f"<tool_call>{'[' * 100_000}</tool_call>", "the call is not JSON", id="hermes nested"),
        pytest.param("mistral", f"[TOOL_CALLS]{'[' * 100_000}", "the calls are not JSON", id="mistral nested"),
    ],
)
def test_an_unreadable_call_is_a_call_with_an_error(family: str, text: str, error: str) -> None:
    (call,) = tool_calls(text, family)
    assert call.error is not None
    assert call.error.startswith(error)


def spec_of(args: dict[str, Any], tool_format: ToolFormat | None, max_turns: int | None = None) -> EnvironmentSpec:
    path = "baton.environments.tools:ToolEnvironment"
    return EnvironmentSpec("counter", path, args, tool_format=tool_format, max_turns=max_turns)


def configured(given: str | None, tool_format: ToolFormat | None) -> ToolEnvironment:
    args = {"tools": [f"{__file__}:weather"], **({} if given is None else {"family": given})}
    environment = load_environment(spec_of(args, tool_format)).make()
    assert isinstance(environment, ToolEnvironment)
    return environment


def test_the_format_is_that_of_the_chat_template_unless_another_family_is_given() -> None:
    rendered = configured(None, ToolFormat("hermes", is_rendered=True))
    assert rendered.instructions == ""
    assert [one["function"]["name"] for one in rendered.rendered_tools] == ["weather"]
    rendered = configured("hermes", ToolFormat("hermes", is_rendered=True))
    assert (rendered.instructions, len(rendered.rendered_tools)) == ("", 1)
    for given, shown in ((None, ToolFormat("mistral")), ("mistral", ToolFormat("llama3", True)), ("mistral", None)):
        text = configured(given, shown)
        assert text.rendered_tools == []
        assert '"name": "weather"' in text.instructions
        assert "answer: [TOOL_CALLS]" in text.instructions
        text.reset(seed=1)
        assert text.step('[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome"}}]')[4]["tool"] == "weather"


def test_tools_without_a_known_format_are_refused_when_they_are_loaded() -> None:
    with pytest.raises(UserError, match="environment 'counter': the model's chat template writes tool calls in an"):
        configured(None, None)
    with pytest.raises(UserError, match="got family 'gpt'; allowed are hermes, llama3, mistral"):
        configured("gpt", None)
    with pytest.raises(UserError, match="environment 'counter': tool 'undocumented' needs type hints"):
        load_environment(spec_of({"tools": [f"{__file__}:undocumented"]}, ToolFormat("hermes")))
    with pytest.raises(UserError, match="the model's chat template writes tool calls in an unsupported form"):
        load_environment(EnvironmentSpec("sums", "baton.environments.calculator:Calculator"))
    load_environment(EnvironmentSpec("sums", "baton.environments.calculator:Calculator", {"is_compact": True}))


def test_a_schema_comes_from_signature_and_docstring() -> None:
    function = tool_schema(weather)["function"]
    assert (function["name"], function["description"]) == ("weather", "Look the weather up.")
    assert function["parameters"]["required"] == ["city"]
    assert function["parameters"]["properties"]["days"] == {"type": "integer", "description": "For how many days."}
    with pytest.raises(UserError, match="tool 'undocumented' needs type hints and a docstring"):
        tool_schema(undocumented)


def called(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def test_an_episode_of_tools_from_import_paths() -> None:
    args = {"tools": [f"{__file__}:weather", f"{__file__}:later"], "reward": f"{__file__}:reward"}
    opened = EnvironmentInstances({"counter": load_environment(spec_of(args, ToolFormat("hermes")))}, 1000)
    row = {"prompt": "Is it sunny in Rome?", "answer": "yes"}
    first = opened.act(request(1, None, row=row))
    assert isinstance(first, Observation)
    assert first.text == "Is it sunny in Rome?"
    assert '"name": "weather"' in first.instructions
    log = ()
    for action, text, errors in (
        (called("weather", '{"city": "Rome"}'), '{"city": "Rome", "sunny": true, "days": 1}', 0),
        (called("later", '{"x": 7}'), "7", 0),
        (called("weather", '{"city": "Atlantis"}'), "error: KeyError: 'Atlantis'", 1),
        (called("weather", '{"town": 1}'), "error: TypeError: weather() got an unexpected keyword argument 'town'", 1),
        (called("news", "{}"), "error: there is no tool 'news'; the tools are weather, later", 1),
    ):
        found = opened.act(request(1, action, turns=log, row=row))
        assert isinstance(found, Observation)
        assert (found.text, found.reward, found.is_terminated) == (text, 0.0, False)
        assert found.metrics == {"num_calls": 1, "num_errors": errors}
        log += turns_of(action, found)  # type: ignore[assignment]
    last = opened.act(request(1, "yes, it is", turns=log, row=row))
    assert isinstance(last, Observation)
    assert (last.text, last.reward, last.is_terminated, last.is_success) == ("", 1.0, True, True)


@pytest.mark.parametrize(("own", "of_task", "limit"), [(1, None, 1), (None, 1, 1), (1, 5, 1), (5, 1, 1), (None, 2, 2)])
def test_the_last_turn_of_the_task_or_of_the_tools_is_scored(own: int | None, of_task: int, limit: int) -> None:
    args = {"tools": [f"{__file__}:weather"], "reward": f"{__file__}:reward_of_rome", "max_turns": own}
    environment = load_environment(spec_of(args, ToolFormat("hermes"), of_task)).make()
    environment.reset(seed=1, prompt="p", city="Rome")
    for turn in range(1, limit + 1):
        _, reward, is_terminated, is_truncated, info = environment.step(called("weather", '{"city": "Rome"}'))
        assert (is_terminated, is_truncated) == (False, turn == limit)
    assert (reward, info["success"]) == (1.0, True), "the function gets the columns that it names"


@pytest.mark.parametrize("is_compact", [False, True])
def test_the_calculator(is_compact: bool) -> None:
    environment = Calculator(num_operations=3, digits=2, is_compact=is_compact, family="hermes")
    expression = environment.reset(seed=4)
    assert expression == Calculator(num_operations=3, digits=2).reset(seed=4)
    value = eval(expression)
    call = "12*-3=" if is_compact else called("calculate", '{"a": 12, "operation": "*", "b": -3}')
    text, reward, *_ = environment.step(call)
    assert (text, reward) == ("-36", 0.0)
    if not is_compact:
        assert environment.step(called("calculate", '{"a": 1, "operation": "/", "b": 2}'))[0].startswith(
            "error: the op"
        )
        huge = '{"a": 1' + "0" * 60 + ', "operation": "+", "b": 2}'
        assert environment.step(called("calculate", huge))[0].startswith("error: operands")
    _, reward, terminated, _, info = environment.step(f"<answer>{value}</answer>")
    assert (reward, terminated, info["success"]) == (1.0, True, True)
    environment = Calculator(is_compact=is_compact, family="hermes")
    environment.reset(seed=4)
    assert environment.step("<answer>-1</answer>")[1:3] == (0.0, True)
    with pytest.raises(UserError, match="got num_operations 0"):
        Calculator(num_operations=0)
