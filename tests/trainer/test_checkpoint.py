"""Checkpoints are whole or absent, load anywhere, and resume to the same bits."""

import json
from contextlib import suppress

import pytest
import torch
from trainer_cases import are_bit_equal, make_trainer, parameters, random_batch, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from baton.errors import UserError
from baton.files import atomic_directory
from baton.policy.stored_tensors import TensorFile
from baton.trainer.checkpoint import (
    checkpoint_path,
    list_checkpoints,
    prune_checkpoints,
    read_state,
)
from baton.trainer.critic import Critic
from baton.trainer.local_trainer import LocalTrainer
from baton.types import PolicyVersion

pytestmark = pytest.mark.numerics

SETTINGS = {"num_minibatches": 2, "weight_decay": 0.1, "warmup_steps": 3, "decay": "cosine"}


def saved(path, num_steps=2, **settings):
    trainer = make_trainer(**{**SETTINGS, **settings})
    for step in range(1, num_steps + 1):
        trainer.step(random_batch(step))
    trainer.save(path)
    return trainer


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(tmp_path, dtype):
    unbroken = saved(tmp_path / "step_000002", dtype=dtype)
    resumed = make_trainer(tiny_model(seed=9), dtype=dtype, version=PolicyVersion("second", 0), **SETTINGS)
    resumed.restore(tmp_path / "step_000002")
    assert resumed.version == PolicyVersion("second", 2, unbroken.version.digest)  # going back starts a lineage
    for step in (3, 4):
        assert unbroken.step(random_batch(step)) == resumed.step(random_batch(step))
        assert are_bit_equal(parameters(unbroken), parameters(resumed))


def test_saving_changes_nothing(tmp_path):
    trainer, other = saved(tmp_path / "a"), make_trainer(**SETTINGS)
    for step in (1, 2):
        other.step(random_batch(step))
    trainer.step(random_batch(3))
    other.step(random_batch(3))
    assert are_bit_equal(parameters(trainer), parameters(other))


def test_hugging_face_loads_it(tmp_path):
    trainer = saved(tmp_path / "a", dtype="bfloat16")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    ids = torch.tensor([[2, 3, 4, 5]])
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, trainer.model(ids).logits, atol=1e-5, rtol=0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a")
    assert tokenizer.chat_template
    assert (tmp_path / "a" / "generation_config.json").is_file()
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert config["dtype"] == "float32"
    assert "baton_packed" not in (tmp_path / "a" / "config.json").read_text()  # our own name means nothing elsewhere


def test_the_state_says_what_made_it(tmp_path):
    trainer = saved(tmp_path / "a")
    state = read_state(tmp_path / "a")
    assert state.version == trainer.version
    assert state.version.digest
    assert state.num_updates == 4  # two steps of two minibatches
    assert state.num_threads == torch.get_num_threads()
    assert state.libraries["torch"] == torch.__version__


def test_nothing_in_it_is_pickled(tmp_path):
    saved(tmp_path / "a")
    suffixes = {path.suffix for path in (tmp_path / "a").rglob("*") if path.is_file()}
    assert suffixes == {".safetensors", ".json", ".jinja"}


# ---- whole or absent -------------------------------------------------------------------------------------------------


def test_a_write_that_fails_leaves_nothing_that_looks_complete(tmp_path, monkeypatch):
    trainer = saved(checkpoint_path(tmp_path, 1), num_steps=1)
    trainer.step(random_batch(2))
    monkeypatch.setattr(TensorFile, "put", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        trainer.save(checkpoint_path(tmp_path, 2))
    assert list_checkpoints(tmp_path) == [tmp_path / "step_000001"]
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]


def test_a_killed_write_is_not_listed_and_does_not_stand_in_the_way(tmp_path):
    killed = tmp_path / ".step_000001.unfinished"  # what a kill in the middle leaves
    (killed / "baton").mkdir(parents=True)
    (killed / "baton" / "state.json").write_text("{}")
    (tmp_path / "step_000003").mkdir()  # somebody's empty directory
    assert list_checkpoints(tmp_path) == []
    assert list_checkpoints(tmp_path) == []
    saved(tmp_path / "step_000001", num_steps=1)
    assert list_checkpoints(tmp_path) == [tmp_path / "step_000001"]
    assert not killed.exists()


def test_the_last_name_appears_only_when_all_is_written(tmp_path):
    target = tmp_path / "thing"
    with atomic_directory(target) as directory:
        (directory / "one").write_text("1")
        assert not target.exists()
    assert (target / "one").read_text() == "1"
    with suppress(RuntimeError), atomic_directory(target) as directory:
        (directory / "two").write_text("2")
        raise RuntimeError
    assert [path.name for path in target.iterdir()] == ["one"]  # as it was
    with atomic_directory(target) as directory:
        (directory / "two").write_text("2")
    assert [path.name for path in target.iterdir()] == ["two"]  # replaced
    assert [path.name for path in tmp_path.iterdir()] == ["thing"]


