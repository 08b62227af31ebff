"""vLLM's processes end if the start fails after they have started, or if a transfer of weights cannot be closed. The
client and vLLM are fakes."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from baton.errors import EngineFault
from baton.policy.settings import ModelSettings
from baton.rollout.engine import EngineSettings
from baton.rollout.engines.vllm import engine as vllm_engine
from baton.rollout.engines.vllm.engine import VllmEngine, vllm_of_model
from baton.types import PolicyVersion
from baton.weights.direct.settings import DirectTransfer


class Client:
    num_closed = 0

    def detect_stops(self) -> None:
        raise EngineFault("the core has no process")

    def close(self) -> None:
        self.num_closed += 1


def test_an_engine_that_cannot_receive_weights_directly_ends(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    vllm, platforms, client = ModuleType("vllm"), ModuleType("vllm.platforms"), Client()
    vllm.__spec__ = ModuleSpec("vllm", None)
    platforms.current_platform = SimpleNamespace(  # type: ignore[attr-defined]
        is_cpu=lambda: False, is_cuda_alike=lambda: True
    )
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    monkeypatch.setattr(vllm_engine, "set_up_environment", lambda: None)
    monkeypatch.setattr(vllm_engine, "VllmClient", lambda *_, **__: client)
    sender = SimpleNamespace(join=lambda *_: None, leave=lambda *_: None)
    versions: Any = SimpleNamespace(sender=sender)
    with pytest.raises(EngineFault, match="the core has no process"):
        vllm_of_model(
            ModelSettings(path=str(small.model), device="cuda"),
            EngineSettings(kind="vllm"),
            PolicyVersion("a", 0),
            direct=DirectTransfer("gloo", versions=versions),
        )
    assert client.num_closed == 1


def test_an_engine_whose_transfer_of_weights_cannot_be_closed_ends() -> None:
    def fail() -> None:
        raise RuntimeError("can't start new thread")

    client: Any = Client()
    skeleton: Any = SimpleNamespace(model=SimpleNamespace(state_dict=lambda keep_vars: {}), end_ids=(1,), text=str)
    engine = VllmEngine(client, skeleton, None, EngineSettings(kind="vllm"), PolicyVersion("a", 0))
    engine.direct = SimpleNamespace(close=fail)  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="new thread"):
        engine.close()
    assert client.num_closed == 1
