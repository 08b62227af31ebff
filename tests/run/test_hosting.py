"""A start of a hub that fails leaves no thread, port, process or temporary directory."""

from __future__ import annotations

import socket
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from transformers import AutoModelForCausalLM

from baton.errors import EngineFault, UserError
from baton.policy.tokenizer import load_tokenizer
from baton.records.trace import TraceWriter
from baton.run import hosting
from baton.run.hosting import check_swarm, open_swarm
from baton.swarm import messages
from baton.swarm.listen import ListenAddress
from baton.swarm.local_workers import LocalWorkers
from baton.swarm.supervisor import HubAccess
from baton.types import PolicyVersion
from tests.model_families import tiny_config
from tests.run.test_loop import load


class Supervisor:
    """Starts no workers: `begin` fails while the hub listens."""

    def __init__(self) -> None:
        self.address = ("", 0)
        self.num_closed = 0

    def weight(self, name: str) -> float:
        return 1.0

    def begin(self, hub: HubAccess) -> None:
        url = urlsplit(hub.url)
        assert url.hostname is not None
        assert url.port is not None
        self.address = url.hostname, url.port
        socket.create_connection(self.address, 30.0).close()
        raise EngineFault("the workers cannot start")

    def check_health(self) -> None: ...

    def close(self) -> None:
        self.num_closed += 1


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "small").mkdir()
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path / "small"


def assert_nothing_left(run: Path) -> None:
    assert "hub" not in [thread.name for thread in threading.enumerate()]
    assert list((run.parent / "temporary").iterdir()) == []
    assert not (run / "scratch.txt").exists()


def test_workers_that_cannot_start_end_the_hub(small: Any, run: Path) -> None:
    recipe, supervisor = load(small, run.parent, "swarm.serve=127.0.0.1:0"), Supervisor()
    with pytest.raises(EngineFault, match="the workers cannot start"):
        open_swarm(
            recipe, run, load_tokenizer(str(small.model)), PolicyVersion("a", 0), print, TraceWriter(None), supervisor
        )
    assert supervisor.num_closed == 1
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(supervisor.address, 30.0).close()
    assert_nothing_left(run)


def test_workers_that_cannot_end_keep_no_hub(small: Any, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise EngineFault("no answer")

    monkeypatch.setattr(Supervisor, "begin", lambda self, hub: None)
    monkeypatch.setattr(Supervisor, "close", fail)
    recipe = load(small, run.parent, "swarm.serve=127.0.0.1:0")
    port = open_swarm(
        recipe, run, load_tokenizer(str(small.model)), PolicyVersion("a", 0), print, TraceWriter(None), Supervisor()
    )
    with pytest.raises(EngineFault, match="no answer"):
        port.close()
    assert_nothing_left(run)


def test_a_model_that_cannot_be_served_leaves_no_directory(
    small: Any, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise UserError("no such model")

    monkeypatch.setattr(hosting, "load_empty", refuse)
    recipe = load(small, run.parent, "swarm.workers=1")
    with pytest.raises(UserError, match="no such model"):
        open_swarm(recipe, run, load_tokenizer(str(small.model)), PolicyVersion("a", 0), print, TraceWriter(None))
    assert_nothing_left(run)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["engine.report_every_tokens=101"], "engine.report_every_tokens: got 101"),
        (["engine.report_every_tokens=100"], None),
        (["engine.report_every_tokens=256", "rollout.max_new_tokens=100"], None),
        (["engine.kind=vllm", "rollout.mode=sync"], "rollout.max_new_tokens: got 120"),
        (["engine.report_every_tokens=101", "engine.report_routing=false"], None),
    ],
)
def test_reports_with_routing_that_would_exceed_a_message_are_refused_before_the_run(
    small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], said: str | None
) -> None:
    config = tiny_config("qwen3_moe")
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    width = config.num_hidden_layers * config.num_experts_per_tok
    monkeypatch.setattr(messages, "MAX_FRAME_BYTES", 2**14 + 100 * (20 + width))
    both = [f"model.path={tmp_path}", "rollout.max_new_tokens=120", "engine.max_context_tokens=256"]
    both += ["swarm.workers=1", "engine.report_routing=true", "eval.enabled=false"]
    recipe = load(small, tmp_path, *both, *overrides)
    if said is None:
        check_swarm(recipe)
        return
    key = said.partition(":")[0]
    with pytest.raises(UserError) as refused:
        check_swarm(recipe)
    assert str(refused.value) == (
        f"{said}, but with {width} bytes of routing per token (engine.report_routing), a report of the swarm has room "
        f"for 100 tokens; set {key} to at most 100, or report_routing = false"
    )


def test_a_worker_that_cannot_start_ends_those_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, popen, started = tmp_path / "python", subprocess.Popen, list[subprocess.Popen[bytes]]()
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program))
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **named: started.append(popen(*a, **named)) or started[-1])
    (tmp_path / "local-1.log").mkdir()
    listen, names = ListenAddress.parse("127.0.0.1:0"), [tmp_path / "local-0", tmp_path / "local-1"]
    with pytest.raises(IsADirectoryError):
        LocalWorkers(listen, 1, names, tmp_path, say=print, device="cpu")
    (only,) = started
    assert only.poll() is not None
