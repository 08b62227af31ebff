"""Shards of an FSDP model that leave their device and return, by the exchange of memory that CUDA needs, on a CPU."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from baton.policy.sharding import Sharded, local, whole
from baton.trainer.offload import Offload
from tests.trainer.trainer_cases import tiny_model

pytestmark = pytest.mark.slow


def updated(*, moves: bool) -> tuple[list[torch.Tensor], int, int]:
    """Two updates, with a turn before each; return the shards, and the bytes of a rank awake and asleep."""
    model = tiny_model(vocab_size=131)  # rows do not divide equally: FSDP pads the last shard
    sharded = Sharded(model, init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    offload = Offload(torch.device("cpu"), [model], [optimizer], moves=moves)
    inputs = torch.arange(8).view(1, 8)
    for number in range(2):
        sharded.run(lambda made: made(inputs).logits.square().sum()).backward()
        optimizer.step()
        before = [whole(p).detach().clone() for p in model.parameters()]
        awake = offload.held_bytes
        shards = [p._local_tensor.untyped_storage() for p in model.parameters()]  # type: ignore[attr-defined]
        offload.sleep()
        assert all((not storage.nbytes()) == moves for storage in shards)
        found = [whole(p) for p in model.parameters()]
        assert all(torch.equal(one, other) for one, other in zip(found, before, strict=True))
        with torch.no_grad():  # as a checkpoint is restored into a sleeping trainer
            for parameter in model.parameters():
                local(parameter).mul_(1 + number)
        asleep = offload.held_bytes
        offload.wake_up()
    return [local(p).detach().clone() for p in model.parameters()], awake, asleep


def rank_of_two(rank: int, directory: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    torch.manual_seed(0)
    moved, awake, asleep = updated(moves=True)
    torch.manual_seed(0)
    kept, _, _ = updated(moves=False)
    dist.destroy_process_group()
    same = all(torch.equal(a, b) for a, b in zip(moved, kept, strict=True))
    (Path(directory) / str(rank)).write_text(f"{same} {awake > 0} {asleep}")


def test_the_shards_of_a_rank_leave_their_device_and_return_with_the_same_bits(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(rank_of_two, (str(tmp_path),), nprocs=2)
    assert [(tmp_path / str(rank)).read_text() for rank in (0, 1)] == ["True True 0"] * 2
