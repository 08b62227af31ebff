"""The token bridge over real chat templates: scripted episodes with hostile turns and observations."""

from __future__ import annotations

import pytest

from baton.environments.token_bridge import TokenBridge
from baton.errors import UserError
from baton.types import Message
from tests.environments.bridge_cases import REFUSED, SPECIAL, BridgeBench, load, template_names, trained_tokenizer

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
    assert (counts["new paths"] > 0) == bench.bridge.removes_thoughts
    assert counts["rendered"] >= 5 or name not in SHOWN_AS_WRITTEN


@pytest.mark.parametrize("name", REFUSED)
def test_a_template_whose_suffix_cannot_be_derived_is_refused_with_a_sentence(name: str) -> None:
    with pytest.raises(UserError, match=f"cannot be used for multi-turn tasks: .*{REFUSED[name]}.*; use a model or"):
        TokenBridge(load(name))


LINES = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ CONTENT }}<|im_end|>\n{% endfor %}"
OPEN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
ODD = {
    "the text around a message depends on its place": "{{ messages | length }}" + LINES + OPEN,
    "the text before a reply differs": LINES + "{% if add_generation_prompt %}<|im_start|>answer\n{% endif %}",
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


def test_a_long_observation_is_cut_between_characters() -> None:
    bridge = TokenBridge(load("qwen2_5"))
    for limit in range(1, 30):
        text = bridge.cut("\U0001f469\u200d\U0001f469 é" * 9, limit)
        assert ("\U0001f469\u200d\U0001f469 é" * 9).startswith(text)
        assert len(bridge.suffix((), Message("user", text))) <= len(bridge.suffix((), Message("user", ""))) + limit
    assert bridge.cut("short \ud83d", 100) == "short \ufffd"
