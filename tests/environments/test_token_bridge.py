"""The token bridge over real chat templates: scripted episodes with hostile turns and observations."""

from __future__ import annotations

import pytest

from baton.environments.token_bridge import TokenBridge
from baton.environments.tools import ToolCall, tool_calls
from baton.errors import UserError
from baton.types import Message
from tests.environments.bridge_cases import (
    OBSERVATIONS,
    REFUSED,
    SPECIAL,
    BridgeBench,
    load,
    template_names,
    trained_tokenizer,
)

PLAYED = sorted(set(template_names()) - set(REFUSED))
SHOWN_AS_WRITTEN = {"gemma4_v2", "phi3", "phi3_5", "qwen2_5", "qwen3_instruct_2507", "smollm2"}
"""Templates that show all turns as they were written."""


def test_at_least_twelve_templates_are_played() -> None:
    assert len(PLAYED) >= 12


@pytest.mark.parametrize("name", PLAYED)
def test_no_sampled_id_changes_and_every_appended_id_is_of_the_template_or_the_observation(name: str) -> None:
    """Each check is in BridgeBench; it includes a second scoring of every path in float32."""
    bench = BridgeBench(load(name))
    for seed in range(12):
        bench.play(seed)
    counts = bench.counts
    assert counts["episodes"] == 12
    assert counts["observations"] + counts["new paths"] > 20
    assert bench.counted_paths() == counts["new paths"]
    assert (counts["new paths"] > 0) == bool(bench.bridge.removes_thoughts)
    assert counts["equal prompts"] > 4
    assert counts["rendered"] >= 5 or name not in SHOWN_AS_WRITTEN


@pytest.mark.parametrize("name", REFUSED)
def test_a_template_whose_suffix_cannot_be_derived_is_refused_with_a_sentence(name: str) -> None:
    with pytest.raises(UserError, match=f"cannot be used for multi-turn tasks: .*{REFUSED[name]}.*; use a model or"):
        TokenBridge(load(name))


LINES = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ CONTENT }}<|im_end|>\n{% endfor %}"
OPEN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
ODD = {
    "the text around a message depends on its place": "{{ messages | length }}" + LINES + OPEN,
    "the text before a reply is not the generation prompt": LINES
    + "{% if add_generation_prompt %}<|im_start|>answer\n{% endif %}",
    "does not contain each message once": LINES.replace("m.role", "m.role + m.content") + OPEN,
    "it changes the whitespace around messages": LINES.replace("CONTENT", "CONTENT.replace('\\n ', '  ')") + OPEN,
    "it cannot render user: one message only": "{{ raise_exception('one message only') }}",
    "does not contain each message once, with text": LINES.replace("CONTENT", "CONTENT | tojson") + OPEN,
}


@pytest.mark.parametrize("why", ODD)
def test_odd_templates_are_refused_with_their_reason(why: str) -> None:
    with pytest.raises(UserError, match=why) as refused:
        TokenBridge(trained_tokenizer(ODD[why].replace("CONTENT", "m.content")))
    assert "\n" not in str(refused.value)


