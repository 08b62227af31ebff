"""Reading trajectories in a terminal: chosen as asked, nothing lost at 80 columns, nothing a model wrote is obeyed."""

from __future__ import annotations

from io import StringIO
from typing import Any

import msgspec
import pytest

from baton.console import Console, visible
from baton.errors import UserError
from baton.records.run_directory import RunDirectory
from baton.run.trajectories import read_trajectories
from baton.views.terminal.trajectories import print_trajectories
from tests.views.report_cases import changeable_run as changeable_run
from tests.views.report_cases import write_episodes, write_responses


def test_nothing_a_model_wrote_reaches_the_terminal_as_a_command(run: RunDirectory) -> None:
    write_responses(
        run, 3, [("\x1b[31m[bold red]x[/bold red]\x07\r\x9b2J\u202e", 1.0), ("2", 0.0)], task="[link=x]t[/link]"
    )
    console = Console(width=80, record=True, file=StringIO(), force_terminal=True)
    print_trajectories(console, read_trajectories(run.path, 3, order="best", limit=1))
    text = console.export_text(clear=False)
    assert not set(text) & set("\x1b\x07\r\x9b\u202e")
    assert r"\x1b[31m[bold red]x[/bold red]\x07\r\x9b2J\u202e" in text
    assert "[link=x]t[/link]" in text


def test_shown_trajectories_fit_80_columns_without_losing_a_word(run: RunDirectory) -> None:
    words = " ".join(f"w{i}" for i in range(60))
    write_responses(run, 3, [(words, 1.0), ("2", 0.0)])
    console = Console(width=80, record=True, file=StringIO())
    print_trajectories(console, read_trajectories(run.path, 3, order="longest", limit=1))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    assert all(f"w{i}" in text for i in range(60))
    assert "mean logprob -0.500" in " ".join(text.replace("│", " ").split())


def test_trajectories_are_chosen_by_verdict_and_task(run: RunDirectory) -> None:
    write_responses(run, 3, [("a", 1.0), ("b", 0.0), ("c", 1.0)], task="sums")

    def chosen(**filters: Any) -> list[int]:
        return [r.shown.sample_index for r in read_trajectories(run.path, 3, limit=9, **filters)]

    assert chosen(is_correct=True) == [0, 2]
    assert chosen(is_correct=False) == [1]
    assert chosen(order="worst", task="sums") == [1, 0, 2]
    with pytest.raises(UserError, match="no trajectory of task 'other'; its tasks are sums"):
        chosen(task="other")


def test_a_resume_forgets_the_responses_of_later_evaluations(run: RunDirectory) -> None:
    run.write_evaluation(2, [], {"evaluation": run.groups(2), "greedy": run.groups(1)})
    assert read_trajectories(run.path, 2, source="greedy", limit=1)[0].shown.group_id == run.groups(1)[0].group_id
    run.write_evaluation(3, [], {"evaluation": run.groups(2), "greedy": run.groups(1)})
    run.cut_after(2)
    assert run.recorded_steps("evaluation")[-1] == run.recorded_steps("greedy")[-1] == 2
    assert run.recorded_steps() == [1, 2, 3], "batches stay: a resume trains them again"
    with pytest.raises(UserError, match="has no evaluation trajectories of step 3; recorded"):
        run.groups(3, "evaluation")


def test_an_episode_is_shown_turn_by_turn_with_what_the_policy_and_the_environment_did(run: RunDirectory) -> None:
    write_episodes(run, 3)
    one, other = (r.shown for r in read_trajectories(run.path, 3, limit=9))
    assert [turn.text for turn in one.turns] == ["11", "2233", "44"]
    assert [turn.observation for turn in one.turns] == ["7=", "8=", "9="]
    assert [turn.path for turn in one.turns] == [0, 0, 1]
    assert [turn.policy_versions for turn in one.turns] == [(3, 3), (3, 4), (5, 5)]
    assert (one.turns[0].mean_logprob, one.turns[0].lowest_logprob) == (-2.0, -3.75)
    assert [turn.reward for turn in one.turns] == [0.5, -0.25, 1.0]
    assert [turn.tool for turn in one.turns] == [None, "abacus", None]
    assert [turn.latency_s for turn in one.turns] == [2.5, 0.004, 0.01]
    assert [turn.num_observation_tokens > 0 for turn in one.turns] == [True, False, False]
    assert one.turns[2].path_prompt_tokens == 2 * one.turns[0].path_prompt_tokens
    assert (one.finish_reason, one.attempt, one.policy_versions) == ("parse_error", 1, (3, 5))
    assert one.num_tokens == sum(turn.num_tokens for turn in one.turns), "observations are not counted"
    assert one.mean_logprob == pytest.approx(-(4.0 + one.num_tokens - 2) / one.num_tokens)
    assert [(s.sample_index, s.reward, s.turn_rewards) for s in other.siblings] == [
        (0, 1.25, (0.5, -0.25, 1.0)), (1, -0.5, (-0.5,)),
    ]  # fmt: skip
    assert [(turn.text, turn.observation, turn.reward) for turn in other.turns] == [
        ("55", "6=", -0.5),
        ("66", None, None),
    ]


