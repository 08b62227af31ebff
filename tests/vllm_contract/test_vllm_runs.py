"""Whole runs with vLLM: beside the trainer, and in a worker that joins a swarm of its own accord."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import msgspec
import pytest
import tomli_w

from baton.policy.new_model import scratch_model, scratch_tokenizer
from baton.policy.settings import ScratchSettings
from baton.records.metrics import read_metrics
from baton.swarm.auth import Role, TokenFile, write_private
from baton.swarm.hub.status import HubStatus
from tests.swarm.swarm_processes import recipe_tree

ROOT = Path(__file__).parents[2]
DEADLINE_S = 240.0
EAGER = {"enforce_eager": True}


def baton(log: Path, *arguments: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "baton", *arguments]
    with log.open("wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, env=environment, cwd=ROOT)


def await_said(log: Path, pattern: str) -> str:
    until_s = time.monotonic() + DEADLINE_S
    while not (found := re.search(pattern, log.read_text(errors="replace"))):
        assert time.monotonic() < until_s, f"{pattern!r} was never said in:\n{log.read_text(errors='replace')[-3000:]}"
        time.sleep(0.1)
    return found[1]


def end(process: subprocess.Popen[bytes], log: Path) -> None:
    assert process.wait(DEADLINE_S) == 0, log.read_text(errors="replace")[-3000:]


def model_at(path: Path) -> Path:
    """Write a random model with heads of 32, the narrowest that vLLM has on a CPU."""
    tokenizer = scratch_tokenizer(["1+2-3 <think>1+2=3</think><answer>0</answer>"], 300)
    shape = ScratchSettings(vocab_size=300, hidden_size=64, num_layers=2, num_heads=2, intermediate_size=64)
    scratch_model(shape, tokenizer, seed=0).save_pretrained(path)
    tokenizer.hf.save_pretrained(path)
    return path


def written(tmp_path: Path, **changes: object) -> Path:
    tree = recipe_tree(model_at(tmp_path / "model"), tmp_path, **changes)
    tree["run"]["steps"] = 3
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(tomli_w.dumps(tree))
    return recipe


def assert_trained_on_its_own_tokens(tmp_path: Path, num_steps: int | None = 3) -> None:
    """The trainer's probabilities of what it trains are those that the engine reported."""
    rows = [row for row in read_metrics(tmp_path / "r") if "policy/logprob_diff_max" in row]
    assert rows
    assert num_steps in (None, len(rows))
    assert max(row["policy/logprob_diff_max"] for row in rows) < 1e-3


@pytest.mark.parametrize(
    ("lora", "own"),
    [(False, {}), (True, {}), (True, {"lora_rank": 4})],
    ids=["all weights", "a merged adapter", "an adapter that vLLM applies"],
)
def test_a_run_with_vllm_beside_its_trainer(lora, own, tmp_path):
    """In sync every token is of the version that is trained: the probabilities tell stale weights at once."""
    changes: dict[str, object] = {"engine__kind": "vllm", "engine__vllm": {**EAGER, **own}}
    if lora:
        changes |= {"lora__rank": 4, "lora__alpha": 8}
    log = tmp_path / "log"
    end(baton(log, "train", str(written(tmp_path, **changes))), log)
    assert_trained_on_its_own_tokens(tmp_path)


def test_a_run_in_flight_keeps_growing_while_weights_change(tmp_path):
    """async with keep: no processes of Baton's own, because vLLM has some."""
    changes = {
        "engine__kind": "vllm",
        "engine__vllm": EAGER,
        "rollout__mode": "async",
        "rollout__on_new_version": "keep",
    }
    log = tmp_path / "log"
    end(baton(log, "train", str(written(tmp_path, **changes))), log)
    assert len([row for row in read_metrics(tmp_path / "r") if "policy/logprob_diff_max" in row]) == 3


def test_a_trusted_vllm_worker_joins_a_run_of_the_embedded_kind_and_all_it_hands_in_is_found_honest(tmp_path):
    recipe = written(tmp_path, inspection__trusted_share=1.0)
    tokens = TokenFile(tmp_path / "tokens.json")
    write_private(tmp_path / "token", tokens.create(Role.WORKER, 3600, name="w", trusted=True).encode())
    admin = tokens.create(Role.ADMIN, 3600, name="a")
    hub_log, worker_log = tmp_path / "hub.log", tmp_path / "worker.log"
    hub = baton(hub_log, "train", str(recipe), "--serve", "127.0.0.1:0")
    worker = None
    seen = None
    try:
        url = await_said(hub_log, r"the hub listens at (http://[0-9.]+:\d+)")
        options = ["--engine", "vllm", "--engine-option", "enforce_eager=true", "--device", "cpu"]
        worker = baton(worker_log, "worker", url, "--token-file", str(tmp_path / "token"), *options)
        while hub.poll() is None:
            seen = status(url, admin) or seen
            time.sleep(0.2)
        end(hub, hub_log)
        end(worker, worker_log)
    finally:
        for process in (hub, worker):
            if process is not None:
                process.kill()
    assert_trained_on_its_own_tokens(tmp_path)
    (one,) = seen.workers
    assert one.worker_class.startswith("vllm in float32 on ")
    assert one.checked >= 32, "every trajectory of a step is scored again"
    assert not seen.quarantine


def status(url: str, token: str) -> HubStatus | None:
    request = urllib.request.Request(f"{url}/status", headers={"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, timeout=10.0) as response:
            found = msgspec.json.decode(response.read(), type=HubStatus)
            return found if found.workers else None
    except OSError:
        return None
