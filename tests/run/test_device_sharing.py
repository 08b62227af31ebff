"""One device for engine and trainer in turn: the bits of two devices, the memory of the larger."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from baton.console import Console
from baton.errors import EngineFault, UserError
from baton.recipe.load import load_recipe
from baton.recipe.recipe import Recipe
from baton.records.metrics import read_metrics
from baton.records.run_directory import RunDirectory
from baton.rollout import transport
from baton.rollout.engines.embedded.engine import EmbeddedEngine
from baton.rollout.transport import LocalTransport
from baton.run.assemble import build_loop
from baton.run.device_sharing import DeviceSharing
from baton.run.loop import Loop
from baton.stop import StopRequest
from baton.trainer.checkpoint import list_checkpoints
from baton.trainer.local_trainer import LocalTrainer
from baton.trainer.offload import Offload
from baton.types import PolicyVersion
from baton.views.terminal.progress import TerminalObserver
from tests.run.stopping import StopWhen

pytestmark = pytest.mark.numerics

COLOCATED = 'rollout.placement="colocated"'


@pytest.fixture(autouse=True)
def equal_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of the transport runs equally many steps, however slow the machine is."""
    monkeypatch.setattr(transport, "STEPS_S", 60.0)


PARTIAL = (
    'rollout.mode="partial"',
    "rollout.overprovision=2.0",
    "rollout.max_new_tokens=24",
    'reward=[{ kind = "format" }]',  # scored at once, unlike a function: the order of scores decides what is trained
    "algorithm.overlong_frac=0.9",
)
"""Judged in this process: when a batch is complete must not hang on another process's pace."""


def load(small: Any, directory: Path, *overrides: str) -> Recipe:
    return load_recipe(Recipe, small.recipe, [f"run.directory={directory}", *overrides])


def built(recipe: Recipe, *, resume: bool = False, stop: StopRequest | None = None) -> Loop:
    observer = TerminalObserver(Console(quiet=True), recipe.run.steps)
    return build_loop(recipe, observer, resume=resume, overwrite=False, stop=stop)


def train(recipe: Recipe, **how: Any) -> RunDirectory:
    loop = built(recipe, **how)
    try:
        loop.train()
    finally:
        loop.close()
    return loop.run


def weights_of(run: RunDirectory) -> dict[str, torch.Tensor]:
    checkpoint = list_checkpoints(run.checkpoints)[-1]
    return load_file(next(checkpoint.glob("*.safetensors")))


def assert_same_run(one: RunDirectory, other: RunDirectory) -> None:
    """Weights, tokens, logprobs, versions and judgements, bit by bit."""
    assert one.recorded_steps() == other.recorded_steps() != []
    for step in one.recorded_steps():
        ours, theirs = one.groups(step), other.groups(step)
        for a, b in zip(ours, theirs, strict=True):
            assert a.group_id == b.group_id
            assert [m.trajectory for m in a.members] == [m.trajectory for m in b.members]
            assert [m.judgement.reward for m in a.members] == [m.judgement.reward for m in b.members]
    mine, its = weights_of(one), weights_of(other)
    assert mine.keys() == its.keys()
    assert all(torch.equal(mine[name], its[name]) for name in mine)


@pytest.mark.parametrize("mode", [(), PARTIAL], ids=["sync", "partial"])
def test_taking_turns_changes_no_bit(small: Any, tmp_path: Path, mode: tuple[str, ...]) -> None:
    """In partial some trajectories are put down before the engine rests, and carried on after it woke."""
    separate = train(load(small, tmp_path / "separate", *mode))
    colocated = train(load(small, tmp_path / "colocated", COLOCATED, *mode))
    assert_same_run(separate, colocated)
    if mode:
        members = [
            m.trajectory for step in colocated.recorded_steps() for g in colocated.groups(step) for m in g.members
        ]
        assert any(len({s.policy_version for s in t.segments}) > 1 for t in members), "one outlived a turn"
    rows = [row for row in read_metrics(colocated.path) if "memory/peak_bytes" in row]
    assert len(rows) == 3
    for row in rows:
        assert row["memory/peak_bytes"] < row["memory/engine_bytes"] + row["memory/trainer_bytes"]
        assert row["time/turns"] > 0
    assert not any("memory/peak_bytes" in row for row in read_metrics(separate.path))


