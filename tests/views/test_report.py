"""The summary and the page of a run: true numbers, nothing from outside, and what a model wrote stays text."""

from __future__ import annotations

import html
import itertools
import json
import re
import shutil
from collections.abc import Sequence
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from baton.console import Console
from baton.errors import UserError
from baton.policy.tokenizer import load_tokenizer
from baton.records.evaluation import Evaluation, Interval
from baton.records.predictions import Comparison
from baton.records.run_directory import RunDirectory
from baton.run.summary import summarise
from baton.run.trajectories import choose_examples
from baton.types import RewardResult
from baton.views.pages import charts, template
from baton.views.pages.history import Curve, evenly
from baton.views.pages.report import duration, render, short, write_page
from baton.views.terminal.report import print_evaluations, print_report
from tests.views.report_cases import changeable_run as changeable_run
from tests.views.report_cases import write_episodes, write_responses

HOSTILE = "</pre><script>alert(1)</script><img src=x onerror=alert(2)>&amp;\x1b[2J\u202e{{ 7 * 7 }}"


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty charts, for tests of the words around them."""
    monkeypatch.setattr(charts, "draw", lambda paint, **axes: "<svg></svg>")


class Elements(HTMLParser):
    """Every element of a page with its attributes, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        self.text += " " if tag in ("td", "th", "p", "span") else ""

    def handle_data(self, data: str) -> None:
        self.text += data


def write_rows(run: RunDirectory, rows: Sequence[dict[str, Any]]) -> None:
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def row(step: int, **values: float) -> dict[str, Any]:
    named = {name.replace("__", "/"): value for name, value in values.items()}
    return {
        "step": step,
        "reward/mean": 0.5,
        "perf/step_time": 4.0,
        "time/generate": 2.0,
        "tokens/generated": 100,
        **named,
    }


def evaluation(accuracy: float, temperature: float = 1.0) -> Evaluation:
    share = Interval(accuracy, accuracy - 0.0625, accuracy + 0.0625)
    return Evaluation("all", 16, 1, temperature, share, share, 20.0, 0.0)


# ---- the summary -----------------------------------------------------------------------------------------------------


def test_the_summary_adds_up_what_the_rows_say(run: RunDirectory) -> None:
    write_rows(
        run, [row(0, time__eval=1.5), *(row(i, reward__mean=i / 10) for i in range(1, 11)), row(10, time__eval=2.0)]
    )
    # the row of step 0 is a reward row here too: 11 + 1 rows; the window is 5 rows at either end
    report = summarise(run)
    assert report.steps == 10
    assert report.generated_tokens == 1200
    assert report.generate_tokens_per_s == pytest.approx(1200 / 24)
    assert report.throughput_tokens_per_s == pytest.approx(1200 / 48)
    assert (report.train_time_s, report.eval_time_s) == (48.0, 3.5)
    assert report.reward_before == pytest.approx((0.5 + 0.1 + 0.2 + 0.3 + 0.4) / 5)
    assert report.reward_after == pytest.approx((0.7 + 0.8 + 0.9 + 1.0 + 0.5) / 5)


def test_the_gain_is_from_the_first_evaluation_to_the_last(run: RunDirectory) -> None:
    (run.path / "evaluations.jsonl").unlink()
    for step, accuracy in ((0, 0.25), (2, 0.875), (3, 0.75)):
        run.write_evaluation(step, [evaluation(accuracy), evaluation(accuracy / 2, temperature=0.0)])
    report = summarise(run)
    assert report.evaluated_steps == (0, 3)
    assert [change.points for change in report.changes] == [50.0, 25.0]


@pytest.mark.usefixtures("undrawn")
def test_one_evaluation_is_no_gain_of_zero(run: RunDirectory) -> None:
    (run.path / "evaluations.jsonl").unlink()
    run.write_evaluation(0, [evaluation(0.25)])
    change = summarise(run).changes[0]
    assert (change.after, change.points) == (None, None)
    assert "25.0 %" in render(run)
    printed = StringIO()
    print_report(Console(file=printed), summarise(run))
    assert printed.getvalue().count("step 0") == 1


def test_a_value_that_was_not_finite_is_left_out(run: RunDirectory) -> None:
    write_rows(
        run, [row(1), row(2) | {"tokens/generated": None, "policy/grad_norm": None}, row(3, policy__grad_norm=2.0)]
    )
    assert summarise(run).generated_tokens == 200
    assert "policy/grad_norm" in render(run)


