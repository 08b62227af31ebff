"""What the actor of a worker tells about the end of its process."""

from __future__ import annotations

import socket
import sys
import tempfile
from pathlib import Path

import pytest

from baton.cluster.ray.actors import WorkerActor, WorkerArguments
from baton.rollout.engine import EngineSettings
from baton.rollout.engines.factory import chosen


def test_the_options_of_a_worker_belong_to_the_kind_of_its_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`baton worker` checks options before it knows the recipe, so the command line names the kind too."""
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\necho "$@" | tr " " "\\n" | grep -A1 engine | grep -v "^--$"\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    own = {"name": "w", "url": "http://127.0.0.1:1", "token": "t", "certificate": "", "is_insecure": False}
    size = {"slots": 1, "threads": 1, "device": "cpu"}
    actor = WorkerActor(WorkerArguments(**own, **size, engine="vllm", options=("tensor_parallel=2",)))  # type: ignore[arg-type]
    try:
        said = actor.watch()
    finally:
        actor.leave()
    assert said.endswith("--engine | vllm | --engine-option | tensor_parallel=2")
    assert chosen(EngineSettings(), kind="vllm", options=["tensor_parallel=2"]).vllm.tensor_parallel == 2


def test_the_end_of_a_worker_is_one_line_however_many_it_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho no connection to the hub\necho\necho '  ready: r' >&2\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    actor = WorkerActor(
        WorkerArguments(
            name="w", url="http://127.0.0.1:1", token="t", certificate="", is_insecure=False, slots=1, threads=1,
            device="cpu",
        )
    )  # fmt: skip
    try:
        assert actor.watch() == "ended with exit code 3; its last output: no connection to the hub | ready: r"
    finally:
        actor.leave()


def test_of_a_long_log_only_the_end_is_read_and_the_files_of_killed_actors_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray kills the actor of a worker that has crashed, so the actor itself cannot delete the worker's token."""
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nseq 1 2000\nexit 3\n")
    program.chmod(0o755)
    killed = tmp_path / f"baton-worker-{socket.gethostname()}-999999999-x"
    killed.mkdir()
    (killed / "token").write_text("t")

    def whole(path: Path) -> bytes:
        raise AssertionError(f"all of {path} is read")

    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own = {"name": "w", "url": "http://127.0.0.1:1", "token": "t", "certificate": "", "is_insecure": False}
    actor = WorkerActor(WorkerArguments(**own, slots=1, threads=1, device="cpu"))  # type: ignore[arg-type]
    try:
        assert not killed.exists()
        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_bytes", whole)
            said = actor.watch()
    finally:
        actor.leave()
    assert said.startswith("ended with exit code 3; its last output: ")
    assert said.endswith("1999 | 2000")
    assert len(said) < 4000
    assert list(tmp_path.iterdir()) == [program]