@pytest.mark.parametrize("width", [80, 100])
def test_a_printed_episode_has_every_fact_of_its_turns_and_its_siblings(run: RunDirectory, width: int) -> None:
    write_episodes(run, 3)
    console = Console(width=width, record=True, file=StringIO())
    print_trajectories(console, read_trajectories(run.path, 3, order="best", limit=1))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= width
    lines = [line.strip(" │") for line in text.splitlines()]
    assert "0     1.25       3" in text, "a table has all members of the group"
    assert "1     -0.5       1" in text
    for fact in (
        "turn 1: 2 tokens, version 3, logprob mean -2.000, lowest -3.750",
        "observation: reward 0.5, 2 tokens, 2.5 s",
        "turn 2: 4 tokens, version 3 to 4, logprob mean -1.000, lowest -1.000",
        "observation: reward -0.25, not in this path, tool abacus, 4 ms",
        "turn 3: 2 tokens, version 5, logprob mean -1.000, lowest -1.000",
    ):
        assert fact in lines
    place = next(i for i, line in enumerate(lines) if line.startswith("new path 2: the history is rewritten"))
    assert lines[place + 1].startswith("turn 3"), "the new path is marked where it begins"
    assert "reward 1.25, 3 turns, 8 tokens, ended by parse_error" in " ".join(lines)
    assert "attempt 2" in " ".join(lines)


def test_nothing_of_an_episode_reaches_the_terminal_as_a_command_or_looks_like_a_heading(run: RunDirectory) -> None:
    write_episodes(run, 3, "\x1b[2J\u202e[bold]\nturn 9: forged")
    console = Console(width=100, record=True, file=StringIO(), force_terminal=True)
    print_trajectories(console, read_trajectories(run.path, 3, limit=9))
    text = console.export_text(clear=False)
    assert not set(text) & set("\x1b\u202e")
    assert r"\x1b[2J\u202e[bold]" in text
    forged = [line for line in text.splitlines() if "turn 9" in line]
    assert forged
    assert not any(line.startswith("│ turn 9") for line in forged), "texts of a transcript are indented"


def test_a_trajectory_without_a_judgement_is_neither_correct_nor_wrong(run: RunDirectory) -> None:
    write_responses(run, 3, [("a", 1.0), ("b", 0.0)])
    group = run.groups(3)[0]
    unjudged = msgspec.structs.replace(
        group.members[0].judgement, is_correct=False, reward=0.0, failure="the judge hung"
    )
    members = (msgspec.structs.replace(group.members[0], judgement=unjudged), group.members[1])
    run.write_groups(3, [msgspec.structs.replace(group, members=members)])
    for is_correct, expected in ((True, []), (False, [1]), (None, [0, 1])):
        found = read_trajectories(run.path, 3, is_correct=is_correct, limit=9)
        assert [r.shown.sample_index for r in found] == expected
    assert found[0].shown.verdict == "not scored (the judge hung)"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\tb\nc", "a\tb\nc"),
        ("\x1b]0;t\x07", r"\x1b]0;t\x07"),
        ("\u2066x\u2069", r"\u2066x\u2069"),
        ("\u2028", r"\u2028"),
        ("\U000e0041", r"\U000e0041"),
        ("größer ≥ 中 é", "größer ≥ 中 é"),
    ],
)
def test_control_characters_are_spelt_and_letters_are_not(text: str, shown: str) -> None:
    assert visible(text) == shown