def test_the_printed_summary_fits_80_columns_with_every_number_whole(run: RunDirectory) -> None:
    (run.path / "evaluations.jsonl").unlink()
    for step in (0, 3):
        results = [msgspec.structs.replace(evaluation(0.25 + step / 5), task="a_task_with_quite_a_long_name_[bold]")]
        run.write_evaluation(step, results)
    console = Console(width=80, record=True, file=StringIO())
    print_report(console, summarise(run))
    print_evaluations(console, results)
    text = console.export_text()
    assert "25.0 % [18.8, 31.2]" in text
    assert text.count("85.0 % [78.8, 91.2]") == 2
    assert "+60.0" in text
    assert "[bold]" in text.replace(" ", "").replace("\n", "")  # a name is no markup
    assert max(len(line) for line in text.split("reward")[0].splitlines()[1:]) <= 80


# ---- the page --------------------------------------------------------------------------------------------------------


def test_the_page_asks_nothing_of_the_network_and_runs_nothing(run: RunDirectory) -> None:
    page = render(run)
    elements = Elements(page)
    tags = {tag for tag, _ in elements.found}
    assert "svg" in tags
    assert not tags & {"script", "iframe", "object", "embed", "link", "img", "image", "base", "form"}
    for tag, attributes in elements.found:
        for name, value in attributes.items():
            assert not name.startswith("on"), f"<{tag}> has a handler, {name}"
            if name.split(":")[-1] in ("src", "href", "action", "data", "srcset"):
                assert (value or "").startswith("#"), f"<{tag} {name}={value!r}> leads out of the page"
    assert not re.search(r"@import|url\((?!#)|https?://", page)
    policies = [a["content"] for tag, a in elements.found if a.get("http-equiv") == "Content-Security-Policy"]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'"]


@pytest.mark.usefixtures("undrawn")
def test_what_a_model_wrote_stays_text(run: RunDirectory) -> None:
    before = Elements(render(run))
    write_responses(run, 3, [(HOSTILE, 1.0), ("2", 0.0)], task="<b onclick=x>$t$</b>")
    page = render(run)
    elements = Elements(page)
    assert {tag for tag, _ in elements.found} <= {tag for tag, _ in before.found}
    assert not any(name.startswith("on") for _, attributes in elements.found for name in attributes)
    assert html.escape("<script>alert(1)</script>") in page
    assert "alert(1)</script>" in elements.text  # and it can be read
    assert r"&amp;\x1b[2J\u202e{{ 7 * 7 }}" in elements.text
    assert "\x1b" not in page
    assert "\u202e" not in page


def test_hostile_names_of_metrics_tasks_and_the_run_stay_text(run: RunDirectory) -> None:
    own = {"reward/_own/mean": 0.5, "reward/\x1b[2J/mean": 0.5}
    write_rows(run, [row(1) | {"reward/<img src=x>/mean": 0.5, "reward/$b$/mean": 0.25} | own])
    results = [msgspec.structs.replace(evaluation(0.5), task=name) for name in ("<svg onload=x>", "all")]
    run.write_evaluation(3, results)
    recipe = run.path / "recipe.toml"
    recipe.write_text(recipe.read_text() + "# </pre><script>alert(3)</script>\n")
    page = render(run)
    assert "\x1b" not in page
    assert r"reward/\x1b[2J/mean" in page
    assert re.search(r"<text[^>]*> ?_own</text>", page), "matplotlib omits labels that begin with an underscore"
    assert "<img" not in page
    assert "<svg onload" not in page
    assert re.search(r"<text[^>]*>\$b\$</text>", page), "the name is not set as mathematics"
    assert "<script" not in page


