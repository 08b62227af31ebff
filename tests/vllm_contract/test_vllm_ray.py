"""Real vLLM engines in actors on two nodes of a Ray cluster, which receive weights directly, over gloo, on a CPU."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("ray")
sys.path.insert(0, str(Path(__file__).parents[1] / "cluster"))

from plans import plan_of, replica, stage
from test_ray_run import Nodes
from test_vllm_death import vllms
from test_vllm_runs import DEADLINE_S, EAGER, assert_trained_on_its_own_tokens, baton, end, read_metrics, written

from baton.specs.plan import write_plan

NUM_STEPS = 8


def cores(pid: int) -> list[int]:
    return sorted(pid for pid, name in vllms(pid).items() if name.startswith("VLLM::EngineCore"))


def test_a_run_sends_its_versions_to_two_vllms_on_other_nodes_and_outlives_the_core_of_one(tmp_path):
    """The trainer's probabilities tell stale weights at once. The new vLLM loads a whole version before it serves."""
    nodes = Nodes()
    try:
        (head,) = (machine.name for machine in nodes.machines())
        a, b = nodes.add(), nodes.add()
        engines = [replica("CPU", f"{a}:0", share=0.5), replica("CPU", f"{b}:0", share=0.5)]
        write_plan(plan_of([stage("CPU", f"{head}:0")], engines), tmp_path / "plan.json")
        own = {**EAGER, "answer_timeout_s": 60.0}
        recipe = written(tmp_path, engine__kind="vllm", engine__vllm=own, weights__transport="direct")
        log = tmp_path / "log"
        plan = ("--plan", str(tmp_path / "plan.json"), "--ray", nodes.address)
        run = baton(log, "train", str(recipe), *plan, f"run.steps={NUM_STEPS}")
        until_s = time.monotonic() + DEADLINE_S
        try:
            while not (tmp_path / "r").exists() or len(read_metrics(tmp_path / "r")) < 2:
                assert run.poll() is None, log.read_text(errors="replace")[-3000:]
                assert time.monotonic() < until_s, log.read_text(errors="replace")[-3000:]
                time.sleep(0.1)
            found = cores(os.getpid())
            assert len(found) == 2
            os.kill(found[0], signal.SIGKILL)
            end(run, log)
        finally:
            run.kill()
        while vllms(os.getpid()):
            assert time.monotonic() < until_s + DEADLINE_S, vllms(os.getpid())
            time.sleep(0.1)
    finally:
        nodes.cluster.shutdown()
    said = log.read_text(errors="replace")
    assert said.count("receives weights directly") == 3
    assert "the core of the vLLM engine has exited" in said
    assert not list((tmp_path / "r").rglob("weights/*"))
    assert_trained_on_its_own_tokens(tmp_path, NUM_STEPS)
