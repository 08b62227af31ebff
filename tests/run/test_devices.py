"""Who uses which GPU, with a pretended number of GPUs: no GPU is needed."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig

from baton.errors import UserError
from baton.policy.settings import ModelSettings
from baton.recipe.load import load_recipe
from baton.recipe.recipe import Recipe
from baton.recipe.support import experimental_parts
from baton.run import assemble, dry_run
from baton.run.devices import (
    DeviceLayout,
    direct_transfer,
    divide,
    environment_with,
    layout_of,
    placed_rewards,
    visible,
)
from baton.run.memory import needed_bytes, processes_of
from baton.specs.model import read_model
from baton.swarm.listen import ListenAddress
from baton.swarm.local_workers import LocalWorkers
from baton.types import PolicyVersion
from baton.weights.direct.settings import DirectTransfer


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Any:
    def gpus(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        own = SimpleNamespace(total_memory=80 * 10**9)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: own)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return gpus


def recipe(small: Any, tmp_path: Path, *overrides: str) -> Recipe:
    return load_recipe(Recipe, small.recipe, [f"run.directory={tmp_path}", "model.device=cuda", *overrides])


@given(st.data())
def test_engines_get_gpus_of_their_own_while_there_are_enough(data: st.DataObject) -> None:
    num_gpus = data.draw(st.integers(1, 16))
    trainer = tuple(range(data.draw(st.integers(1, num_gpus))))
    each, engines = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 8))
    if each > num_gpus:
        with pytest.raises(UserError, match=f"got {each}, but {num_gpus} GPU"):
            divide(num_gpus, trainer, engines, each=each)
        return
    found = divide(num_gpus, trainer, engines, each=each)
    assert len(found) == engines
    assert all(len(set(gpus)) == each and set(gpus) <= set(range(num_gpus)) for gpus in found)
    free = num_gpus - len(trainer)
    if free >= each:  # nobody shares a GPU with a rank unasked
        assert not {gpu for gpus in found for gpu in gpus} & set(trainer)
    if free >= each * engines:
        assert len({gpu for gpus in found for gpu in gpus}) == each * engines
    loads = [sum(gpu in gpus for gpus in found) for gpu in {gpu for gpus in found for gpu in gpus}]
    assert max(loads, default=0) - min(loads, default=0) <= 1


RANKS_WITH_VLLM = ["trainer.ranks=2", "engine.kind=vllm", 'rollout.placement="colocated"']


@pytest.mark.parametrize(
    ("num_gpus", "overrides", "trainer", "engines"),
    [
        (1, [], (0,), ((0,),)),
        (2, [], (0,), ((1,),)),
        (2, ["model.device=cuda:1"], (1,), ((0,),)),
        (4, ["engine.devices=[3]"], (0,), ((3,),)),
        (4, ["engine.devices=[0]"], (0,), ((0,),)),
        (4, ['rollout.placement="colocated"'], (0,), ((0,),)),
        (4, ['rollout.placement="colocated"', "engine.kind=vllm", "model.device=cuda:3"], (3,), ((3,),)),
        (4, [*RANKS_WITH_VLLM, "engine.vllm.tensor_parallel=2"], (0, 1), ((0, 1),)),
        (4, ["trainer.ranks=2", "swarm.workers=2"], (0, 1), ((2,), (3,))),
        (4, ["trainer.ranks=2", "swarm.workers=3"], (0, 1), ((2,), (3,), (2,))),
        (2, ["trainer.ranks=2", "swarm.workers=2"], (0, 1), ((0,), (1,))),
        (8, ["engine.kind=vllm", "engine.vllm.tensor_parallel=2", "swarm.workers=3"], (0,), ((1, 2), (3, 4), (5, 6))),
        (8, ["engine.kind=vllm", "engine.vllm.tensor_parallel=4"], (0,), ((1, 2, 3, 4),)),
    ],
)
def test_the_gpus_of_a_run(
    num_gpus: int,
    overrides: list[str],
    trainer: tuple[int, ...],
    engines: tuple[tuple[int, ...], ...],
    small: Any,
    tmp_path: Path,
    pretend: Any,
) -> None:
    pretend(num_gpus)
    assert layout_of(recipe(small, tmp_path, *overrides)) == DeviceLayout(trainer, engines)


@pytest.mark.parametrize(
    ("num_gpus", "keys", "devices"),
    [
        (4, "", ("cuda:2",)),
        (2, "", ("cuda:1",)),
        (1, "", ("cuda:0",)),
        (4, ', devices = ["cuda:3", "cpu"]', ("cuda:3", "cpu")),
    ],
)
def test_a_reward_model_gets_a_gpu_that_is_left(
    num_gpus: int, keys: str, devices: tuple[str, ...], small: Any, tmp_path: Path, pretend: Any
) -> None:
    pretend(num_gpus)
    own = recipe(small, tmp_path, f'reward=[{{kind = "model", model = "m"{keys}}}, {{kind = "correct"}}]')
    assert (layout := layout_of(own)) is not None
    assert layout.rewards == (("model", devices),)
    assert [one.devices for one in placed_rewards(own, layout)] == [devices, ()]


@pytest.mark.parametrize(
    ("num_gpus", "overrides", "message"),
    [
        (
            2,
            ['reward=[{kind = "model", model = "m", devices = ["cuda:2"]}]'],
            r"\[\[reward\]\] 'model': devices: got cuda:2, but this machine has 2 visible GPU",
        ),
        (
            2,
            ["engine.devices=[2]"],
            r"engine.devices: got 2, but this machine has 2 visible GPU\(s\): allowed are 0 to 1",
        ),
        (2, ["model.device=cuda:2"], "model.device: got cuda:2, but this machine has 2"),
        (2, ["trainer.ranks=3"], "trainer.ranks: got 3, but this machine has 2"),
        (2, ["engine.devices=[1]", 'rollout.placement="colocated"'], "engine.devices: got .1., but with"),
        (4, ["engine.kind=vllm", "engine.vllm.tensor_parallel=2", "engine.devices=[3]"], "got 2, but 1 GPU"),
        (
            4,
            ["engine.kind=vllm", "engine.vllm.tensor_parallel=2", 'rollout.placement="colocated"'],
            "got 2, but with rollout.placement = .colocated. .* all GPUs of the trainer; set the product to 1",
        ),
        (4, RANKS_WITH_VLLM, "got 1, but with rollout.placement = .colocated. .* set the product to 2"),
        (0, ["model.device=cpu", "engine.devices=[0]"], "engine.devices: got .0., but model.device is cpu"),
    ],
)
def test_gpus_that_are_not_there_are_refused(
    num_gpus: int, overrides: list[str], message: str, small: Any, tmp_path: Path, pretend: Any
) -> None:
    pretend(num_gpus)
    with pytest.raises(UserError, match=message):
        layout_of(recipe(small, tmp_path, *overrides))


QWEN_7B = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "tie_word_embeddings": False,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
}
QWEN_14B = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "tie_word_embeddings": False,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}
QWEN_32B = {**QWEN_14B, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64}
ELSEWHERE = ["engine.kind=vllm", "swarm.serve=127.0.0.1:0"]
SHARDED = ["trainer.activation_checkpointing=true", "trainer.shard_gradients=true"]


@pytest.mark.parametrize(
    ("shape", "num_gpus", "free_gb", "overrides", "sentence"),
    [
        # 7.616e9 parameters: weights 4 P = 28.4 GiB, moments 8 P = 56.7 GiB. Activations of 8,192 tokens, per token and
        # layer 26 · 3584 + 10 · (3584 + 512) + 8 · 18944 bytes, and 16 · 3584 of the last norm: 61.5 GiB
        (
            QWEN_7B,
            1,
            24,
            [],
            r"with the engine needs 2.. GiB .*activations 61.5 GiB, moments 56.7 GiB, weights 28.4 GiB"
            r"\), but 22.4 GiB are free on cuda: no usual change of the recipe is enough: "
            r".* workers \(\[swarm\]\) on more",
        ),
        # frozen weights 2 P = 14.2 GiB; with checkpointing a token keeps 2 bytes of its input in each layer
        (
            QWEN_7B,
            1,
            24,
            ["lora.rank=16", *ELSEWHERE],
            r"frozen weights 14.2 GiB.*but 22.4 GiB are free on cuda: with "
            r"trainer.activation_checkpointing = true it fits",
        ),
        (QWEN_7B, 1, 24, ["lora.rank=16", "trainer.activation_checkpointing=true", *ELSEWHERE], None),
        # 14.768e9 parameters on 8 ranks: whole gradients 4 P = 55 GiB, moments P = 13.8 GiB
        (
            QWEN_14B,
            8,
            80,
            ["trainer.ranks=8", *ELSEWHERE],
            r"each of 8 trainer ranks needs 177 GiB .*gradients 55 GiB, "
            r"moments 13.8 GiB\), but 74.5 GiB .*with trainer.activation_checkpointing = true and "
            r"trainer.shard_gradients = true it fits",
        ),
        (QWEN_14B, 8, 80, ["trainer.ranks=8", *SHARDED, *ELSEWHERE], None),
        # 32.762e9 parameters on 16 ranks: whole gradients 122 GiB
        (
            QWEN_32B,
            16,
            80,
            ["trainer.ranks=16", *ELSEWHERE],
            r"each of 16 trainer ranks needs 352 GiB .*gradients 122 "
            r"GiB, moments 15.3 GiB\).*trainer.shard_gradients = true it fits",
        ),
        (QWEN_32B, 16, 80, ["trainer.ranks=16", *SHARDED, *ELSEWHERE], None),
        # weights and moments: 12 P = 366 GiB
        (
            QWEN_32B,
            16,
            80,
            ["trainer.ranks=16", *SHARDED, *ELSEWHERE, "checkpoint.background=true"],
            r"the unwritten checkpoint in host memory needs 366 GiB and the hub needs 122 GiB, but 279 GiB are free",
        ),
    ],
)
def test_the_sentence_for_a_large_model(
    shape: dict[str, Any],
    num_gpus: int,
    free_gb: int,
    overrides: list[str],
    sentence: str | None,
    small: Any,
    tmp_path: Path,
    pretend: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the dry run says, by the law: no GPU of this size is there."""
    pretend(num_gpus)
    (tmp_path / "config.json").write_text(json.dumps(shape))
    free = {"cuda": free_gb * 10**9, "cpu": 300 * 10**9}  # the hub checks reports with a 32B model in float32
    monkeypatch.setattr(dry_run, "available_bytes", lambda device: free[device.type])
    wanted = recipe(
        *(small, tmp_path, f"model.path={tmp_path}", "engine.max_context_tokens=4096", "rollout.max_new_tokens=2048"),
        *("trainer.max_tokens_per_microbatch=8192", "rollout.batch_groups=128", "rollout.group_size=8"),
        *("algorithm.num_minibatches=1", "engine.slots=64", *overrides),
    )
    if sentence is None:
        dry_run.check_room(wanted, is_here=True)
        return
    with pytest.raises(UserError, match=sentence):
        dry_run.check_room(wanted, is_here=True)