@pytest.mark.usefixtures("undrawn")
def test_warnings_and_names_of_reward_parts_have_no_control_characters(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_responses(run, 3, [("a", 1.0), ("b", 0.0)])
    group = run.groups(3)[0]
    judged = RewardResult(1.0, {"correct": 1.0, "\x1b[2J": 0.0}, True)
    members = tuple(msgspec.structs.replace(member, judgement=judged) for member in group.members)
    run.write_groups(3, [msgspec.structs.replace(group, members=members)])
    report = msgspec.structs.replace(summarise(run), warnings=("failed: \u202e",))
    monkeypatch.setattr("baton.views.pages.report.summarise", lambda run: report)
    page = render(run)
    assert r"failed: \u202e" in page
    assert r"\x1b[2J 0" in page
    assert not {"\x1b", "\u202e"} & set(page)


@pytest.mark.usefixtures("undrawn")
def test_the_page_has_the_numbers_of_the_run(run: RunDirectory) -> None:
    (run.path / "evaluations.jsonl").unlink()
    write_rows(run, [row(1, policy__entropy=0.1234), row(2, policy__entropy=0.0567)])
    run.write_evaluation(0, [evaluation(0.25)])
    run.write_evaluation(2, [evaluation(0.75)])
    text = " ".join(Elements(render(run)).text.split())
    assert "25.0 % [18.8, 31.2] 75.0 % [68.8, 81.2] +50.0" in text
    assert "policy/entropy 0.1234 0.0567 0.0567 0.1234" in text  # first, last, lowest, highest
    assert run.facts()["commit"] is None or run.facts()["commit"][:12] in text
    assert "2 of 3 train steps" in text  # the recipe asks for three
    for title in ("Training reward", "Accuracy", "Entropy of the policy", "Where the time of a step goes"):
        assert title in text


@pytest.mark.usefixtures("undrawn")
def test_the_special_tokens_of_an_example_stand_apart(run: RunDirectory) -> None:
    write_responses(run, 3, [("two", 1.0), ("2", 0.0)])
    page = render(run)
    end = html.escape(str(load_tokenizer(str(run.tokenizer)).hf.eos_token))
    assert f'two<span class="special">{end}</span></pre>' in page


def test_the_examples_of_a_multi_turn_run_are_transcripts_and_its_metrics_by_turn_are_drawn(run: RunDirectory) -> None:
    write_episodes(run, 3, HOSTILE)
    write_rows(
        run,
        [
            row(step, **{"env/turns_mean": 2.5, "env/latency_mean": 0.5, "env/finish/parse_error": 0.5})
            for step in (1, 2)
        ],
    )
    page = render(run)
    elements = Elements(page)
    text = " ".join(elements.text.split())
    for fact in (
        "turn 1: 2 tokens, version 3, logprob mean -2.000, lowest -3.750 11",
        "observation: reward 0.5, 2 tokens, 2.5 s 7=",
        "new path 2: the history is rewritten",
        "rewards of the group: 1.25, -0.5",
        "attempt 2",
        "Turns per episode",
        "How episodes end",
        "Latency of environments",
    ):
        assert fact in text
    assert "Train step spent waiting for environments" not in text, "the run has no such metric"
    assert "environment</text>" not in page, "no stage of the time chart either"
    write_rows(run, [row(step, **{"time/environment": 0.25}) for step in (1, 2)])
    assert "environment</text>" in render(run)
    assert not any(tag in ("script", "img") for tag, _ in elements.found)
    assert "\x1b" not in page


def test_examples_are_of_both_ends_of_the_run_and_none_is_there_twice(run: RunDirectory) -> None:
    found = list(choose_examples(run))
    assert {e.shown.step for _, e in found} == {run.recorded_steps()[0], run.recorded_steps()[-1]}
    assert {order for order, _ in found} == {"best", "worst", "longest"}
    names = [(e.shown.step, e.shown.group_id, e.shown.sample_index) for _, e in found]
    assert len(set(names)) == len(names)


@pytest.mark.usefixtures("undrawn")
def test_an_example_without_a_judgement_says_why(run: RunDirectory) -> None:
    write_responses(run, 3, [("a", 1.0), ("b", 0.0)])
    group = run.groups(3)[0]
    unjudged = RewardResult(0.0, {}, False, failure="the judge <hung>")
    members = (msgspec.structs.replace(group.members[0], judgement=unjudged), group.members[1])
    run.write_groups(3, [msgspec.structs.replace(group, members=members)])
    assert "not scored (the judge <hung>)" in Elements(render(run)).text


@pytest.mark.usefixtures("undrawn")
def test_a_very_long_response_is_shortened_and_the_page_says_so(run: RunDirectory) -> None:
    write_responses(run, 3, [("a1 " * 10_000, 1.0), ("2", 0.0)])
    page = render(run)
    assert "18,000 characters omitted" in page
    responses = [part.partition("</pre>")[0] for part in page.split('<pre class="response">')[1:]]
    assert max(map(len, responses)) < 13_000


@pytest.mark.parametrize(
    "missing", ["evaluations.jsonl", "metrics.jsonl", "report.json", "trajectories", "checkpoints"]
)
def test_the_page_shows_what_there_is(run: RunDirectory, missing: str) -> None:
    path = run.path / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    text = Elements(render(run)).text
    assert ("There is no evaluation yet." in text) == (missing == "evaluations.jsonl")
    assert ("No train step is done yet." in text) == (missing == "metrics.jsonl")
    assert ("Examples of step" in text) == (missing != "trajectories")


@pytest.mark.usefixtures("undrawn")
def test_a_run_that_has_only_just_begun_has_a_page(run: RunDirectory) -> None:
    for name in ("evaluations.jsonl", "metrics.jsonl", "report.json"):
        (run.path / name).unlink()
    shutil.rmtree(run.path / "trajectories")
    text = " ".join(Elements(render(run)).text.split())
    assert "0 of 3 train steps" in text
    assert "Learning" not in text  # no empty charts


def test_a_run_of_one_step_has_curves(run: RunDirectory) -> None:
    write_rows(run, [row(1, policy__entropy=0.25)])
    for step in (2, 3):
        (run.path / "trajectories" / f"step_{step:06d}.jsonl.gz").unlink()
    page = render(run)
    assert "Entropy of the policy" in page
    assert "nan" not in re.sub(r"<text.*?</text>", "", page).lower()


@pytest.mark.usefixtures("undrawn")
def test_a_run_killed_within_a_row_has_a_page(run: RunDirectory) -> None:
    write_rows(run, [row(1), row(2)])
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rew')
    assert "2 of 3 train steps" in " ".join(Elements(render(run)).text.split())


def test_a_warm_start_has_a_page_with_its_loss_and_no_summary(run: RunDirectory) -> None:
    (run.path / "recipe.toml").write_text('output = "m"\n[run]\nname = "w"\n[sft]\nsteps = 100\n')
    write_rows(run, [{"step": 50, "sft/loss": 1.5}, {"step": 100, "sft/loss": 0.5}])
    shutil.rmtree(run.path / "trajectories")
    (run.path / "evaluations.jsonl").unlink()
    with pytest.raises(UserError, match=r"warm start.*--html"):
        summarise(run)
    assert "Loss of the warm start" in render(run)


@pytest.mark.usefixtures("undrawn")
def test_the_number_of_an_adapters_parameters_is_not_stated_as_that_of_the_model(run: RunDirectory) -> None:
    assert re.search(r", [\d.]+ . parameters", render(run))
    with (run.path / "recipe.toml").open("a") as file:
        file.write("\n[lora]\nrank = 2\n")
    assert re.search(r", adapter of [\d.]+ . parameters", render(run))


def test_the_same_run_gives_the_same_page(run: RunDirectory) -> None:
    assert render(run) == render(run)


@pytest.mark.usefixtures("undrawn")
def test_the_page_is_written_whole_where_it_is_asked_for(run: RunDirectory, tmp_path: Path) -> None:
    write_page(run, tmp_path / "p.html")
    assert (tmp_path / "p.html").read_text().rstrip().endswith("</html>")
    with pytest.raises(UserError, match="give a file in an existing directory"):
        write_page(run, tmp_path / "nowhere" / "p.html")


def test_without_matplotlib_one_sentence_says_what_to_install(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(template, "find_spec", lambda name: None if name == "matplotlib" else object())
    with pytest.raises(UserError, match=r"matplotlib.*pip install 'baton-rl\[report\]'"):
        write_page(run, tmp_path / "p.html")


# ---- its parts -------------------------------------------------------------------------------------------------------


def test_smoothing_is_a_centred_mean_that_shrinks_at_the_ends() -> None:
    curve = Curve(np.arange(5.0), np.array([1.0, 2.0, 6.0, 4.0, 7.0]))
    # by hand: (1+2)/2, (1+2+6)/3, (2+6+4)/3, (6+4+7)/3, (4+7)/2
    assert curve.smoothed(3) == pytest.approx([1.5, 3.0, 4.0, 17 / 3, 5.5])


def test_a_long_run_is_sampled_evenly_with_both_ends() -> None:
    steps = list(range(1, 1001))
    found = evenly(steps, 40)
    assert (len(found), found[0], found[-1]) == (40, 1, 1000)
    assert {b - a for a, b in itertools.pairwise(found)} <= {25, 26}
    assert evenly([3, 4], 40) == [3, 4]


@pytest.mark.parametrize(
    ("value", "words"),
    [(0.12344, "0.1234"), (0, "0"), (999.94, "999.9"), (1234.4, "1,234"), (12_340, "12.3 k"), (4_560_000, "4.56 M")],
)
def test_numbers_are_short(value: float, words: str) -> None:
    assert short(value) == words


def test_large_numbers_have_no_exponent(run: RunDirectory) -> None:
    values = [float(value) for value in (*np.geomspace(1, 1e13, 200), 999_700, 1010 * 2**20)]
    compared = [Comparison("a", unit, value, value, 0.0, False) for unit in ("tokens", "bytes") for value in values]
    printed = StringIO()
    report = msgspec.structs.replace(summarise(run), predicted_by="a plan", predictions=tuple(compared))
    print_report(Console(file=printed, width=200), report)
    assert "1,010 MiB" in printed.getvalue()
    assert "e+" not in printed.getvalue().partition("predictions within")[0]
    assert not any("e+" in short(value) for value in values)
    assert short(999_700) == "1,000 k"


@pytest.mark.parametrize(
    ("seconds", "words"), [(4.25, "4.25 s"), (59.7, "1 min 0 s"), (125, "2 min 5 s"), (7260, "2 h 1 min")]
)
def test_durations_have_two_units(seconds: float, words: str) -> None:
    assert duration(seconds) == words
