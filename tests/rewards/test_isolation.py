"""The isolation of a scorer process, with and without namespaces; no process that it starts survives it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from judging_cases import PROMPT, hand_clock, judge_with, running_with, trajectory, wait_until, write_functions

from baton.errors import UserError
from baton.rewards.isolation import environment
from baton.types import FailureCause

pytestmark = [
    pytest.mark.timing,
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
]

REFUSED = """
import baton.rewards.isolation as isolation
isolation._enter_namespaces = lambda network: "refused by the test"
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_functions(tmp_path_factory.mktemp("functions"))


@pytest.fixture(params=["namespaces", "no namespaces"])
def _platform(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker processes with what this machine has, and as on a machine that refuses namespaces."""
    if request.param == "no namespaces":
        (tmp_path / "sitecustomize.py").write_text(REFUSED)
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


@pytest.fixture
def listener() -> Iterator[int]:
    """The port of a server on this machine, outside of the judges' network."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.usefixtures("_platform")
@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("starts_another_and_spins", FailureCause.TIMEOUT),
        ("starts_escapees_and_spins", FailureCause.TIMEOUT),
        ("starts_escapees_and_exits", FailureCause.CRASHED),
    ],
)
def test_nothing_that_a_judge_starts_outlives_it(
    functions: str, tmp_path: Path, name: str, cause: FailureCause, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "mark"
    clock = hand_clock(monkeypatch)
    with judge_with(functions, name) as judge:
        judge.start()
        judge.submit([trajectory(0, 0)], PROMPT, [str(mark)])
        assert wait_until(mark.exists)
        clock.advance(60.0 if cause is FailureCause.TIMEOUT else 0.0)
        (judged,) = judge.drain()
        assert judged.judgement.cause is cause
        assert wait_until(lambda: not running_with(str(mark)))


def look(functions: str, tmp_path: Path, port: int, **settings: Any) -> tuple[dict[str, Any], str]:
    seen = tmp_path / "seen"
    with judge_with(functions, "looks_around", **settings) as judge:
        said = judge.start()
        assert judge.score(PROMPT, f"{seen}\n{port}").failure is None
    return json.loads(seen.read_text()), said


@pytest.mark.usefixtures("_platform")
def test_a_judge_gets_no_secrets_and_a_directory_that_goes_with_it(
    functions: str, tmp_path: Path, listener: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_TEST_SECRET", "s3cret")
    monkeypatch.setenv("MY_KEY", "k")
    beside = subprocess.Popen(["sleep", "600"], env={"BATON_TEST_SECRET": "s3cret"})  # as the run itself may be started
    seen, said = look(functions, tmp_path, listener, env=("MY_KEY",))
    beside.kill()
    beside.wait()
    assert "BATON_TEST_SECRET" not in seen["environ"]
    assert seen["environ"]["MY_KEY"] == "k"
    assert seen["environ"]["PATH"] == os.environ["PATH"]
    assert seen["uid"] == os.getuid()
    assert seen["files"] == 2**30
    assert seen["cwd"] != str(Path.cwd())
    assert seen["cwd"] == seen["environ"]["TMPDIR"]
    assert wait_until(lambda: not Path(seen["cwd"]).exists())
    if "in their own namespaces" in said:
        assert seen["secrets"] == [], "not even in the /proc entries of the run's user"
        assert seen["reach"] == "ConnectionRefusedError", "its loopback is not the run's"
    else:
        assert "without namespaces (" in said
        assert seen["reach"] == "connected"
        assert seen["secrets"], "the test looks where secrets are"


def test_a_judge_that_may_use_the_network_reaches_it(functions: str, tmp_path: Path, listener: int) -> None:
    seen, said = look(functions, tmp_path, listener, network=True)
    assert seen["reach"] == "connected"
    assert "with network" in said or "without namespaces (" in said


def test_the_environment_is_where_things_are_and_what_the_recipe_names() -> None:
    run = {"PATH": "/bin", "HF_TOKEN": "x", "HF_HOME": "/hf", "WANDB_API_KEY": "y", "AWS_SECRET": "z", "LC_ALL": "C"}
    own = {"PYTHONPATH", "OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM"}
    assert environment((), run).items() >= {"PATH": "/bin", "HF_HOME": "/hf", "LC_ALL": "C"}.items()
    assert environment((), run).keys() == own | {"PATH", "HF_HOME", "LC_ALL"}
    assert environment(["HF_TOKEN"], run)["HF_TOKEN"] == "x"
    with pytest.raises(UserError, match=r"judge.env: got 'MISSING', which is not set"):
        environment(["MISSING"], run)
