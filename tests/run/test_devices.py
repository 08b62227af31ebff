"""Who uses which GPU, with a pretended number of GPUs: no GPU is needed."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import UserError
from baton.recipe.load import load_recipe
from baton.recipe.recipe import Recipe
from baton.run import assemble
from baton.run.devices import DeviceLayout, divide, environment_with, layout_of, visible
from baton.run.memory import needed_bytes, processes_of
from baton.specs.model import read_model
from baton.swarm.listen import ListenAddress
from baton.swarm.local_workers import LocalWorkers
from baton.types import PolicyVersion


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Any:
    def gpus(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

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


@pytest.mark.parametrize(
    ("num_gpus", "overrides", "trainer", "engines"),
    [
        (1, [], (0,), ((0,),)),
        (2, [], (0,), ((1,),)),
        (2, ["model.device=cuda:1"], (1,), ((0,),)),
        (4, ["engine.devices=[3]"], (0,), ((3,),)),
        (4, ["engine.devices=[0]"], (0,), ((0,),)),
        (4, ['rollout.placement="colocated"'], (0,), ((0,),)),
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
    ("num_gpus", "overrides", "message"),
    [
        (
            2,
            ["engine.devices=[2]"],
            r"engine.devices: got 2, but this machine has 2 visible GPU\(s\): allowed are 0 to 1",
        ),
        (2, ["model.device=cuda:2"], "model.device: got cuda:2, but this machine has 2"),
        (2, ["trainer.ranks=3"], "trainer.ranks: got 3, but this machine has 2"),
        (2, ["engine.devices=[1]", 'rollout.placement="colocated"'], "engine.devices: got .1., but with"),
        (4, ["engine.kind=vllm", "engine.vllm.tensor_parallel=2", "engine.devices=[3]"], "got 2, but 1 GPU"),
        (0, ["model.device=cpu", "engine.devices=[0]"], "engine.devices: got .0., but model.device is cpu"),
    ],
)
def test_gpus_that_are_not_there_are_refused(
    num_gpus: int, overrides: list[str], message: str, small: Any, tmp_path: Path, pretend: Any
) -> None:
    pretend(num_gpus)
    with pytest.raises(UserError, match=message):
        layout_of(recipe(small, tmp_path, *overrides))


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

    def engine_of_model(*_: Any, device: str, **__: Any) -> None:
        started.update(device=device, sees=os.environ.get("CUDA_VISIBLE_DEVICES"))

    monkeypatch.setattr(assemble, "engine_of_model", engine_of_model)
    own = recipe(small, tmp_path, f"engine.kind={kind}")
    assemble.build_engine(own, own.model.path, PolicyVersion("x", 0))
    assert started == {"device": device, "sees": sees}


def test_each_worker_of_this_machine_sees_its_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", str(shell := tmp_path / "python"))
    shell.write_text('#!/bin/sh\necho "sees=$CUDA_VISIBLE_DEVICES"\n')
    shell.chmod(0o700)
    listen = ListenAddress.parse("127.0.0.1:0", None, None, False)
    names = [tmp_path / "local-0", tmp_path / "local-1"]
    workers = LocalWorkers(
        listen, 1, names, tmp_path, say=print, device="cuda", environments=[visible((2,)), visible((3, 4))]
    )
    deadline_s = time.monotonic() + 60
    while workers.pids() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert [(tmp_path / f"local-{index}.log").read_text() for index in (0, 1)] == ["sees=2\n", "sees=3,4\n"]
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

    trainer, engine = (each.num_bytes for each in processes_of(own, model, on_cpu=False))
    assert needed(DeviceLayout((0,), ((1,), (2,)))) == max(trainer, engine)
    assert needed(DeviceLayout((0,), ((0,), (1,)))) == trainer + engine
    assert needed(DeviceLayout((0,), ((1,), (1,)))) == max(trainer, 2 * engine)
    assert needed(None) == trainer + engine