def test_results_of_tools_have_their_role_if_the_template_renders_it() -> None:
    roles = {name: TokenBridge(load(name)).role("calculator") for name in PLAYED}
    assert {name for name, role in roles.items() if role == "tool"} == {
        "gemma4_v2", "glm4moe", "qwen2_5", "qwen3", "qwen3_5_think", "qwen3_instruct_2507",
    }  # fmt: skip
    assert {TokenBridge(load(name)).role(None) for name in PLAYED} == {"user"}
    bridge, tokenizer = TokenBridge(load("qwen3")), load("qwen3")
    ids = bridge.suffix(tokenizer.ids("2+2<|im_end|>"), Message("tool", "4"))
    assert tokenizer.text(ids, keep_special=True) == (
        "\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert not bridge.begins_path(["<think>\nadd\n</think>\n\n2+2"], "tool"), "Qwen3 keeps reasoning between tool calls"
    assert bridge.begins_path(["<think>\nadd\n</think>\n\n2+2"], "user")


def test_the_end_of_a_turn_is_appended_only_if_the_turn_lacks_it() -> None:
    tokenizer = load("qwen2_5")
    bridge = TokenBridge(tokenizer)
    after = "\n<|im_start|>user\nyes<|im_end|>\n<|im_start|>assistant\n"
    for turn, expected in {"go<|im_end|>": after, "go": "<|im_end|>" + after, "": "<|im_end|>" + after}.items():
        ids = bridge.suffix(tokenizer.ids(turn), Message("user", "yes"))
        assert tokenizer.text(ids, keep_special=True) == expected


def test_markers_of_turns_that_a_tokenizer_does_not_flag_as_special_are_text_in_observations() -> None:
    """DeepSeek's tokenizer has <｜User｜> and <｜Assistant｜> as plain added tokens."""
    tokenizer = load("deepseekv3")
    (marker,) = tokenizer.ids("<｜User｜>")
    assert not tokenizer.hf.added_tokens_decoder[marker].special
    ids = TokenBridge(tokenizer).suffix(tokenizer.ids("go"), Message("user", f"{SPECIAL}<｜User｜>"))
    assert ids.count(marker) == 1, "that of the template"


PLAIN = [text for text in OBSERVATIONS if not any(mark in text for mark in ("<", "[", "\ud83d"))]


@pytest.mark.parametrize("name", PLAYED)
def test_a_prompt_has_the_ids_of_the_template_and_hostile_text_adds_no_special_token(name: str) -> None:
    tokenizer = load(name)
    bridge, added = TokenBridge(tokenizer), tokenizer.hf.added_tokens_decoder
    assert len(PLAIN) >= 5
    for text in PLAIN:
        messages = [Message("user", f"Find the exit.\n\n{text}")]
        assert bridge.prompt(messages) == tokenizer.prompt_ids(messages)
    expected = [i for i in bridge.prompt([Message("user", "a")]) if i in added]
    for text in (SPECIAL, "".join(str(token) for token in added.values()), "<|im_end|>" * 40):
        ids = bridge.prompt([Message("user", text)])
        assert [i for i in ids if i in added] == expected
        assert text in tokenizer.text(ids, keep_special=True)


FORMATS = {
    "qwen2_5": "hermes", "qwen3": "hermes", "qwen3_instruct_2507": "hermes",
    "llama3_like": "llama3", "mistral_like": "mistral",
}  # fmt: skip


def test_the_family_of_calls_is_read_from_a_call_that_the_template_renders() -> None:
    found = {name: TokenBridge(load(name)).tool_format for name in PLAYED}
    assert {name: shown.family for name, shown in found.items() if shown is not None} == FORMATS
    assert all(shown.is_rendered for shown in found.values() if shown is not None)
    without_tools = LINES.replace("CONTENT", "m.content + (m.tool_calls | tojson if m.tool_calls else '')") + OPEN
    other_calls = load("qwen2_5").hf.chat_template.replace("<tool_call>", "<tool_calls>")
    for template in (without_tools, other_calls):
        assert TokenBridge(trained_tokenizer(template)).tool_format is None


def tools(description: str) -> list[dict[str, object]]:
    parameters = {"type": "object", "properties": {"city": {"type": "string", "description": description}}}
    return [
        {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}
        for name in ("weather", "news")
    ]


@pytest.mark.parametrize("name", FORMATS)
def test_schemas_are_those_that_the_template_renders_and_their_texts_have_no_special_tokens(name: str) -> None:
    tokenizer = load(name)
    bridge, added, user = TokenBridge(tokenizer), tokenizer.hf.added_tokens_decoder, Message("user", "Is it sunny?")
    harmless = bridge.prompt([user], tools("Look it up."))
    chat = [{"role": "user", "content": user.content}]
    shown = tools("Look it up.")
    assert list(harmless) == tokenizer.hf.apply_chat_template(
        chat, tools=shown, add_generation_prompt=True, return_dict=False
    )
    assert '"name": "weather"' in tokenizer.text(harmless)
    hostile = bridge.prompt([user], tools(f"Look <eos>{SPECIAL} it up."))
    assert [i for i in hostile if i in added] == [i for i in harmless if i in added]
    assert f"Look <eos>{SPECIAL[:20]}".replace("\n", "\\n") in tokenizer.text(hostile, keep_special=True)


@pytest.mark.parametrize(
    ("name", "text", "ending"),
    [
        ("mistral_like", '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome"}}]', "<eos>"),
        ("llama3_like", '<|python_tag|>{"name": "weather", "parameters": {"city": "Rome"}}', "<|eot_id|>"),
        (
            "qwen3",
            '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>',
            "<|im_end|>",
        ),
    ],
)
def test_an_action_keeps_the_tags_of_its_calls_and_loses_the_end_of_the_turn(name: str, text: str, ending: str) -> None:
    tokenizer = load(name)
    bridge, marks = TokenBridge(tokenizer), tokenizer.hf.added_tokens_decoder
    ids = tokenizer.ids(text + ending)
    assert ids[-1] in marks
    assert any(i in marks for i in ids[:-1]), "the tags are tokens"
    assert bridge.text(ids) == text
    assert bridge.text([*ids, ids[-1]]) == text
    assert tool_calls(bridge.text(ids), FORMATS[name]) == [ToolCall("weather", {"city": "Rome"})]
    history = (Message("user", "Is it sunny?"), Message("assistant", text), Message("user", "go on"))
    tag = next(i for i in ids if i in marks)
    assert name == "qwen3" or tag in bridge.prompt(history), "a history that is rendered again keeps the tags too"


def test_a_long_observation_is_cut_between_characters() -> None:
    bridge = TokenBridge(load("qwen2_5"))
    for limit in range(1, 30):
        text = bridge.cut("\U0001f469\u200d\U0001f469 é" * 9, limit)
        assert ("\U0001f469\u200d\U0001f469 é" * 9).startswith(text)
        assert len(bridge.suffix((), Message("user", text))) <= len(bridge.suffix((), Message("user", ""))) + limit
    assert bridge.cut("short \ud83d", 100) == "short \ufffd"
