"""Regular expressions of recipes have a deadline, because they read what a model wrote."""

from __future__ import annotations

import time

import pytest

from baton.rewards import patterns
from baton.rewards.answer import extract_answer
from baton.rewards.chat import ChatFormat
from baton.rewards.scorer_protocol import CallFailure, CallValue
from baton.rewards.settings import ANY_NUMBER

SLOW = r"(a|a|b)+(a|a|c)+(a|a|d)+$"
TEXT = "a" * 2000 + "!"


@pytest.fixture(autouse=True)
def _short_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "DEADLINE_S", 0.2)


def test_a_pattern_that_never_ends_has_no_answer() -> None:
    with pytest.raises(TimeoutError):
        patterns.last_match(SLOW, TEXT)
    begin = time.monotonic()
    assert extract_answer(TEXT, "regex", SLOW) is None
    assert time.monotonic() - begin < 60


def test_a_reply_whose_number_is_not_found_in_time_is_a_failure_and_no_reward() -> None:
    outcome = ChatFormat("judge", "{response}", SLOW, 16).outcome({"choices": [{"message": {"content": TEXT}}]})
    assert isinstance(outcome, CallFailure)
    assert "took more than" in outcome.detail


@pytest.mark.parametrize(
    ("text", "pattern", "most", "is_value"),
    [
        ("Step 1: they computed 4500 and", ANY_NUMBER, 16, False),  # any number may be part of the reasoning
        ("Rating: 1", r"Rating: (\d+)", 16, False),  # of 10?
        ("[[7]] because", r"\[\[(\d)\]\]", 16, True),
        ("Step 1: they", r"Rating: (\d+)", 16, False),
        ("7", ANY_NUMBER, 1, True),  # a number alone was asked for
    ],
)
def test_a_reply_that_was_cut_is_a_failure_if_its_number_may_be(
    text: str, pattern: str, most: int, is_value: bool
) -> None:
    judge = ChatFormat("judge", "{response}", pattern, most)
    choice = {"message": {"content": text}}
    outcome = judge.outcome({"choices": [{**choice, "finish_reason": "length"}]})
    assert isinstance(outcome, CallValue) is is_value
    if isinstance(outcome, CallFailure):
        assert "was cut at max_new_tokens = 16: raise it" in outcome.detail
    assert judge.outcome({"choices": [{**choice, "finish_reason": "stop"}]}) == judge.outcome({"choices": [choice]})
    assert isinstance(judge.outcome({"choices": [[]]}), CallFailure)


def test_the_last_match_counts_and_its_first_group_that_took_part() -> None:
    assert patterns.last_match(r"(\d)|x", "1 2 x") == ("x", (None,))
    assert patterns.last_match(r"(\d)", "none") is None
    assert extract_answer("score: 3, score: 4 ", "regex", r"score: (\d)") == "4"
    assert extract_answer("1 x", "regex", r"(\d)|x") == "x"


def test_what_is_no_regular_expression_is_refused_with_its_position() -> None:
    with pytest.raises(ValueError, match="not a regular expression: missing"):
        patterns.check_pattern("(a")
