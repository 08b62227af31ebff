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
from test_vllm_runs import DEADLINE_S, EAGER, assert_trained_on_its_own_tokens, baton, read_metrics, written

from baton.specs.plan import write_plan


def cores(pid: int) -> list[int]:
    return sorted(pid for pid, name in vllms(pid).items() if name.startswith("VLLM::EngineCore"))


@pytest.mark.parametrize(
    ("number", "transport"), [(signal.SIGKILL, "direct"), (signal.SIGSTOP, "direct"), (signal.SIGKILL, "sparse")]
)
def test_a_run_sends_its_versions_to_two_vllms_on_other_nodes_and_outlives_the_core_of_one(number, transport, tmp_path):
    """The trainer's probabilities tell stale weights at once. The new vLLM loads a whole version before it serves."""
    said = trained(tmp_path, ["a", "b"], cores, number, transport=transport)
    if transport == "sparse":
        rows = read_metrics(tmp_path / "r")
        sent = sorted(row["perf/weights_sent_bytes"] for row in rows if "perf/weights_sent_bytes" in row)
        assert 0 < sent[len(sent) // 2] < sent[-1], "most steps send differences, and the first a whole version"
    assert ("the core of the vLLM engine has exited" in said) == (number == signal.SIGKILL)
    assert ("a signal has stopped process" in said) == (number == signal.SIGSTOP)


@pytest.mark.parametrize(
    ("tp", "number"), [(1, signal.SIGSTOP), (2, signal.SIGKILL)], ids=["pipeline parallel", "tensor parallel"]
)
def test_a_vllm_on_two_nodes_is_replaced_on_both_when_a_worker_of_the_second_dies_or_stops(tp, number, tmp_path):
    """Each of the two workers has half of the model and receives every version."""
    said = trained(tmp_path, ["ab", "c"], further_workers, number, tp=tp)
    assert "replica 0 has failed: worker-0 on " in said


def further_workers(pid: int) -> list[int]:
    """The workers whose parent is an actor and no core of vLLM."""
    import psutil

    workers = [number for number, name in vllms(pid).items() if name.startswith("VLLM::Worker")]
    return [number for number in workers if psutil.Process(number).ppid() not in cores(pid)]


def trained(tmp_path, shapes, victims, number, *, tp: int = 1, transport: str = "direct") -> str:
    """Train, with two replicas on other nodes, send a signal to the first of `victims` after two steps, and end the run
    when both replicas serve versions again. shapes: a letter for each node of each replica. Return what the run said.
    """
    nodes = Nodes()
    try:
        (head,) = (machine.name for machine in nodes.machines())
        ids = [tuple(f"{nodes.add()}:0" for _ in shape) for shape in shapes]
        engines = [replica("CPU", *own, share=0.5, tp=min(tp, len(own))) for own in ids]
        write_plan(plan_of([stage("CPU", f"{head}:0")], engines), tmp_path / "plan.json")
        # without compilation, vLLM's CPU build skips the pass that makes the buffers between pipeline stages
        is_pipeline = any(len(shape) > tp for shape in shapes)
        own = {**EAGER, "enforce_eager": not is_pipeline, "answer_timeout_s": 60.0}
        recipe = written(tmp_path, engine__kind="vllm", engine__vllm=own, weights__transport=transport)
        log = tmp_path / "log"
        plan = ("--plan", str(tmp_path / "plan.json"), "--ray", nodes.address)
        run = baton(log, "train", str(recipe), *plan, "run.steps=10000")
        until_s = time.monotonic() + DEADLINE_S

        def await_version(versions: dict[str, float]) -> dict[str, float]:
            """Wait until each replica has served a later version, and return the last versions."""
            while True:
                rows = list(read_metrics(tmp_path / "r")) if (tmp_path / "r").exists() else []
                found = {key: row[key] for row in rows for key in versions if key in row}
                if len(rows) > 2 and all(found.get(key, 0) > number for key, number in versions.items()):
                    return found
                assert run.poll() is None, log.read_text(errors="replace")[-3000:]
                assert time.monotonic() < until_s, log.read_text(errors="replace")[-3000:]
                time.sleep(0.1)

        try:
            served = await_version({"replicas/0/version": 0.0, "replicas/1/version": 0.0})
            assert len(cores(os.getpid())) == 2
            os.kill(victims(os.getpid())[0], number)
            until_s += DEADLINE_S
            # a load that had begun before the signal may still end
            await_version({key: version + 1 for key, version in served.items()})
        finally:
            run.kill()
        while vllms(os.getpid()):
            assert time.monotonic() < until_s + DEADLINE_S, vllms(os.getpid())
            time.sleep(0.1)
    finally:
        nodes.cluster.shutdown()
    said = log.read_text(errors="replace")
    assert said.count("receives weights directly") == 3
    assert not list((tmp_path / "r").rglob("weights/*"))
    assert_trained_on_its_own_tokens(tmp_path, None)
    return said
