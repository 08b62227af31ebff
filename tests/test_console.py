"""A text from outside is read on a terminal and controls nothing, by every way that a command prints."""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import re
import subprocess
import sys
import types
import typing
import unicodedata
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer.main
from rich.panel import Panel
from rich.progress import Progress, TextColumn
from rich.rule import Rule
from rich.table import Table
from rich.text import Text
from typer.testing import CliRunner

from baton.cli import main as cli
from baton.console import Console, LogFormatter, out, print_json, visible
from baton.planner.compare import Alternative
from baton.planner.problem import Inputs
from baton.planner.result import PlanResult
from baton.planner.what_if import Marginal
from baton.profile.bench import BenchResult
from baton.recipe.keys import RecipeKey
from baton.recipe.load import load_recipe
from baton.recipe.presets import Algorithm
from baton.recipe.recipe import Recipe
from baton.records.evaluation import Evaluation
from baton.run.dry_run import Footprint
from baton.run.summary import RunReport
from baton.run.trajectories import ReadableTrajectory
from baton.simulator.parameter_sweep import ParameterSweep
from baton.simulator.result import Result
from baton.specs.cluster import Cluster
from baton.specs.plan import Idle
from baton.swarm.hub.status import HubStatus, WorkerStatus
from baton.tasks.gym import ListedTask
from baton.views.pages.plan import write_plan_page
from baton.views.pages.simulation import write_result_page
from baton.views.terminal.bench import print_bench
from baton.views.terminal.lists import print_algorithms, print_keys, print_tasks
from baton.views.terminal.plan import print_plan
from baton.views.terminal.progress import TerminalObserver
from baton.views.terminal.report import print_dry_run, print_evaluations, print_report
from baton.views.terminal.simulation import print_result, print_sweep
from baton.views.terminal.swarm import print_status
from baton.views.terminal.trajectories import print_trajectories
from tests.cluster.plans import mixed, plan_of, replica, scoring, stage

ROOT = Path(__file__).parents[1]
HOSTILE = "[/x][red]a :smile:\x1b[2J\x1b]0;title\x07\x9b31m\x7f\r\x08\u202eb\u2066\u200b\u2028\ud800[link=x]"
SHOWN = r"[/x][red]a :smile:\x1b[2J\x1b]0;title\x07\x9b31m\x7f\r\x08\u202eb\u2066\u200b\u2028\ud800[link=x]"
STYLE = re.compile(r"\x1b\[[0-9;]*m")


def controls(text: str) -> set[str]:
    """What is left of text that could control a terminal."""
    kinds = ("Cc", "Cf", "Cs", "Zl", "Zp")
    return {repr(c) for c in text if unicodedata.category(c) in kinds and c not in "\n\t"}


def printed(*renderables: Any, width: int = 400) -> str:
    """On a terminal with colours, whose styles are taken out: they are ours."""
    console = Console(file=io.StringIO(), force_terminal=True, width=width)
    for one in renderables:
        console.print(one)
    return STYLE.sub("", console.file.getvalue())  # type: ignore[attr-defined]


# ---- the console -----------------------------------------------------------------------------------------------------


def test_a_text_is_spelled_out_and_only_what_is_kept_stays() -> None:
    assert visible(HOSTILE) == SHOWN
    assert visible("a\n\tb") == "a\n\tb"
    assert visible("a\nb", keep="") == r"a\nb"
    assert visible("Zoë ≤ 1 – 日本語") == "Zoë ≤ 1 – 日本語"


def test_no_renderable_lets_a_text_control_the_terminal() -> None:
    table = Table(title=HOSTILE)
    table.add_column(HOSTILE)
    table.add_row(HOSTILE)
    table.add_row(Text(HOSTILE))
    for one in (HOSTILE, Text(HOSTILE), table, Panel(HOSTILE, title=Text(HOSTILE)), Rule(Text(HOSTILE)), [HOSTILE]):
        text = printed(one)
        assert not controls(text), one
        assert "[/x][red]a :smile:" in text.replace("\n", "")