def test_a_run_with_adapters_takes_turns_with_the_same_bits(small: Any, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    lora = ("lora.rank=2",)
    separate = train(load(small, tmp_path / "separate", *lora))
    assert_same_run(separate, train(load(small, tmp_path / "colocated", COLOCATED, *lora)))


@pytest.mark.parametrize("placement", ["separate", "colocated"])
def test_a_stopped_run_goes_on_to_the_same_bits_in_either_placement(small: Any, tmp_path: Path, placement: str) -> None:
    """Optimiser and weights are restored into a trainer at rest."""
    whole = train(load(small, tmp_path / "whole", *PARTIAL))
    recipe = load(small, tmp_path / "stopped", COLOCATED, *PARTIAL)
    second = recipe.run.path / "trajectories/step_000002.jsonl.gz"
    stopped = train(recipe, stop=StopWhen(second.exists))
    assert len(stopped.recorded_steps()) < 3
    again = load(small, tmp_path / "stopped", f'rollout.placement="{placement}"', *PARTIAL)
    assert_same_run(whole, train(again, resume=True))


class Parts:
    """A built loop, its engine and its trainer."""

    def __init__(self, loop: Loop) -> None:
        assert isinstance(loop.port, LocalTransport)
        assert isinstance(loop.port.engine, EmbeddedEngine)
        assert isinstance(loop.trainer, LocalTrainer)
        assert loop.sharing is not None
        self.loop, self.sharing, self.engine, self.trainer = loop, loop.sharing, loop.port.engine, loop.trainer


@pytest.fixture
def parts(small: Any, tmp_path: Path) -> Any:
    loop = built(load(small, tmp_path, COLOCATED))
    weights = loop.trainer.publish()
    loop.port.load_weights(weights.tensors, weights.version)
    yield Parts(loop)
    loop.close()


def live_bytes() -> int:
    """Of all tensors that anybody holds, memory that several share counted once."""
    gc.collect()
    tensors = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def test_an_engine_at_rest_holds_neither_weights_nor_slots(parts: Parts) -> None:
    """Counted over every live tensor of the process, not as the engine says."""
    before, held = live_bytes(), parts.engine.held_bytes
    config = parts.trainer.model.config
    slots = 2 * config.num_hidden_layers * 16 * 64 * config.num_key_value_heads * config.head_dim * 4
    weights = 4 * sum(p.numel() for p in parts.trainer.model.parameters())
    assert held >= slots + weights
    assert held - slots - weights < 4096, "besides, there are only buffers of positions"
    parts.sharing.to_trainer()
    assert parts.engine.held_bytes < 4096
    assert before - live_bytes() == pytest.approx(slots + weights, abs=4096)
    parts.sharing.to_engine()
    assert parts.engine.held_bytes == held
    assert live_bytes() == pytest.approx(before, abs=4096)


def test_whoever_has_the_turn_keeps_it_and_leaving_twice_is_leaving_once(parts: Parts) -> None:
    parts.sharing.to_engine()
    held = parts.engine.held_bytes
    for _ in range(2):
        parts.sharing.to_trainer()
    for _ in range(2):
        parts.sharing.to_engine()
    assert parts.engine.held_bytes == held


def test_an_engine_that_has_rested_serves_nothing_before_it_has_weights(parts: Parts, small: Any) -> None:
    from baton.types import Lease, SamplingParams, Trajectory

    parts.sharing.to_trainer()
    with pytest.raises(AssertionError, match="sleeping engine"):
        parts.engine.load_weights(dict(parts.trainer.publish().tensors), parts.engine.version)
    parts.sharing.to_engine()
    parts.engine.submit(Lease(1, Trajectory(0, 0, (5, 6)), SamplingParams(4), 0, 0))
    with pytest.raises(AssertionError, match="needs weights"):
        parts.engine.step()
    with pytest.raises(AssertionError, match="with 1 leases"):
        parts.sharing.to_trainer()


def test_an_adapter_cannot_come_for_weights_that_were_given_back(parts: Parts) -> None:
    parts.sharing.to_trainer()
    parts.sharing.to_engine()
    pair = {"model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(2, 32)}
    pair["model.layers.0.self_attn.q_proj.lora_B.weight"] = torch.zeros(32, 2)
    with pytest.raises(EngineFault, match="needs a whole version"):
        parts.engine.load_weights(pair, PolicyVersion("run", 9))


def test_the_peak_is_the_most_that_both_held_at_one_turn() -> None:
    """By hand: engine 10; trainer 7 asleep (it has nowhere to go), 12 at work."""

    class One:
        def __init__(self, awake: int, resting: int) -> None:
            self.awake, self.resting, self.is_resting = awake, resting, False
            self.order: list[str] = []

        @property
        def held_bytes(self) -> int:
            return self.resting if self.is_resting else self.awake

        def sleep(self) -> None:
            self.is_resting = True

        def wake_up(self) -> None:
            self.is_resting = False

        def take_peak_bytes(self) -> None:
            return None

    engine, trainer = One(10, 0), One(12, 7)
    turns = DeviceSharing(engine, trainer)
    turns.metrics()
    turns.to_trainer()
    turns.to_engine()
    assert turns.metrics() == {"memory/engine_bytes": 10, "memory/trainer_bytes": 12, "memory/peak_bytes": 17}


def test_what_leaves_the_device_comes_back_with_the_same_bits_in_the_same_tensors() -> None:
    """With the exchange of memory that CUDA would need, on a CPU: two updates, with and without a turn between."""

    def updated(*, moves: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        body = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6))
        tied = torch.nn.Linear(6, 6)
        tied.weight = body[0].weight
        model = torch.nn.ModuleList([body, tied])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        offload = Offload(torch.device("cpu"), [model, model, None], [optimizer], moves=moves)
        inputs = torch.randn(4, 6)
        for _ in range(3):
            tied(body(inputs)).square().sum().backward()
            optimizer.step()
            assert offload.held_bytes > 0
            old = [t.untyped_storage() for t in model.parameters()]
            offload.sleep()
            offload.sleep()
            assert all((not storage.nbytes()) == moves for storage in old)
            assert all(p.grad is None for p in model.parameters())
            assert (offload.held_bytes == 0) == moves
            offload.wake_up()
            offload.wake_up()
            assert tied.weight is body[0].weight
        return [*model.parameters(), *model.buffers()]

    assert all(torch.equal(a, b) for a, b in zip(updated(moves=True), updated(moves=False), strict=True))


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc")
def test_a_trainer_that_sleeps_on_a_cpu_returns_the_memory_of_its_gradients() -> None:
    """Tensors below 32 MiB lie in glibc's heap, where each gradient is followed by a block that stays in use."""

    def anonymous_bytes() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

    torch.empty(31 * 2**20, dtype=torch.uint8)  # freed: from now on glibc takes smaller blocks from its heap
    model = torch.nn.ModuleList(torch.nn.Linear(1024, 2048) for _ in range(12))
    offload = Offload(torch.device("cpu"), [model], [torch.optim.SGD(model.parameters())])
    kept = []
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
        kept.append(torch.ones(2**18))
    before = anonymous_bytes()
    offload.sleep()
    assert before - anonymous_bytes() > 0.9 * 12 * 1024 * 2048 * 4


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (('rollout.mode="async"', "engine.processes=1"), 'placement: got "colocated", but mode = "async" generates'),
        (("engine.processes=2",), "with engine.processes or [swarm] engine and trainer are in different processes"),
        (("swarm.workers=2",), "with engine.processes or [swarm] engine and trainer are in different processes"),
    ],
)
def test_what_cannot_take_turns_is_refused_in_one_sentence(
    small: Any, tmp_path: Path, overrides: tuple[str, ...], sentence: str
) -> None:
    with pytest.raises(UserError, match="placement") as refused:
        load(small, tmp_path, COLOCATED, *overrides)
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_device_too_small_for_the_larger_turn_is_refused_before_anything_is_made(
    small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = load(small, tmp_path, COLOCATED)
    from baton.run.dry_run import footprint

    (needs,) = footprint(wanted).processes
    larger = needs.num_bytes
    apart = footprint(load(small, tmp_path)).processes[0].num_bytes
    assert larger < apart
    monkeypatch.setattr("baton.run.dry_run.available_bytes", lambda device: larger - 1)
    with pytest.raises(UserError, match=r"the trainer or the engine needs .*, but .* are free on cpu: with .* it fits"):
        built(wanted)
    assert not wanted.run.path.exists()
    monkeypatch.setattr("baton.run.dry_run.available_bytes", lambda device: larger)
    built(wanted).close()
