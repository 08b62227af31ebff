"""AdamW with moments in 8 bits (torchao): it learns as AdamW does, resumes to the same bits, and refuses the rest."""

import importlib.util
import shutil

import pytest
import torch
from trainer_cases import are_bit_equal, make_trainer, parameters, random_batch, tiny_model

from baton.cost.memory import MOMENTS_BYTES, PACKED_MOMENTS_BYTES
from baton.errors import UserError
from baton.recipe.support import check_support
from baton.trainer import model_setup
from baton.trainer.offload import Offload
from baton.trainer.optimizer import make_optimizer, optimizer_tensors
from baton.types import PolicyVersion

pytestmark = pytest.mark.numerics
runs = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None or shutil.which("g++") is None,
    reason="needs torchao (the extra optimizer) and a C++ compiler",
)
WIDE = {"hidden_size": 64, "vocab_size": 64, "num_hidden_layers": 1}
"""A block with matrices of 4,096 values and more, which get 8 bits, and of fewer, which do not."""


def eight_bit(seed=0, **settings):
    return make_trainer(tiny_model(seed, **WIDE), optimizer="adamw8bit", weight_decay=0.1, **settings)


def least_squares(name):
    """Return the loss after 60 updates of a linear map towards a random one, and the optimiser."""
    torch.manual_seed(0)
    inputs, target = torch.randn(64, 64), torch.randn(64, 64)
    weight = torch.nn.Parameter(torch.zeros(64, 64))
    optimizer = make_optimizer({"w": weight}, lr=0.03, betas=(0.9, 0.99), weight_decay=0.0, name=name)
    for _ in range(60):
        optimizer.zero_grad()
        loss = (inputs @ (weight - target)).square().mean()
        loss.backward()
        optimizer.step()
    return loss.item(), optimizer, weight


@runs
@pytest.mark.slow
def test_it_learns_as_adamw_does_with_a_quarter_of_the_moments():
    (loss, plain, of_plain), (loss_8bit, packed, of_packed) = (least_squares(n) for n in ("adamw", "adamw8bit"))
    begin = 64.0  # the mean square of an entry of a product of two matrices of 64 normal values each
    assert loss < begin / 4
    assert loss_8bit == pytest.approx(loss, rel=0.1)

    def num_bytes(optimizer, weight):
        found = optimizer_tensors(optimizer, {"w": weight})
        return sum(t.numel() * t.itemsize for name, t in found.items() if not name.startswith("step"))

    assert num_bytes(plain, of_plain) == MOMENTS_BYTES * 4096
    assert num_bytes(packed, of_packed) == PACKED_MOMENTS_BYTES * 4096


@runs
@pytest.mark.slow
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(tmp_path):
    unbroken = eight_bit()
    for step in (1, 2):
        unbroken.step(random_batch(step))
    moments = unbroken.learners[0].moments()
    assert {t.dtype for name, t in moments.items() if ".codes/" in name} == {torch.uint8}
    assert any(name.startswith("exp_avg/") for name in moments)  # small tensors keep float32
    unbroken.save(tmp_path / "a")
    resumed = eight_bit(9, version=PolicyVersion("second", 0))
    resumed.restore(tmp_path / "a")
    assert are_bit_equal(moments, resumed.learners[0].moments())
    for step in (3, 4):
        assert unbroken.step(random_batch(step)) == resumed.step(random_batch(step))
        assert are_bit_equal(parameters(unbroken), parameters(resumed))


@runs
@pytest.mark.slow
@pytest.mark.parametrize(("of", "into", "bits"), [("adamw", "adamw8bit", 32), ("adamw8bit", "adamw", 8)])
def test_moments_of_the_other_optimizer_are_refused_and_change_nothing(tmp_path, of, into, bits):
    saved = make_trainer(tiny_model(0, **WIDE), optimizer=of)
    saved.step(random_batch(1))
    saved.save(tmp_path / "a")
    other = make_trainer(tiny_model(9, **WIDE), optimizer=into)
    before = {name: tensor.clone() for name, tensor in parameters(other).items()}
    with pytest.raises(UserError, match=rf"in {bits} bits: resume with trainer\.optimizer = '{of}'"):
        other.restore(tmp_path / "a")
    assert are_bit_equal(before, parameters(other))
    assert not other.learners[0].moments()


@runs
@pytest.mark.slow
def test_its_moments_leave_the_device_and_come_back():
    _, optimizer, weight = least_squares("adamw8bit")
    before = {name: t.clone() for name, t in optimizer_tensors(optimizer, {"w": weight}).items()}
    model = torch.nn.Module()
    model.weight = weight
    offload = Offload(torch.device("cpu"), [model], [optimizer], moves=True)
    assert offload.held_bytes >= 4 * 4096 + 4 * 4096 + PACKED_MOMENTS_BYTES * 4096  # weight, gradient, moments
    offload.sleep()
    offload.wake_up()
    assert are_bit_equal(before, optimizer_tensors(optimizer, {"w": weight}))


def test_without_torchao_or_a_compiler_it_names_what_to_install(monkeypatch):
    monkeypatch.setattr(model_setup, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"needs torchao: run `pip install 'baton-rl\[optimizer\]'`"):
        eight_bit()
    monkeypatch.setattr(model_setup, "find_spec", lambda _: True)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(UserError, match="'adamw8bit' needs a C\\+\\+ compiler"):
        eight_bit()


@pytest.mark.parametrize(
    ("axis", "value", "sentence"),
    [("trainer", "ranks", "trainer.ranks above 1"), ("weights", "lora", "the moments of adapters are small")],
)
def test_ranks_and_adapters_are_refused(axis, value, sentence):
    with pytest.raises(UserError, match=sentence):
        check_support({"optimizer": ("adamw8bit",), axis: (value,)})
