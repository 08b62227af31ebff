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
from tests.views.report_cases import write_responses


def test_nothing_a_model_wrote_reaches_the_terminal_as_a_command(run: RunDirectory) -> None:
    write_responses(
        run, 3, [("\x1b[31m[bold red]x[/bold red]\x07\r\x9b2J\u202e", 1.0), ("2", 0.0)], task="[link=x]t[/link]"
    )
    console = Console(width=80, record=True, file=StringIO(), force_terminal=True)
    print_trajectories(console, read_trajectories(run.path, 3, order="best", limit=1))
    text = console.export_text(clear=False)
    assert not set(text) & set("\x1b\x07\r\x9b\u202e")
    assert r"\x1b[31m[bold red]x[/bold red]\x07\x0d\x9b2J\u202e" in text
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