def test_a_live_bar_moves_the_cursor_by_itself_alone() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=400)
    with Progress(TextColumn("{task.description}", markup=False), console=console) as bar:
        bar.add_task(HOSTILE, total=1)
    text = re.sub(r"\x1b\[(\?25[lh]|2K|1A|[0-9;]*m)|\r", "", console.file.getvalue())  # type: ignore[attr-defined]
    assert not controls(text)
    assert "[/x][red]a :smile:" in text


def test_json_has_the_same_value_and_nothing_but_escapes_of_what_controls(capsys: pytest.CaptureFixture[str]) -> None:
    value = {"a": HOSTILE.replace("\ud800", "\U000e0001"), "b": ["x\ny"]}
    print_json(value)
    text = capsys.readouterr().out
    assert json.loads(text) == value
    assert not controls(text)


def test_text_that_the_output_cannot_encode_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a locale without UTF-8. JSON keeps its value."""
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="latin-1"))
    out.print("0.4 → 0.9 é")
    out.print(Panel("a response"))
    table = Table("→ x")
    table.add_row("→ y")
    out.print(table)
    text, _, panel = printed.getvalue().decode("latin-1").partition("\n")
    assert text == "0.4 \\u2192 0.9 é"
    assert "a response" in panel
    assert panel.isascii()
    assert {"\\u2192 x", "\\u2192 y"} == set(re.findall(r"\S+ [xy]", panel)), "cells are as wide as what they hold"
    assert panel.count("\\u") == 2, "lines of ASCII"
    printed.truncate(0)
    printed.seek(0)
    print_json(["é → 🙂"])
    assert json.loads(printed.getvalue()) == ["é → 🙂"]


def test_log_lines_are_spelled_out() -> None:
    record = logging.LogRecord("baton", logging.WARNING, "", 0, "%s", (HOSTILE,), None)
    assert LogFormatter().format(record) == SHOWN


# ---- every way that a command prints ---------------------------------------------------------------------------------


def filled(kind: Any) -> Any:
    """A value of a type, each text in it hostile."""
    origin, of = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return filled(of[0])
    if origin is typing.Literal:
        return of[0]
    if origin is typing.Annotated:
        return filled(of[0])
    if origin is tuple:
        return tuple(filled(one) for one in of if one is not ...)
    if origin is list:
        return [filled(of[0])]
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {filled(of[0]): filled(of[1])}
    if kind in (str, Any, object):
        return HOSTILE
    if kind in (int, float, bool):
        return kind(1)
    fields = typing.get_type_hints(kind)
    assert issubclass(kind, msgspec.Struct) or dataclasses.is_dataclass(kind), kind
    return kind(**{name: filled(fields[name]) for name in names_of(kind)})


def names_of(kind: type) -> tuple[str, ...]:
    return getattr(kind, "__struct_fields__", ()) or tuple(field.name for field in dataclasses.fields(kind))


def hostile_plan() -> Any:
    return plan_of(
        [stage(HOSTILE, "a:0")],
        [replica(HOSTILE, f"{HOSTILE}:0", share=1.0)],
        cluster=HOSTILE, model=HOSTILE, workload=HOSTILE, currency=HOSTILE, limits=(HOSTILE,),
        idle=(filled(Idle),) if "gpu_ids" not in names_of(Idle) else (),
    )  # fmt: skip


def observed(console: Console) -> None:
    observer = TerminalObserver(console, 1)
    observer.said(HOSTILE)
    observer.evaluated(1, [filled(Evaluation)])


def inputs_of(name: str) -> Inputs:
    """Inputs of which only the cluster is read."""
    return Inputs(Cluster(name, (), ()), None, None)  # type: ignore[arg-type]


def recipe() -> Recipe:
    return load_recipe(Recipe, ROOT / "recipes" / "quickstart.toml", ["run.seed=1"])


WAYS: dict[str, Callable[[Console], None]] = {
    "algorithms": lambda console: print_algorithms(console, [filled(Algorithm)] * 2),
    "one algorithm": lambda console: print_algorithms(console, [filled(Algorithm)]),
    "bench": lambda console: print_bench(console, filled(BenchResult)),
    "eval": lambda console: print_evaluations(console, [filled(Evaluation)]),
    "keys": lambda console: print_keys(console, [filled(RecipeKey)]),
    "plan": lambda console: print_plan(
        console,
        PlanResult(
            hostile_plan(),
            Cluster(HOSTILE, (), ()),
            inputs_of(HOSTILE),
            [Alternative(HOSTILE, None, HOSTILE), Alternative(HOSTILE, hostile_plan(), None)],
            [filled(Marginal)],
        ),
    ),
    "report": lambda console: print_report(console, filled(RunReport)),
    "show": lambda console: print_trajectories(console, [filled(ReadableTrajectory)]),
    "simulate": lambda console: print_result(console, filled(Result)),
    "sweep": lambda console: print_sweep(console, msgspec.structs.replace(filled(ParameterSweep), recommended=0)),
    "tasks": lambda console: print_tasks(console, [filled(ListedTask)] * 2),
    "one task": lambda console: print_tasks(console, [filled(ListedTask)]),
    "train": observed,
    "dry run": lambda console: print_dry_run(console, recipe(), filled(Footprint)),
}


@pytest.mark.parametrize("way", WAYS)
def test_no_command_prints_what_controls_a_terminal(way: str) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=2000)
    WAYS[way](console)
    text = STYLE.sub("", console.file.getvalue())  # type: ignore[attr-defined]
    assert not controls(text)
    assert "[/x][red]a" in text, "the text from outside is there, and as it is"


def status_of(monkeypatch: pytest.MonkeyPatch, status: HubStatus, *arguments: str) -> str:
    body = msgspec.json.encode(msgspec.to_builtins(status)).decode("utf-8", "surrogatepass").encode("utf-8", "replace")
    found = msgspec.json.decode(body, type=HubStatus)
    monkeypatch.setattr("baton.swarm.hub.status.fetch_status", lambda *arguments: found)
    monkeypatch.setattr("baton.cli.hub.read_token_file", lambda path: "token")
    result = CliRunner().invoke(cli.app, ["status", "http://127.0.0.1:1", "--token-file", "t", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_baton_status_shows_what_workers_write_and_obeys_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    outside = HOSTILE.replace("\ud800", "") + "\nworker-2 serving"
    status = msgspec.convert(_replaced(msgspec.to_builtins(filled(HubStatus)), outside), HubStatus)
    for arguments in ((), ("--json",)):
        text = status_of(monkeypatch, status, *arguments)
        assert not controls(text)
        assert "[/x][red]" in text.replace("\n", "")
    assert "\nworker-2" not in status_of(monkeypatch, status), "a line break begins no line of its own"


def test_a_workers_error_has_one_row_of_bounded_length_in_the_status() -> None:
    fault = "first\nother#2 (trusted)  serving\r\t" + 4000 * "y" + "end"
    worker = msgspec.structs.replace(filled(WorkerStatus), name="w#1", state="waiting", fault=fault)
    lines = []
    for status in (
        msgspec.structs.replace(filled(HubStatus), workers=(worker,)),
        msgspec.structs.replace(filled(HubStatus), workers=(msgspec.structs.replace(worker, fault=""),)),
    ):
        console = Console(file=io.StringIO(), width=2000)
        print_status(console, status, url="u")
        lines.append(console.file.getvalue().splitlines())  # type: ignore[attr-defined]
    assert len(lines[0]) == len(lines[1])
    (row,) = [line for line in lines[0] if "w#1" in line]
    assert r"waiting: first\nother#2 (trusted)  serving\r\ty" in row
    assert "end" not in row


def test_a_cause_that_a_reward_reports_begins_no_line() -> None:
    console = Console(file=io.StringIO(), width=2000)
    report = filled(RunReport)
    print_report(console, msgspec.structs.replace(report, warnings=("a\nmodel: /elsewhere",)))
    reading = filled(ReadableTrajectory)
    failed = msgspec.structs.replace(reading.shown, is_correct=False, failure="b\nreward 1, correct")
    print_trajectories(console, [msgspec.structs.replace(reading, shown=failed)])
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert r"warning: a\nmodel" in text
    assert r"(b\nreward 1" in text


def test_baton_status_says_that_no_worker_has_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    status = msgspec.structs.replace(
        msgspec.convert(_replaced(msgspec.to_builtins(filled(HubStatus)), "x"), HubStatus), workers=()
    )
    text = " ".join(status_of(monkeypatch, status).split())
    assert "no worker has joined yet; to add one: baton worker http://127.0.0.1:1 --token-file FILE" in text


def _replaced(tree: Any, text: str) -> Any:
    if isinstance(tree, dict):
        return {_replaced(key, text): _replaced(value, text) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_replaced(value, text) for value in tree]
    return text if tree == HOSTILE else tree


def test_errors_and_log_lines_of_a_command_are_spelled_out(tmp_path: Path) -> None:
    """The error quotes the recipe; a broad failure is a traceback, spelled out too."""
    path = tmp_path / "r.toml"
    path.write_text('[run]\nname = "[/x]\\u001b[2J\\u202e"\n')
    done = subprocess.run(
        [sys.executable, "-m", "baton", "train", path], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2
    assert not controls(done.stdout + done.stderr)
    assert "[/x]" in done.stderr
    code = (
        f"import sys; from baton.cli import main as cli; cli.app = lambda **_: {{}}[{HOSTILE!r}]; "
        "sys.argv = ['baton']; cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "KeyError" in done.stderr
    assert not controls(done.stdout + done.stderr)


def test_pages_hold_texts_from_outside_as_texts(tmp_path: Path) -> None:
    hostile = "</script><script>alert(1)</script><img src=x onerror=alert(2)>{{ 7 * 7 }}"
    page = tmp_path / "report.html"
    stages, engines = [stage("H100", "a:0"), stage("H20", "d:0")], [replica("L20", "b:0", share=1.0)]
    judge = scoring("L4", "c:0", model=hostile)
    plan = mixed(plan_of(stages, engines, cluster=hostile, model=hostile, reward=judge))
    write_plan_page(page, PlanResult(plan, Cluster(hostile, (), ()), inputs_of(hostile)), ())
    assert '1 × L4</td><td colspan="2">reward model &lt;/script&gt;' in page.read_text()
    assert "<td>1 of dp 2, 50% of the rows</td>" in page.read_text()
    assert "<script>alert" not in page.read_text()
    assert "<img src=x" not in page.read_text()
    result = msgspec.convert(_replaced(msgspec.to_builtins(filled(Result)), hostile), Result)
    tokens = dict.fromkeys(("generated", "trained", "masked", "filtered", "dropped", "carried", "unreported"), 1)
    write_result_page(page, msgspec.structs.replace(result, tokens={**tokens, f"lost: {hostile}": 1}), [])
    assert "<script>alert" not in page.read_text()
    assert "<img src=x" not in page.read_text()


# ---- help ------------------------------------------------------------------------------------------------------------


def commands(command: Any, *path: str) -> list[tuple[tuple[str, ...], Any]]:
    found = [(path, command)]
    for name, each in getattr(command, "commands", {}).items():
        found += commands(each, *path, name)
    return found


ALL = [(path, command) for path, command in commands(typer.main.get_command(cli.app)) if not command.hidden]


@pytest.mark.parametrize(
    ("path", "command"), ALL, ids=lambda value: " ".join(value) if isinstance(value, tuple) else ""
)
def test_help_prints_every_word_of_a_command_and_of_its_options(path: tuple[str, ...], command: Any) -> None:
    result = CliRunner().invoke(cli.app, [*path, "--help"])
    text = "".join(result.output.split())
    for parameter in command.params:
        if not getattr(parameter, "hidden", False):
            assert parameter.help, f"{parameter.name} has no help"
            assert "".join(parameter.help.split()) in text, parameter.name
    assert "".join((command.help or "").split()) in text
    for name, each in getattr(command, "commands", {}).items():
        if not each.hidden:
            assert name + "".join(each.get_short_help_str(1000).split()) in text, "whole, not cut to a line"
