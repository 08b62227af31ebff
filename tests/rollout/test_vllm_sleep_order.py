"""The order of sleep, wake and load, through a fake of vLLM's core with the rules of vLLM 0.32's source: what frees
memory has never run with Baton, because vLLM's CPU build frees none."""

from __future__ import annotations

import asyncio
import errno
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open

from baton.errors import EngineFault
from baton.rollout.engine import EngineSettings
from baton.rollout.engines.vllm import engine as vllm_engine
from baton.rollout.engines.vllm.client import VllmClient
from baton.rollout.engines.vllm.engine import VllmEngine
from baton.rollout.engines.whole_weights import WholeWeights
from baton.run.device_sharing import DeviceOwner, DeviceSharing
from baton.trainer.parallel import messages
from baton.trainer.parallel.ranked_trainer import RankedTrainer
from baton.types import Lease, PolicyVersion, SamplingParams, Trajectory

GPU = 100
"""Memory of the pretended GPU. The engine's weights take 30, its KV cache 60, the trainer 70 when it is awake."""


class FakeCore:
    """AsyncLLM: scheduler, executor and allocator of vLLM 0.32 (`EngineCore.sleep`, `Executor.wake_up`)."""

    errored = False
    output_handler = None

    def __init__(self) -> None:
        self.asleep: set[str] = set()
        self.is_paused = False
        self.weights: str | None = "start"
        """Label of the loaded weights; None if the memory has no content."""
        self.kept: str | None = None
        """Content of the weights in host memory (level 1)."""
        self.calls: list[str] = []
        self.peak = self.trainer = 0
        self.fails = False

    @property
    def held(self) -> int:
        return 30 * ("weights" not in self.asleep) + 60 * ("kv_cache" not in self.asleep)

    def used(self) -> None:
        self.peak = max(self.peak, self.held + self.trainer)
        assert self.held + self.trainer <= GPU, f"engine {self.held} and trainer {self.trainer} at the same time"

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        self.calls.append(f"sleep {level}")
        self.is_paused = True
        if "weights" in self.asleep:
            return  # "Executor is already sleeping."
        self.kept, self.weights = self.weights if level == 1 else None, None
        self.asleep = {"weights", "kv_cache"}

    async def wake_up(self, tags: list[str]) -> bool:
        self.calls.append(f"wake {tags[0]}")
        assert set(tags) <= self.asleep, f"vLLM ignores wake_up({tags}): only {self.asleep} sleep"
        self.asleep -= set(tags)
        if "weights" in tags:
            self.weights = self.kept
        self.used()
        if not self.asleep:
            self.is_paused = False
        return not self.asleep

    async def pause_generation(self, mode: str, clear_cache: bool) -> None:
        self.is_paused = True

    async def resume_generation(self) -> None:
        self.loop = asyncio.get_running_loop()
        assert not self.asleep, "the scheduler would run without memory for the KV cache"
        assert self.weights is not None, "the scheduler would run with weights without content"
        self.is_paused = False

    async def update_weight_version(self, label: str) -> None: ...

    async def add_lora(self, request: Any) -> None:
        self.calls.append("adapter")
        assert self.weights is not None, "an adapter needs its base weights"
        if self.fails:
            raise RuntimeError("no layer was loaded")

    async def collective_rpc(self, name: str, args: Any = ()) -> list[Any]:
        if name == "held_bytes":
            return [self.held]
        self.calls.append("load")
        assert "weights" not in self.asleep, "weights are written into memory that is not allocated"
        self.used()
        if self.fails:
            raise RuntimeError("no layer was loaded")
        with safe_open(args[0], framework="pt") as file:
            self.weights = "loaded"
            return [len(file.keys())]

    def shutdown(self, timeout_s: float) -> None:
        if self.fails:
            raise RuntimeError("the core has exited")


class Trainer:
    """A trainer that takes 70 of the GPU's memory when it is awake."""

    def __init__(self, core: FakeCore) -> None:
        self.core = core

    def sleep(self) -> None:
        self.core.trainer = 0

    def wake_up(self) -> None:
        self.core.trainer = 70
        self.core.used()

    @property
    def held_bytes(self) -> int:
        return self.core.trainer

    def take_peak_bytes(self) -> int:
        return 70  # of the trainer's own process


class Ranks:
    """Two ranks, each of which takes 70 of its GPU's memory when it is awake. vLLM takes the same on both GPUs."""

    size = 2

    def __init__(self, core: FakeCore) -> None:
        self.core, self.held = core, [0, 0]

    def ask(self, message: messages.ToRank, timeout_s: float) -> list[messages.FromRank]:
        match message:
            case messages.UseDevice(is_awake=is_awake):
                for rank in range(self.size):  # one after the other
                    self.held[rank] = self.held[rank] if is_awake is None else 70 * is_awake
                    self.core.trainer = max(self.held)
                    self.core.used()
                return [messages.DeviceMemory(held, 70) for held in self.held]
            case messages.Listen():
                return [messages.Listening("", 0)] * self.size
            case _:
                return [messages.Ready(PolicyVersion("r", 0))] * self.size

    def bring(self, path: str) -> Path:
        raise NotImplementedError

    def close(self) -> None: ...


def one_process(core: FakeCore) -> DeviceOwner:
    return Trainer(core)