def test_a_caller_may_put_its_own_state_beside_the_trainers(tmp_path):
    trainer = make_trainer()
    with atomic_directory(checkpoint_path(tmp_path, 0)) as directory:
        trainer.save(directory)
        (directory / "baton" / "loop.json").write_text("{}")
    assert list_checkpoints(tmp_path) == [tmp_path / "step_000000"]
    assert (tmp_path / "step_000000" / "baton" / "loop.json").is_file()


def test_the_newest_are_kept(tmp_path):
    for step in (5, 900, 1_000_000, 50):
        path = checkpoint_path(tmp_path, step) / "baton"
        path.mkdir(parents=True)
        (path / "state.json").write_text("{}")
    names = ["step_000005", "step_000050", "step_000900", "step_1000000"]
    assert [path.name for path in list_checkpoints(tmp_path)] == names
    assert [path.name for path in prune_checkpoints(tmp_path, 2)] == names[:2]
    assert [path.name for path in list_checkpoints(tmp_path)] == names[2:]
    assert prune_checkpoints(tmp_path, 2) == []
    assert list_checkpoints(tmp_path / "nowhere") == []


# ---- what does not fit -----------------------------------------------------------------------------------------------


def refused(trainer: LocalTrainer, path, match):
    before, version = parameters(trainer), trainer.version
    with pytest.raises(UserError, match=match):
        trainer.restore(path)
    assert are_bit_equal(parameters(trainer), before)
    assert trainer.version == version


def test_another_model_is_refused(tmp_path):
    saved(tmp_path / "a")
    refused(
        make_trainer(tiny_model(hidden_size=16)),
        tmp_path / "a",
        r"another model .* has shape \(.*\) in the checkpoint and \(",
    )
    refused(
        make_trainer(tiny_model(num_hidden_layers=1)), tmp_path / "a", r"has shape .* in the checkpoint and none in"
    )


def test_missing_or_damaged_parts_are_refused(tmp_path):
    path = tmp_path / "a"
    saved(path)
    moments = path / "baton" / "optimizer.safetensors"
    whole = moments.read_bytes()
    moments.write_bytes(whole[: len(whole) // 2])
    refused(make_trainer(), path, "optimizer state optimizer.safetensors is missing or damaged")
    moments.unlink()
    refused(make_trainer(), path, "optimizer state optimizer.safetensors is missing or damaged")
    moments.write_bytes(whole)
    weights = path / "model.safetensors"
    flipped = bytearray(weights.read_bytes())
    flipped[-1] ^= 1
    weights.write_bytes(bytes(flipped))
    refused(make_trainer(), path, "is damaged: its weights have digest")
    state = path / "baton" / "state.json"
    state.write_bytes(state.read_bytes().replace(b"torch", b"torc\xff"))
    refused(make_trainer(), path, "state.json cannot be read")
    state.unlink()
    refused(make_trainer(), path, "has no baton/state.json")


def test_a_plain_model_directory_is_no_checkpoint(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    refused(make_trainer(), tmp_path, "is not a checkpoint of Baton")


# ---- critics ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("critic", ["separate", "shared"])
def test_a_critic_is_resumed_with_its_policy(tmp_path, critic):
    settings = {"name": "ppo", "num_minibatches": 2, "critic": critic, "critic_lr": 1e-2}
    unbroken, resumed = make_trainer(**settings), make_trainer(tiny_model(seed=9), **settings)
    for step in (1, 2):
        unbroken.step(random_batch(step))
    unbroken.save(tmp_path / "a")
    resumed.restore(tmp_path / "a")
    assert unbroken.step(random_batch(3)) == resumed.step(random_batch(3))
    assert are_bit_equal(parameters(unbroken), parameters(resumed))
    AutoModelForCausalLM.from_pretrained(tmp_path / "a")  # the critic lies apart
    (tmp_path / "a" / "baton" / "critic.safetensors").unlink()
    refused(make_trainer(**settings), tmp_path / "a", "critic critic.safetensors is missing or damaged")


def test_the_names_of_a_critics_tensors_never_change():
    """They are those of the module's attributes, and what `critic.safetensors` has."""
    assert list(Critic(tiny_model(), is_separate=False).state_dict()) == ["head.weight", "head.bias"]
    separate = list(Critic(tiny_model(), is_separate=True).state_dict())
    assert separate[0] == "trunk.embed_tokens.weight"
    assert {name.split(".")[0] for name in separate} == {"trunk", "head"}
