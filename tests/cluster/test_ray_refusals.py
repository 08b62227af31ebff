"""What is said where a run cannot be placed: one sentence, before anything is started."""

from __future__ import annotations

import builtins
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from baton.cluster.ray.actors import interface_of, own_directory
from baton.cluster.ray.connection import RayCluster, check_address, import_ray
from baton.errors import UserError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("address", ["ray://host:10001", "host", "host:x", "", "http://host:1"])
def test_an_address_that_is_none_is_refused_with_what_is_allowed(address: str) -> None:
    with pytest.raises(UserError, match=r"--ray: got .*; allowed is HOST:PORT, or auto"):
        check_address(address)
    for fine in ("auto", "127.0.0.1:6379", "head-0.cluster:6379", "[::1]:6379"):
        check_address(fine)


def test_a_missing_ray_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name == "ray":
            raise ImportError(name)
        return original(name, *rest, **more)

    monkeypatch.delitem(sys.modules, "ray", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match=r"pip install 'baton-rl\[ray\]'"):
        import_ray()


def test_usage_statistics_are_off_whoever_asked_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "1")
    import_ray()
    import os

    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"


def test_auto_without_a_cluster_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own answer to `auto` would be to start a cluster, or to wait."""
    ray = pytest.importorskip("ray")

    def refuse(**_: Any) -> None:
        raise ConnectionError("Could not find any running Ray instance.\nmore")

    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(UserError, match=r"--ray auto: cannot join a Ray cluster .*running Ray instance.; allowed"):
        RayCluster("auto")


def test_plan_and_ray_belong_together(monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from baton.cli.main import app

    result = CliRunner().invoke(app, ["train", str(ROOT / "recipes" / "quickstart.toml"), "--ray", "auto"])
    assert isinstance(result.exception, UserError)
    assert "--ray needs --plan" in str(result.exception)


def test_directories_of_killed_processes_go_and_those_of_the_living_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in other containers, whose processes have other ids: the test renames the directory of a running process as
    if its process had the id of no process here."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = "import time; from baton.cluster.ray.actors import own_directory as o; print(o('test'), flush=True); "
    owner = subprocess.Popen(
        [sys.executable, "-c", code + "time.sleep(600)"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    try:
        assert owner.stdout is not None
        theirs = Path(owner.stdout.readline().strip())
        theirs = theirs.rename(tmp_path / f"baton-test-{socket.gethostname()}-999999999-x")
        mine = own_directory("test")
        assert sorted(tmp_path.iterdir()) == sorted([mine, theirs])
    finally:
        owner.kill()
        owner.wait(60.0)
    other = own_directory("test")
    assert sorted(tmp_path.iterdir()) == sorted([mine, other])


def test_the_interface_of_an_address_is_found() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.77") == ""