def two_ranks(core: FakeCore) -> DeviceOwner:
    plain: dict[str, Any] = dict.fromkeys(messages.TrainerSetup.__struct_fields__)
    setup = messages.TrainerSetup(**{**plain, "version": PolicyVersion("r", 0)})
    return RankedTrainer(Ranks(core), setup, 30.0)


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> FakeCore:
    fake = FakeCore()
    made = SimpleNamespace(from_engine_args=lambda arguments: fake)
    modules: dict[str, dict[str, Any]] = {
        "vllm": {"AsyncEngineArgs": SimpleNamespace},
        "vllm.lora": {},
        "vllm.lora.request": {"LoRARequest": lambda *given, **named: given},
        "vllm.v1": {},
        "vllm.v1.engine": {},
        "vllm.v1.engine.async_llm": {"AsyncLLM": made},
    }
    for name, attributes in modules.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(WholeWeights, "whole", lambda self, tensors: dict(tensors))
    monkeypatch.setattr(WholeWeights, "check_adapter", lambda self, tensors: None)
    monkeypatch.setattr(vllm_engine, "is_adapter", lambda tensors: any("lora" in name for name in tensors))
    monkeypatch.setattr(
        vllm_engine, "write_adapter", lambda tensors, directory: (Path(directory) / "adapter").write_text("")
    )
    return fake


@pytest.fixture(params=[False, True], ids=["whole versions", "adapters"])
def adapters(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def engine(adapters: bool, core: FakeCore) -> Iterator[VllmEngine]:
    settings = EngineSettings(kind="vllm", slots=8, max_context_tokens=32, vllm={"lora_rank": 8 * adapters})
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=64))
    model = SimpleNamespace(config=config, state_dict=lambda keep_vars: {})
    skeleton: Any = SimpleNamespace(model=model, end_ids=(1,), text=str)

    made = VllmEngine(VllmClient({}, answer_timeout_s=30.0), skeleton, None, settings, PolicyVersion("r", 0))
    yield made
    made.close()


@pytest.fixture
def tensors(adapters: bool) -> dict[str, torch.Tensor]:
    return {"lora_A" if adapters else "weight": torch.zeros(2)}


@pytest.mark.parametrize("trainer", [one_process, two_ranks])
def test_engine_and_trainer_never_hold_the_gpu_together_and_the_engine_serves_only_what_it_has_loaded(
    trainer: Callable[[FakeCore], DeviceOwner],
    engine: VllmEngine,
    core: FakeCore,
    tensors: dict[str, torch.Tensor],
    adapters: bool,
) -> None:
    """Every rule of the fake core is an assertion: memory, order, and content of the weights."""
    turns = DeviceSharing(engine, trainer(core))
    load = "adapter" if adapters else "load"
    engine.load_weights(tensors, PolicyVersion("r", 1))
    assert core.calls == [load], "an engine that has not slept is not woken up"
    for number in (2, 3):
        core.calls.clear()
        turns.to_trainer()
        turns.to_trainer()
        assert (core.held, core.is_paused) == (0, True)
        turns.to_engine()
        turns.to_engine()
        assert core.asleep == {"kv_cache"}, "the load may use the memory of the KV cache"
        engine.load_weights(tensors, PolicyVersion("r", number))
        assert core.calls == [f"sleep {1 if adapters else 2}", "wake weights", load, "wake kv_cache"]
        assert (core.asleep, core.is_paused) == (set(), False)
        values = turns.metrics()
        assert (values["memory/engine_bytes"], values["memory/trainer_bytes"]) == (90, 70)
        assert values["memory/peak_bytes"] == core.peak == 90


def test_an_engine_without_weights_neither_generates_nor_loads_before_it_wakes(
    engine: VllmEngine, tensors: dict[str, torch.Tensor]
) -> None:
    engine.sleep()
    with pytest.raises(AssertionError, match="sleeping engine"):
        engine.load_weights(tensors, PolicyVersion("r", 1))
    engine.wake_up()
    engine.submit(Lease(1, Trajectory(0, 0, (5, 6)), SamplingParams(4), 0, 0))
    with pytest.raises(AssertionError, match="needs weights"):
        engine.step()
    with pytest.raises(AssertionError, match="with 1 leases"):
        engine.sleep()


def test_after_a_load_that_failed_the_engine_stays_paused_and_the_next_load_serves(
    engine: VllmEngine, core: FakeCore, tensors: dict[str, torch.Tensor], adapters: bool
) -> None:
    engine.sleep()
    engine.wake_up()
    core.fails = True
    with pytest.raises(EngineFault, match="no layer was loaded"):
        engine.load_weights(tensors, PolicyVersion("r", 1))
    assert (core.is_paused, core.asleep) == (True, {"kv_cache"})
    core.fails = False
    engine.load_weights(tensors, PolicyVersion("r", 1))
    assert (core.is_paused, core.asleep, core.weights) == (False, set(), "start" if adapters else "loaded")


def test_a_full_file_system_in_memory_is_reported_as_a_full_disk(
    engine: VllmEngine, tensors: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """safetensors raises an error of its own, which names no file."""

    def write(*_: Any) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(vllm_engine, "save_file", write)
    monkeypatch.setattr(vllm_engine, "write_adapter", write)
    with pytest.raises(OSError, match="No space left") as full:
        engine.load_weights(tensors, PolicyVersion("r", 1))
    assert full.value.errno == errno.ENOSPC
    assert Path(full.value.filename).is_absolute()


@pytest.mark.parametrize("fails", [False, True])
def test_a_closed_client_has_no_event_loop(fails: bool, core: FakeCore) -> None:
    """An open loop keeps a selector and two sockets."""
    client = VllmClient({}, answer_timeout_s=30.0)
    client.resume()
    core.fails = fails
    client.close()
    client.close()
    assert core.loop.is_closed()
