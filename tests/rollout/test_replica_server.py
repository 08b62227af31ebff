"""What a replica's process does with its first message: vLLM on one machine, or on the first of several, or workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from baton.errors import EngineFault, Fault
from baton.rollout.engine import EngineSettings
from baton.rollout.engines.vllm import remote
from baton.rollout.engines.vllm.remote import CHECK, CallWorkers, Done, ReplicaServer, encode
from baton.rollout.processes.protocol import Start
from baton.types import PolicyVersion


def start(**arguments: Any) -> Start:
    settings = EngineSettings(kind="vllm").model_dump()
    settings["vllm"]["arguments"] = arguments
    return Start("m", "cpu", "sdpa", settings, PolicyVersion("run", 0))


def answer(data: bytes) -> Any:
    return msgspec.msgpack.decode(data, type=Done | Fault)


def test_vllm_reports_processes_that_a_signal_has_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    client = SimpleNamespace(detect_stops=lambda: calls.append("detect"), check=lambda: calls.append("check"))
    monkeypatch.setattr(remote, "vllm_of_model", lambda *_, **__: SimpleNamespace(client=client))
    server = ReplicaServer()
    assert answer(server.handle(encode(start()))) == Done()
    assert answer(server.handle(CHECK)) == Done()
    assert calls == ["detect", "check"]


def test_a_further_machine_starts_only_workers_which_meet_the_others_at_the_port_of_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without `node_rank`, or with 0, the same message starts an engine."""
    made: list[tuple[str, dict[str, Any]]] = []

    def build(kind: str) -> Any:
        def made_of(path: str, settings: EngineSettings, *_: Any, **__: Any) -> Any:
            made.append((kind, settings.vllm.arguments))
            return SimpleNamespace(client=SimpleNamespace(detect_stops=lambda: None), check=failed)

        return made_of

    def failed() -> None:
        raise EngineFault("a worker of vLLM has exited")

    monkeypatch.setattr(remote, "vllm_of_model", build("engine"))
    monkeypatch.setattr(remote, "vllm_workers_of_model", build("workers"))
    first, further = ReplicaServer(), ReplicaServer()
    node = {"nnodes": 2, "master_addr": "127.0.0.1"}
    port = first.free_port("127.0.0.1")
    first.handle(encode(start(node_rank=0, **node)), port)
    further.handle(encode(start(node_rank=1, **node)), port)
    assert made == [
        ("engine", {**node, "node_rank": 0, "master_port": port}),
        ("workers", {**node, "node_rank": 1, "master_port": port}),
    ]
    assert answer(further.handle(CHECK)).text == "a worker of vLLM has exited"
    assert isinstance(answer(further.handle(encode(CallWorkers("update_weights")))), Fault), "the first machine calls"


@pytest.mark.parametrize("data", [b"", b"\x81\xa4type\xa4None", b"\x81\xa4\xff\xff\xff\xff\x01"])
def test_an_answer_that_cannot_be_decoded_is_a_fault_of_the_engine(data: bytes) -> None:
    class Replica(remote.RemoteReplica):
        def send(self, message: bytes, timeout_s: float) -> bytes:
            return data

    replica = Replica("replica 0", start())
    with pytest.raises(EngineFault, match="replica 0 sent a malformed answer"):
        replica.call_workers("update_weights", None, 1.0)
