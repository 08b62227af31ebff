"""A swarm of real processes loses a worker, good weights or its hub: the run is as if nothing was.

The faults that need only a plain run are in `tests/live_faults/`.

In mode `sync` "as if nothing was" is to the bit: the weights, every trajectory and every reward of a run whose engine
sits beside its trainer. BATON_TEST_KILLS asks for more kills at random moments than the few that every run of the tests
makes, BATON_TEST_REFRESHES for more versions.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from baton.records.metrics import read_metrics
from tests.swarm.shaping_proxy import Meddler
from tests.swarm.swarm_processes import (
    Outcome,
    Swarm,
    WorkerFaults,
    assert_same,
    await_,
    outcome,
    swarm,
    worker_of,
)

pytestmark = [pytest.mark.numerics, pytest.mark.slow, pytest.mark.timing]

NUM_KILLS = int(os.environ.get("BATON_TEST_KILLS", "1"))
NUM_REFRESHES = int(os.environ.get("BATON_TEST_REFRESHES", "45"))
SLOW = WorkerFaults(token_delay_s=0.01)
"""So that there is time to be caught at work."""


def assert_as_if_nothing_was(run: Swarm, unbroken: Outcome) -> None:
    run.finish()
    assert_same(outcome(run.run), unbroken)
    lost = [row for row in read_metrics(run.run.path) if row.get("staleness/max", 0)]
    assert not lost, "a token of an older version was trained on in sync"


def train_until_a_worker_is_killed(run: Swarm) -> None:
    """Start the run with two workers, and kill the first one while it holds leases, after the first train step."""
    run.train()
    victim = run.joined(faults=SLOW)
    run.joined(faults=SLOW)
    run.await_step(1)
    run.caught_at_work(victim, 0)
    victim.kill()


# ---- workers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["sync", "partial"])
def test_sampling_masks_of_workers_train_as_those_of_an_engine_beside_the_trainer(
    mode: str, model: Path, tmp_path: Path
) -> None:
    """In `sync` to the bit, although one worker is killed. All that the workers report is verified and found honest."""
    changes = {"rollout__top_p": 0.9, "rollout__mode": mode, "inspection__share": 1.0, "inspection__trusted_share": 1.0}
    with swarm(tmp_path / "swarm", model, **changes) as run:
        train_until_a_worker_is_killed(run)
        run.finish()
        found = outcome(run.run)
        assert "quarantined" not in run.trainer.said()
        rows = [row for row in read_metrics(run.run.path) if "policy/logprob_diff_max" in row]
    assert rows
    assert all(row["policy/logprob_diff_max"] < 1e-4 for row in rows)
    segments = [s for step in found.groups for g in step for m in g["members"] for s in m["trajectory"]["segments"]]
    assert all(len(segment["kept"]) == len(segment["token_ids"]) for segment in segments)
    if mode == "sync":
        with swarm(tmp_path / "alone", model, **changes) as alone:
            alone.engine_beside_trainer()
            alone.finish()
            assert_same(found, outcome(alone.run))


EPISODES = {
    "task": [{"name": "t", "environment": "tests.small_environment:Evenness", "max_turns": 5, "max_turn_tokens": 5}],
    "reward": [{"kind": "correct"}],
    "environments__processes": 1,
    "engine__max_context_tokens": 128,
}
"""Three turns each: two thirds of the leases begin after an observation."""


def test_a_worker_killed_in_the_middle_of_episodes_leaves_the_run_as_it_was(model: Path, tmp_path: Path) -> None:
    with swarm(tmp_path / "alone", model, **EPISODES) as alone:
        alone.engine_beside_trainer()
        alone.finish()
        unbroken = outcome(alone.run)
    members = [member for step in unbroken.groups for group in step for member in group["members"]]
    assert sum(len(m["episode"]["exchanges"]) == 3 for m in members) > len(members) / 2
    with swarm(tmp_path / "swarm", model, **EPISODES) as run:
        run.train()
        workers = [run.joined(faults=SLOW), run.joined(faults=SLOW)]
        for number, victim in enumerate(workers):
            run.await_step(1 + number)
            run.caught_at_work(victim, number)
            victim.kill()
            run.joined(faults=SLOW)
        assert_as_if_nothing_was(run, unbroken)
        assert run.trainer.said().count("sent no message for 5 s") == 2


@pytest.mark.skipif(NUM_KILLS < 2, reason="BATON_TEST_KILLS asks for it")
def test_workers_killed_at_random_moments_leave_the_run_as_it_was(
    model: Path, tmp_path: Path, unbroken: Outcome
) -> None:
    dice = random.Random(8)
    kills, attempt = 0, 0
    while kills < NUM_KILLS:
        attempt += 1
        with swarm(tmp_path / str(attempt), model) as run:
            run.train()
            workers = [run.worker(faults=SLOW), run.worker(faults=SLOW)]
            while run.trainer.is_alive and kills < NUM_KILLS:
                time.sleep(dice.uniform(0.05, 1.5))
                index = dice.randrange(2)
                workers[index].kill()
                kills += 1
                workers[index] = run.worker(faults=SLOW)
            assert_as_if_nothing_was(run, unbroken)


def test_a_worker_that_joins_late_finds_the_base_model_of_adapters(model: Path, tmp_path: Path) -> None:
    with swarm(tmp_path, model, lora__rank=4) as run:
        run.train()
        first = run.joined(faults=SLOW)
        run.await_step(2)
        run.joined()
        run.await_status("it to serve an adapter", lambda s: (w := worker_of(s, 1)) and w.version)
        first.kill()
        run.finish()
        rows = [row for row in read_metrics(run.run.path) if "swarm/version_bytes" in row]
        assert all(row["swarm/version_bytes"] < 20_000 for row in rows), "adapters travel, not models"


# ---- the hub ---------------------------------------------------------------------------------------------------------


def test_local_workers_end_with_a_hub_that_is_killed(model: Path, tmp_path: Path) -> None:
    with swarm(tmp_path, model) as run:
        run.train(local_workers=1)
        run.await_status("the local worker", lambda s: worker_of(s, 0))
        pids = children_of(run.trainer.pid)
        assert pids
        run.trainer.kill()
        await_("the local worker to end", lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def children_of(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


# ---- weights ---------------------------------------------------------------------------------------------------------


def test_damaged_weights_are_never_served_and_their_source_is_named(
    model: Path, tmp_path: Path, unbroken: Outcome
) -> None:
    """Truncated, flipped, swapped and omitted, a version each; the old one serves until the bytes are right."""
    seen: dict[str, bytes] = {}

    def flipped(path: str, body: bytes) -> bytes:
        return body[:-1] + bytes([body[-1] ^ 1])

    def swapped(path: str, body: bytes) -> bytes:
        return next(other for name, other in seen.items() if name != path)

    def noted(path: str, body: bytes) -> bytes:
        return seen.setdefault(path, body)

    with swarm(tmp_path, model) as run:
        run.train()
        between = Meddler(run.port)
        between.meddling.tamper = noted
        try:
            worker = run.joined(url=between.url)
            faults = []
            for version, tamper in enumerate((None, flipped, swapped, lambda path, body: None), 1):
                run.await_status(
                    "the version before", lambda s, v=version: (w := worker_of(s, 0)) and w.version == v - 1
                )
                between.meddling = type(between.meddling)(tamper, truncate=tamper is None)
                status = run.await_status("a fault", lambda s: (w := worker_of(s, 0)) and w.fault)
                found = worker_of(status, 0)
                assert found is not None
                assert found.version == status.version - 1, "what it had serves on"
                assert between.url in found.fault
                faults.append(found.fault)
                between.meddling = type(between.meddling)(noted)
            assert_as_if_nothing_was(run, unbroken)
            assert "have another digest" in faults[1]
            assert "404" in faults[3]
            assert worker.said().count("could not be fetched") >= 4
        finally:
            between.close()


# ---- long runs -------------------------------------------------------------------------------------------------------


def test_many_refreshes_leave_disk_memory_and_open_files_as_they_were(model: Path, tmp_path: Path) -> None:
    """One trajectory a step, a version each; the first third is for caches to fill."""
    shape = {"rollout__batch_groups": 1, "rollout__group_size": 2, "rollout__max_new_tokens": 2}
    steps = {"run__steps": NUM_REFRESHES, "checkpoint__every": max(20, NUM_REFRESHES // 4)}
    with swarm(tmp_path, model, **shape, **steps, engine__slots=8, weights__keep=3) as run:
        run.train()
        worker = run.joined()
        seen = []
        for step in (NUM_REFRESHES // 3, NUM_REFRESHES - 5):
            run.await_step(step)
            store = [path.stat().st_size for path in sorted((run.directory / "r/weights").rglob("*")) if exists(path)]
            processes = (run.trainer, worker)
            seen.append(
                {
                    "files": len(store),
                    "bytes": sum(store),
                    **{f"fds of {child.name}": child.open_files() for child in processes},
                    **{f"memory of {child.name}": child.resident_bytes() for child in processes},
                }
            )
        run.finish()
        served = len(re.findall(r"version \d+ could not", worker.said()))
    print(NUM_REFRESHES, "refreshes:", seen)
    early, late = seen
    assert served == 0
    for name, value in early.items():
        room = {"files": 64, "bytes": 2e6, "fds": 8, "memory": 30e6 + 4e3 * NUM_REFRESHES}[name.split()[0]]
        assert late[name] <= value + room, f"{name}: {value} after a third, {late[name]} at the end"


def exists(path: Path) -> bool:
    """Collected between being listed and being looked at, or not."""
    return path.is_file()


# ---- TLS -------------------------------------------------------------------------------------------------------------


def self_signed(directory: Path, name: str) -> dict[str, str]:
    """Make a certificate for a name; return the keys of a recipe that say where it is."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the program openssl to make certificates")
    made = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1"]
    named = ["-subj", "/CN=hub", "-addext", f"subjectAltName={name}"]
    key, certificate = directory / "hub.key", directory / "hub.pem"
    command = ["openssl", *made, *named, "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return {"swarm__certificate": str(certificate), "swarm__key": str(key)}


def test_a_run_over_tls_is_the_run_without_it(model: Path, tmp_path: Path, unbroken: Outcome) -> None:
    tls = self_signed(tmp_path, "IP:127.0.0.1")
    with swarm(tmp_path, model, **tls) as run:
        run.trainer = run._child("trainer", ["train", str(run.recipe), "--serve", "127.0.0.1:0"], None)
        url = run.trainer.await_said(r"the hub listens at (https://127\.0\.0\.1:\d+)")
        worker = run.worker("--ca", tls["swarm__certificate"], url=url)
        run.finish()
        assert_as_if_nothing_was(run, unbroken)
        assert "Traceback" not in run.trainer.said() + worker.said()
        assert "the run is complete" in worker.said()


@pytest.mark.parametrize("is_tls", [False, True])
def test_a_runs_own_workers_reach_a_hub_that_listens_everywhere(model: Path, tmp_path: Path, is_tls: bool) -> None:
    """Its certificate names another host, and nobody vouches for it."""
    changes = self_signed(tmp_path, "DNS:hub.example.org") if is_tls else {"swarm__insecure": True}
    with swarm(tmp_path, model, run__steps=1, **changes) as run:
        arguments = ["train", str(run.recipe), "--serve", "0.0.0.0:0", "--workers", "1"]
        run.trainer = run._child("trainer", arguments, None)
        run.trainer.await_said("#0 joined: ")
        run.finish()
