"""A run of an earlier commit is shown and resumed. Checked is structure: which numbers come out depends on the CPU."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import socket
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from baton.cli import main as cli
from baton.errors import UserError
from baton.files import verify
from tests.golden.make_run import HERE, KINDS, MODES, kinds_of

pytestmark = pytest.mark.timing

ABSOLUTE = re.compile(rb"(?<![\w.)}/:>-])/(?:work|root|home|tmp|Users|mnt|opt|srv|var|private|dev/shm)/")
"""A path from the root of some machine's file system."""


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the golden directory, which is where commands are given: all paths in it are relative."""
    shutil.copytree(HERE, tmp_path / "golden")
    monkeypatch.chdir(tmp_path / "golden")
    return tmp_path / "golden"


def baton(*arguments: str) -> tuple[str, str]:
    """Give a command; return what it prints on stdout and stderr."""
    result = CliRunner().invoke(cli.app, list(arguments), catch_exceptions=False, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.stdout, result.stderr


def groups_of(run: Path) -> dict[int, list[Any]]:
    """Return the recorded groups by step, as plain values."""
    files = sorted((run / "trajectories").glob("step_*.jsonl.gz"))
    return {
        int(f.name[5:11]): [json.loads(line) for line in gzip.decompress(f.read_bytes()).splitlines()] for f in files
    }


def rows_of(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of JSON lines."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def tokens_in(segments: list[Any]) -> list[tuple[int, int]]:
    """Return the tokens of segments, each with the policy version that wrote it."""
    return [(token, segment["policy_version"]) for segment in segments for token in segment["token_ids"]]


def tokens_of(journal: Path) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """Return what each trajectory of the open groups had, read without Baton; (group, sample) → [(id, version)].

    Noise is keyed, so ids that were lost and generated again are the same; their version is not.
    """
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    with closing(sqlite3.connect(f"file:{journal}?immutable=1", uri=True)) as database:
        consumed = {number for (number,) in database.execute("SELECT number FROM entries WHERE kind = 'consumed'")}
        rows = database.execute(
            "SELECT number, sample, content FROM entries WHERE kind IN ('segments', 'finished') "
            "ORDER BY number, sample, token_offset"
        )
        for number, sample, content in rows:
            value = msgspec.msgpack.decode(content)
            segments = value["segments"] if isinstance(value, dict) else value
            if number not in consumed:
                found.setdefault((number, sample), []).extend(tokens_in(segments))
    return found


def assert_shown(run: str, steps: int) -> None:
    """Every command that reads a run reads this one."""
    report = json.loads(baton("report", run, "--json")[0])
    assert (report["steps"], report["num_steps"]) == (steps, 4)
    assert report["changes"]
    assert "steps" in baton("report", run)[0]
    baton("report", run, "--html", "--out", "report.html")
    assert "<svg" in Path("report.html").read_text()
    for step in groups_of(Path(run)):
        shown = json.loads(baton("show", run, "--step", str(step), "--json", "-n", "100")[0])
        assert len(shown) == 6
        assert all(each["step"] == step and each["response"] for each in shown)
        assert "reward" in baton("show", run, "--step", str(step), "--sort", "best")[0]
    baton("trace", run, "--out", "trace.json")
    assert {"generate", "train"} <= {
        event.get("name") for event in json.loads(Path("trace.json").read_bytes())["traceEvents"]
    }


def resume(mode: str) -> str:
    """Resume to the end; return what was said."""
    return "".join(baton("train", f"{mode}.toml", "--resume"))


def assert_resumed(run: Path, mode: str, said: str) -> None:
    """The run went on after step 2, with all it had: nothing is trained twice, nothing is generated again."""
    golden = HERE / "runs" / mode
    assert "after step 2, from " in said
    assert "step 3: the recorded batch is used again" in said
    groups, before = groups_of(run), groups_of(golden)
    assert sorted(groups) == [1, 2, 3, 4]
    assert {step: groups[step] for step in before} == before
    ids = [group["group_id"] for step in groups.values() for group in step]
    assert len(set(ids)) == len(ids) == 8
    has = tokens_of(run / "journal.sqlite")
    for group in groups[4]:
        for index, member in enumerate(group["members"]):
            has[group["group_id"], index] = tokens_in(member["trajectory"]["segments"])
    for key, had in tokens_of(golden / "journal.sqlite").items():
        assert has[key][: len(had)] == had, f"trajectory {key} keeps its tokens"
    rows, rows_before = rows_of(run / "metrics.jsonl"), rows_of(golden / "metrics.jsonl")
    assert rows[: len(rows_before)] == rows_before
    assert [row["step"] for row in rows if "reward/mean" in row] == [1, 2, 3, 4]
    evaluations, evaluated = rows_of(run / "evaluations.jsonl"), rows_of(golden / "evaluations.jsonl")
    for row, old in zip(evaluations, evaluated, strict=False):  # a rewritten row has the fields of later versions, too
        assert row == old | {"result": row["result"] | old["result"]}
    assert len(evaluations) > len(evaluated)
    assert {row["step"] for row in evaluations} == {0, 2, 4}
    facts, facts_before = (json.loads((each / "run.json").read_bytes()) for each in (run, golden))
    assert [each["step"] for each in facts["resumed"]] == [2]
    assert {**facts, "resumed": []} == facts_before
    spans, spans_before = rows_of(run / "trace.jsonl"), rows_of(golden / "trace.jsonl")
    assert spans[: len(spans_before)] == spans_before
    assert any(span["name"] == "train" and span["facts"]["step"] == 4 for span in spans[len(spans_before) :])
    assert json.loads((run / "checkpoints/step_000004/baton/loop.json").read_bytes())["step"] == 4
    verify(run / "checkpoints/step_000004")


def test_the_journals_have_records_of_every_kind() -> None:
    for mode in MODES:
        assert kinds_of(HERE / "runs" / mode / "journal.sqlite") == KINDS


@pytest.mark.parametrize("mode", MODES)
def test_a_run_of_an_earlier_commit_is_shown(there: Path, mode: str) -> None:
    assert_shown(f"runs/{mode}", steps=2)


def test_a_run_of_an_earlier_commit_is_resumed_in_partial(there: Path) -> None:
    assert_resumed(there / "runs/partial", "partial", resume("partial"))
    assert_shown("runs/partial", steps=4)
    evaluations = json.loads(baton("eval", "runs/partial", "-n", "2", "--json")[0])
    assert {each["num_prompts"] for each in evaluations} == {2}


@pytest.mark.slow
def test_a_run_of_an_earlier_commit_is_resumed_in_async(there: Path) -> None:
    assert_resumed(there / "runs/async", "async", resume("async"))
    assert_shown("runs/async", steps=4)


def test_a_run_of_an_earlier_commit_that_is_changed_is_refused_by_name(there: Path) -> None:
    with pytest.raises(UserError, match=r"rollout\.group_size: was 3, now 4"):
        baton("train", "partial.toml", "rollout.group_size=4", "--resume")


def test_no_golden_file_names_a_machine() -> None:
    checked = 0
    for file in HERE.parent.rglob("*"):
        if not file.is_file() or file.suffix in {".py", ".pyc"}:
            continue
        data = file.read_bytes()
        if file.suffix == ".safetensors":
            data = data[8 : 8 + int.from_bytes(data[:8], "little")]  # its header; the rest is numbers
        if file.suffix == ".gz":
            data = gzip.decompress(data)
        assert not ABSOLUTE.search(data), file
        assert os.fsencode(Path.home()) + b"/" not in data, file
        assert os.fsencode(HERE.parents[2]) not in data, file
        assert len(socket.gethostname()) < 4 or socket.gethostname().encode() not in data, file
        checked += 1
    assert checked > 40
