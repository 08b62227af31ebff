"""A plan whose replicas are SGLang servers, on a real Ray cluster: with servers that keep the contract of SGLang."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from plans import plan_of, replica, stage
from test_ray_run import QUICK, ROOT, Nodes, Witness, assert_nothing_is_left, loader, nodes, ray, written

from baton.errors import UserError
from baton.policy.settings import ModelSettings
from baton.records.metrics import read_metrics
from baton.rollout.engine import EngineSettings
from baton.rollout.engines.factory import engine_of_model
from baton.rollout.engines.sglang.client import ask_servers
from baton.rollout.engines.sglang.wire import ServerInfo
from baton.stop import StopRequest
from baton.types import PolicyVersion
from tests.rollout.sglang_server import SglangServer

pytestmark = [pytest.mark.timing, pytest.mark.slow, pytest.mark.timeout(900)]
__all__ = ["nodes", "ray"]


@pytest.fixture
def servers() -> Iterator[tuple[SglangServer, SglangServer]]:
    made = (server(), server())
    yield made
    for one in made:
        one.close()


def server() -> SglangServer:
    settings = EngineSettings(slots=16, max_context_tokens=192, dtype="float32")
    model, version = ModelSettings(path=str(ROOT / "models" / "quickstart"), device="cpu"), PolicyVersion("server", 0)
    made = SglangServer(engine_of_model(model, settings, version))  # type: ignore[arg-type]
    made.context_length, made.shape = 198, {"tp_size": 1, "pp_size": 1}
    return made


def test_servers_tell_their_shape_or_why_they_do_not_answer(servers: tuple[SglangServer, SglangServer]) -> None:
    old, new = servers
    old.key = "secret"
    new.shape = {"tp_size": 4}
    urls = [old.url, new.url + "/", "http://127.0.0.1:9"]
    first, second, third = ask_servers(urls, key="secret", timeout_s=20.0)
    assert first == ServerInfo(context_length=198, tp=1, pp=1)
    assert second == ServerInfo(context_length=198, tp=4, pp=None)
    assert "Cannot connect" in str(third)
    assert ask_servers(urls[:1], key=None, timeout_s=20.0) == ["HTTP 401"]


def test_a_plan_of_two_servers_on_one_machine_is_carried_out_and_another_shape_is_refused(
    nodes: Nodes, servers: tuple[SglangServer, SglangServer], tmp_path: Path
) -> None:
    from baton.cluster.ray.run import RayRun, train_on_ray

    a, b = nodes.add(gpu_type_H100=1), nodes.add(gpu_type_L20=2)
    replicas = [replica("L20", f"{b}:0", share=0.5), replica("L20", f"{b}:1", share=0.5)]
    plan = written(plan_of([stage("H100", f"{a}:0")], replicas), tmp_path)
    urls = [one.url for one in servers]
    load = loader(
        tmp_path,
        "run.steps=2",
        "engine.kind=sglang",
        f"engine.sglang.urls={urls}",
        "engine.dtype=float32",
        "trainer.dtype=float32",
        "trainer.metrics_of_all_tokens=true",  # all rewards of a step may be equal
    )
    servers[1].shape = {"tp_size": 2}
    with pytest.raises(UserError, match=f"{urls[1]} has tp 2, pp unknown, but the plan's replica on {b}:1 has tp 1"):
        train_on_ray(RayRun(load, plan, nodes.address, rules=QUICK), Witness(), StopRequest())
    assert not (tmp_path / "r").exists(), "refused before anything starts"
    servers[1].shape = {}
    for one in servers:  # on a busy machine, one server could generate both batches before the other loads a version
        one.may_generate = lambda: all(each.loaded for each in servers)
    witness = Witness()
    train_on_ray(RayRun(load, plan, nodes.address, rules=QUICK), witness, StopRequest())
    assert witness.steps == [1, 2]
    assert any(one.begun for one in servers)
    assert all(one.loaded for one in servers)
    assert max(len(one.loaded) for one in servers) >= 2, "the version of each step is loaded"
    rows = [row for row in read_metrics(tmp_path / "r") if "policy/logprob_diff_max" in row]
    assert len(rows) == 2
    assert all(row["policy/logprob_diff_max"] < 1e-2 for row in rows)
    for name in (a, b):
        nodes.remove(name)
    assert_nothing_is_left(nodes)
