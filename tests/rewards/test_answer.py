"""Where the answer of a response stands, format by format."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.rewards.answer import INSTRUCTIONS, AnswerFormat, choice_letter, extract_answer, meets_format


@pytest.mark.parametrize(
    ("response", "answer", "is_met"),
    [
        ("<think>2+2=4</think><answer>4</answer>", "4", True),
        ("<answer>\n 4 \n</answer>\n", "4", True),
        ("<answer>3</answer> no, <answer>4</answer>", "4", False),  # the last one counts, but two are no good form
        ("<answer>4</answer> or so", "4", False),
        ("<answer>3<answer>4</answer>", "4", False),  # opened twice: the innermost
        ("<answer>4</answer></answer>", "4", True),
        ("<answer>a\nb</answer>", "a\nb", True),
        ("<answer></answer>", "", True),
        ("<answer>4", None, False),
        ("</answer>4<answer>", None, False),
        ("4", None, False),
        ("", None, False),
        ("<ANSWER>4</ANSWER>", None, False),
    ],
)
def test_tags_hold_the_answer(response: str, answer: str | None, is_met: bool) -> None:
    assert extract_answer(response, "tags") == answer
    assert meets_format(response, "tags") is is_met


@pytest.mark.parametrize(
    ("response", "answer", "is_met"),
    [
        ("so \\boxed{4}.", "4", True),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}", True),
        ("\\boxed{\\{1, \\{2\\}\\}}", "\\{1, \\{2\\}\\}", True),
        ("\\boxed{3}, no, \\boxed{ 4 }", "4", False),
        ("\\boxed{\\boxed{4}}", "4", False),  # the innermost of a nest is the last that opens
        ("\\boxed{\\frac{1}{2}", None, False),
        ("\\boxed 4", None, False),
        ("\\boxed{5}, so I end with \\boxed{", "5", False),
        ("\\boxed{\\left\\{ x \\right.}", "\\left\\{ x \\right.", True),
        ("in {braces: \\boxed{3} }}", "3", True),
        ("\\\\boxed{3}", "3", True),  # escaped as in JSON
        ("", None, False),
    ],
)
def test_boxes_hold_the_answer_with_braces_balanced(response: str, answer: str | None, is_met: bool) -> None:
    assert extract_answer(response, "boxed") == answer
    assert meets_format(response, "boxed") is is_met


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("first\n  4  \n\n", "4"),
        ("<think>a\nb</think>\n4", "4"),
        ("<think>4</think>", None),  # a thought is no answer
        ("<think>4</think>\n \n", None),
        ("", None),
    ],
)
def test_the_last_line_after_the_thought_is_the_answer(response: str, answer: str | None) -> None:
    assert extract_answer(response, "last_line") == answer
    assert meets_format(response, "last_line") is (answer is not None)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("It is 1,234,567.50 in all.", "1,234,567.50"),
        ("1,2345", "2345"),  # no thousands
        ("5-3", "3"),
        ("x = -3", "-3"),
        ("−3 °C", "-3"),
        ("-$5", "-5"),
        ("$-5", "-5"),
        (".5", ".5"),
        ("72.", "72"),
        ("_18_", "18"),
        ("so __-18__", "-18"),
        ("18 = x_1", "18"),
        ("$(1011)_2$", "1011"),
        ("42 [x]_1", "42"),
        ("x = 5, {v}_2", "5"),
        ("room2 has H2O", None),
        ("<think>4</think>five", None),
        ("", None),
    ],
)
def test_the_last_number_is_a_number_as_people_write_it(response: str, answer: str | None) -> None:
    assert extract_answer(response, "last_number") == answer
    assert meets_format(response, "last_number") is (answer is not None)


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("C", "C"),
        ("c", "C"),
        (" (C) Paris", "C"),
        ("C. Paris", "C"),
        ("\\text{C}", "C"),
        ("$C$", "C"),
        ("Cat", None),
        ("", None),
    ],
)
def test_a_letter_states_a_choice_if_it_stands_alone(text: str, letter: str | None) -> None:
    assert choice_letter(text) == letter


@pytest.mark.timeout(60)
def test_many_brackets_before_a_letter_take_linear_time() -> None:
    assert choice_letter("(" * 300_000) is None
    assert choice_letter("(" * 300_000 + "\\text{( C}") == "C"


def test_many_backslashes_before_a_box_take_linear_time() -> None:
    assert extract_answer("\\" * 3_000_000 + "boxed{5}" + "\\" * 3_000_000, "boxed") == "5"
    assert extract_answer("\\boxed{5}" + "\\" * 3_000_000, "boxed") == "5"


@given(pieces=st.lists(st.sampled_from(["<answer>", "</answer>", "\\boxed{", "{", "}", "</think>", "4", " ", "\n"])))
def test_a_met_format_always_has_an_answer_and_an_answer_never_holds_its_own_mark(pieces: list[str]) -> None:
    response = "".join(pieces)
    for name, mark in (("tags", "<answer>"), ("boxed", "\\boxed{"), ("last_line", "\n")):
        answer = extract_answer(response, name)  # type: ignore[arg-type]
        assert answer is None or (mark not in answer and answer == answer.strip())
        if meets_format(response, name):  # type: ignore[arg-type]
            assert answer is not None


def test_every_format_but_a_users_own_has_an_instruction() -> None:
    assert {*INSTRUCTIONS, "regex"} == set(get_args(AnswerFormat))