def test_a_build_for_rocm_is_a_platform_of_its_own(
    small: Any, tmp_path: Path, pretend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(1)
    config = AutoConfig.for_model("qwen3")
    assert dry_run.choices_with(recipe(small, tmp_path), config)["platform"] == ("cuda",)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    choices = dry_run.choices_with(recipe(small, tmp_path), config)
    assert choices["platform"] == ("rocm",)
    assert any("rocm" in part for part in experimental_parts(choices))


def test_an_index_counts_the_gpus_that_this_process_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible((1, 2)) == {"CUDA_VISIBLE_DEVICES": "1,2"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6, GPU-7f")
    assert visible((1,)) == {"CUDA_VISIBLE_DEVICES": "GPU-7f"}
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert visible((0,)) == {"CUDA_VISIBLE_DEVICES": "6"}  # the variable that the user set
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "4,5")
    assert visible((1,)) == {"HIP_VISIBLE_DEVICES": "5"}


def test_a_variable_is_set_only_while_processes_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_SET", "before")
    monkeypatch.delenv("BATON_UNSET", raising=False)
    with environment_with({"BATON_SET": "in", "BATON_UNSET": "in"}):
        assert os.environ["BATON_SET"] == os.environ["BATON_UNSET"] == "in"
    assert os.environ["BATON_SET"] == "before"
    assert "BATON_UNSET" not in os.environ


@pytest.mark.parametrize(
    ("kind", "device", "sees"), [("embedded", "cuda:1", None), ("vllm", "cuda", "1"), ("sglang", "cuda", None)]
)
def test_the_engine_of_the_trainers_process_has_another_gpu(
    kind: str, device: str, sees: str | None, small: Any, tmp_path: Path, pretend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(2)
    started = {}

    def engine_of_model(model: ModelSettings, *_: Any, **__: Any) -> None:
        started.update(device=model.device, sees=os.environ.get("CUDA_VISIBLE_DEVICES"))

    monkeypatch.setattr(assemble, "engine_of_model", engine_of_model)
    own = recipe(small, tmp_path, f"engine.kind={kind}")
    assemble.build_engine(own, PolicyVersion("x", 0), None)
    assert started == {"device": device, "sees": sees}


def test_each_replica_starts_on_its_own_gpus_and_too_few_are_refused(
    small: Any, tmp_path: Path, pretend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(5)
    started = []

    def engine_of_model(*_: Any, direct: DirectTransfer, **__: Any) -> Any:
        started.append((os.environ["CUDA_VISIBLE_DEVICES"], direct.backend, direct.replica))
        shared.add(id(direct.versions))
        return SimpleNamespace(slots=8, close=lambda: None)

    shared: set[int] = set()
    monkeypatch.setattr(assemble, "engine_of_model", engine_of_model)
    keys = ("engine.kind=vllm", "weights.transport=direct", "engine.vllm.tensor_parallel=2")
    own = recipe(small, tmp_path, *keys, "engine.vllm.replicas=2")
    port = assemble.build_port(own, PolicyVersion("x", 0))
    port.close()
    assert started == [("1,2", "nccl", "replica 0"), ("3,4", "nccl", "replica 1")]
    assert port.slots == 16
    assert len(shared) == 1, "the replicas share the trainer's versions"
    with pytest.raises(UserError, match=r"replicas: got 3 with 2 GPU\(s\) each, but only 2 fit"):
        layout_of(recipe(small, tmp_path, *keys, "engine.vllm.replicas=3"))
    with pytest.raises(UserError, match="a replica and the trainer use the same GPU"):
        direct_transfer(DeviceLayout((0,), ((1,), (0,))))


def test_a_difference_crosses_a_link_or_is_refused() -> None:
    apart, same = DeviceLayout((0,), ((1,),)), DeviceLayout((0,), ((0,),))
    found = [direct_transfer(layout, is_sparse=sparse) for layout in (None, apart) for sparse in (False, True)]
    assert [(one.backend, one.is_sparse, one.gpu) for one in found] == [
        ("gloo", False, None),
        ("gloo", True, None),
        ("nccl", False, 0),
        ("nccl", True, 0),
    ]
    assert direct_transfer(DeviceLayout((2,), ((2,),))) == DirectTransfer("ipc", gpu=2)
    assert direct_transfer(DeviceLayout((0, 1), ((2,),))) == DirectTransfer("nccl", gpu=0)
    with pytest.raises(UserError, match='got "direct", but trainer ranks and the engine use the same GPUs'):
        direct_transfer(DeviceLayout((0, 1), ((0, 1),)))
    with pytest.raises(UserError, match='got "sparse", but trainer and engine use the same GPU'):
        direct_transfer(same, is_sparse=True)


def test_each_worker_of_this_machine_sees_its_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", str(shell := tmp_path / "python"))
    shell.write_text('#!/bin/sh\necho "sees=$CUDA_VISIBLE_DEVICES"\n')
    shell.chmod(0o700)
    listen = ListenAddress.parse("127.0.0.1:0", None, None, False)
    names = [tmp_path / "local-0", tmp_path / "local-1"]
    workers = LocalWorkers(
        listen, 1, names, tmp_path, say=print, device="cuda", environments=[visible((2,)), visible((3, 4))]
    )
    logs, deadline_s = [tmp_path / f"local-{index}.log" for index in (0, 1)], time.monotonic() + 60
    while not all(log.read_text() for log in logs) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert [log.read_text() for log in logs] == ["sees=2\n", "sees=3,4\n"]
    workers.close()


def test_the_memory_of_each_stage_is_told_and_only_its_gpus_have_it(small: Any, tmp_path: Path) -> None:
    own = recipe(small, tmp_path, "trainer.ranks=4", "trainer.stages=2")
    model = read_model(Path(own.model.path))
    first, last, engine = processes_of(own, model, on_cpu=False, layout=DeviceLayout((0, 1, 2, 3), ((0,),)))
    assert (first.name, first.gpus) == ("each of 2 trainer ranks of stage 1 of 2", ((0,), (1,)))
    assert (last.name, last.gpus) == ("each of 2 trainer ranks of stage 2 of 2", ((2,), (3,)))
    assert needed_bytes((first, last, engine), on_cpu=False) == max(first.num_bytes + engine.num_bytes, last.num_bytes)
    with pytest.raises(
        UserError, match=r"trainer\.stages: got 2 stages with algorithm.advantage = 'gae', but a critic"
    ):
        recipe(small, tmp_path, "trainer.ranks=4", "trainer.stages=2", "algorithm=ppo")
    too_many = recipe(small, tmp_path, "trainer.ranks=64", "trainer.stages=64")
    with pytest.raises(UserError, match=r"trainer\.stages: got 64, but the model has \d+ layers; allowed are at most"):
        processes_of(too_many, model, on_cpu=False)


def test_the_memory_of_a_gpu_counts_who_is_on_it(small: Any, tmp_path: Path) -> None:
    own = recipe(small, tmp_path, "swarm.workers=2")
    model = read_model(Path(own.model.path))

    def needed(layout: DeviceLayout | None) -> int:
        return needed_bytes(processes_of(own, model, on_cpu=False, layout=layout), on_cpu=False)

    trainer, engine = (p.num_bytes for p in processes_of(own, model, on_cpu=False) if not p.on_host)
    assert needed(DeviceLayout((0,), ((1,), (2,)))) == max(trainer, engine)
    assert needed(DeviceLayout((0,), ((0,), (1,)))) == trainer + engine
    assert needed(DeviceLayout((0,), ((1,), (1,)))) == max(trainer, 2 * engine)
    assert needed(None) == trainer + engine


def test_trainer_and_vllm_need_the_larger_of_their_turns_and_what_the_other_keeps(small: Any, tmp_path: Path) -> None:
    """By hand, on a GPU of 80 GB: vLLM's share .9 · 80 GB = 72 GB, beside 1.5 GB of a sleeping trainer."""
    colocated = recipe(small, tmp_path, "engine.kind=vllm", 'rollout.placement="colocated"')
    model = read_model(Path(colocated.model.path))
    place = DeviceLayout((0,), ((0,),), gpu_bytes=80 * 10**9)
    trainer, engine = processes_of(colocated, model, on_cpu=False, layout=place)
    assert sum(part.num_bytes for part in engine.parts if not part.is_assumed) == 72 * 10**9
    assert engine.num_bytes == 73.5e9
    asleep = next(part for part in trainer.parts if part.name == "sleeping vLLM")
    assert (asleep.num_bytes, asleep.is_assumed) == (3 * 10**9, True)
    assert needed_bytes((trainer, engine), on_cpu=False) == max(trainer.num_bytes, engine.num_bytes)
    apart = recipe(small, tmp_path, "engine.kind=vllm")
    alone, same = processes_of(apart, model, on_cpu=False, layout=place)
    assert alone.num_bytes < trainer.num_bytes - 3 * 10**9 + 1e9
    assert needed_bytes((alone, same), on_cpu=False) == alone.num_bytes + 72 * 10**9


def test_each_gpu_has_the_turns_of_its_rank_and_of_vllm_and_the_host_has_the_state_of_all_ranks(
    small: Any, tmp_path: Path, pretend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(2)
    wanted = recipe(small, tmp_path, *RANKS_WITH_VLLM, "engine.vllm.tensor_parallel=2")
    model = read_model(Path(wanted.model.path))
    rank, engine = processes_of(wanted, model, on_cpu=False, layout=layout_of(wanted))
    assert (rank.gpus, engine.gpus) == (((0,), (1,)), ((0, 1),))
    assert "sleeping vLLM" in {part.name for part in rank.parts}
    assert needed_bytes((rank, engine), on_cpu=False) == max(rank.num_bytes, engine.num_bytes)
    state = 12 * model.params  # weights and two moments in float32, over both ranks
    for host, fits in ((0.99 * state, False), (1.01 * state, True)):
        free = {"cuda": 80 * 10**9, "cpu": int(host)}
        monkeypatch.setattr(dry_run, "available_bytes", lambda device, free=free: free[device.type])
        if fits:
            dry_run.check_room(wanted, is_here=True)
        else:
            with pytest.raises(UserError, match=r"the sleeping trainer .* free in host memory"):
                dry_run.check_room(wanted, is_here=True)


def test_a_share_of_vllm_that_does_not_fit_is_refused_with_a_smaller_one(
    small: Any, tmp_path: Path, pretend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(1)
    monkeypatch.setattr(dry_run, "available_bytes", lambda device: 70 * 10**9)
    wanted = recipe(small, tmp_path, "engine.kind=vllm", 'rollout.placement="colocated"')
    with pytest.raises(UserError, match=r"vLLM needs 68.5 GiB .* with engine.vllm.gpu_memory_utilization = 0.8"):
        dry_run.check_room(wanted, is_here=True)
