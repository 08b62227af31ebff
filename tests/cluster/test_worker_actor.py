"""What the actor of a worker tells about the end of its process."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baton.cluster.placement import ProcessSpec
from baton.cluster.ray.actors import WorkerActor, WorkerArguments
from baton.cluster.ray.supervisor import engine_arguments
from baton.rollout.engine import EngineSettings
from baton.rollout.engines.factory import chosen

Start = Callable[..., WorkerActor]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Returns a function (script, further arguments) that starts an actor, whose worker process is a shell script."""
    started: list[WorkerActor] = []
    program = tmp_path / "python"
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def start(script: str, *more: str) -> WorkerActor:
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        command = ("http://127.0.0.1:1", "--slots", "1", "--threads", "1", "--device", "cpu", *more)
        started.append(WorkerActor(WorkerArguments(command, token="t", certificate="", threads=1)))
        return started[-1]

    yield start
    for actor in started:
        actor.leave()


def test_the_options_of_a_worker_belong_to_the_kind_of_its_engine(start: Start) -> None:
    """`baton worker` checks options before it knows the recipe, so the command line names the kind too."""
    script = 'echo "$@" | tr " " "\\n" | grep -A1 engine | grep -v "^--$"'
    spec = ProcessSpec("worker-0", "worker", "m", "H100", ("m:0", "m:1"), {"GPU": 2.0}, 1, 8, tp=2)
    of_server = engine_arguments("sglang", spec, {spec.gpu_ids: "http://h:1"})
    assert of_server == ("--engine", "sglang", "--engine-option", "url=http://h:1")
    assert engine_arguments("embedded", spec, {}) == ()
    arguments = engine_arguments("vllm", spec, {})
    said = start(script, *arguments).watch()
    options = "--engine-option | tensor_parallel=2 | --engine-option | pipeline_parallel=1"
    assert said.endswith(f"--engine | vllm | {options}")
    assert chosen(EngineSettings(), kind=arguments[1], options=arguments[3::2]).vllm.tensor_parallel == 2


def test_the_end_of_a_worker_is_one_line_however_many_it_wrote(start: Start) -> None:
    actor = start("echo no connection to the hub\necho\necho '  ready: r' >&2\nexit 3")
    assert actor.watch() == "ended with exit code 3; its last output: no connection to the hub | ready: r"


def test_of_a_long_log_only_the_end_is_read(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    def whole(path: Path) -> bytes:
        raise AssertionError(f"all of {path} is read")

    actor = start("seq 1 2000\nexit 3")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", whole)
        said = actor.watch()
    assert said.startswith("ended with exit code 3; its last output: ")
    assert said.endswith("1999 | 2000")
    assert len(said) < 4000


def test_the_files_of_killed_actors_are_deleted(start: Start, tmp_path: Path) -> None:
    """Ray kills the actor of a worker that has crashed, so the actor itself cannot delete the worker's token."""
    killed = tmp_path / "baton-worker-x"
    killed.mkdir()
    (killed / "token").write_text("t")
    actor = start("exit 3")
    assert not killed.exists()
    actor.watch()
    actor.leave()
    assert [path.name for path in tmp_path.iterdir()] == ["python"]
