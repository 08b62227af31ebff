"""The learning rate by numbers, and AdamW's state by name."""

import pytest
import torch

from baton.errors import UserError
from baton.trainer.optimizer import (
    Schedule,
    load_optimizer_tensors,
    make_optimizer,
    optimizer_tensors,
    set_learning_rate,
)

pytestmark = pytest.mark.numerics


def rates(steps, **changes):
    settings = {"warmup_steps": 2, "decay": "constant", "total_steps": 6, "min_lr_frac": 0.2, **changes}
    return [Schedule(**settings).learning_rate(step, 1.0) for step in steps]


@pytest.mark.parametrize(
    ("decay", "expected"),
    [
        # warm-up ½, 1; then progress 0, ¼, ½, ¾ over the four steps left, and 1 beyond the end
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2]),  # 0.2 + 0.8 (1 − progress)
        # 0.2 + 0.4 (1 + cos π·progress): cos = 1, 0.7071068, 0, −0.7071068, −1
        ("cosine", [0.5, 1.0, 1.0, 0.8828427, 0.6, 0.3171573, 0.2]),
    ],
)
def test_schedule(decay, expected):
    assert rates(range(1, 8), decay=decay) == pytest.approx(expected, abs=1e-7)


def test_without_warm_up_the_first_step_has_the_full_rate():
    assert rates([1, 2], warmup_steps=0, decay="linear", total_steps=2, min_lr_frac=0.0) == [1.0, 0.5]


def test_a_decay_needs_steps_after_the_warm_up():
    Schedule(6, "constant", 6).check("trainer")
    with pytest.raises(UserError, match="got 6, allowed are fewer than the 6 steps"):
        Schedule(6, "cosine", 6).check("trainer")


def parameters():
    return {"matrix": torch.nn.Parameter(torch.ones(2, 2)), "gain": torch.nn.Parameter(torch.ones(2))}


def test_weight_decay_is_for_matrices_only():
    params = parameters()
    optimizer = make_optimizer(params, lr=0.1, betas=(0.9, 0.999), weight_decay=0.5)
    for parameter in params.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert params["matrix"].unique().tolist() == [pytest.approx(0.95)]  # 1 − 0.1 · 0.5
    assert params["gain"].unique().tolist() == [1.0]


def test_the_first_update_moves_each_weight_by_the_learning_rate_against_its_gradient():
    params = parameters()
    optimizer = make_optimizer(params, lr=0.1, betas=(0.9, 0.999), weight_decay=0.0)
    set_learning_rate(optimizer, 0.01)
    params["gain"].grad = torch.tensor([3.0, -0.5])
    params["matrix"].grad = torch.ones(2, 2)
    optimizer.step()
    # bias-corrected moments of the first step are g and g², so the move is lr · g / (|g| + 1e-8)
    assert params["gain"].tolist() == pytest.approx([0.99, 1.01], abs=1e-6)


def test_state_travels_by_parameter_name_and_not_by_place():
    params = parameters()
    optimizer = make_optimizer(params, lr=0.1, betas=(0.9, 0.999), weight_decay=0.0)
    for parameter in params.values():
        parameter.grad = torch.full_like(parameter, 2.0)
    optimizer.step()
    saved = {name: tensor.clone() for name, tensor in optimizer_tensors(optimizer, params).items()}
    assert sorted(saved) == [
        f"{key}/{name}" for key in ("exp_avg", "exp_avg_sq", "step") for name in ("gain", "matrix")
    ]
    swapped = dict(reversed(parameters().items()))
    other = make_optimizer(swapped, lr=0.1, betas=(0.9, 0.999), weight_decay=0.0)
    load_optimizer_tensors(other, swapped, saved)
    loaded = optimizer_tensors(other, swapped)
    saved = {name: tensor.clone() for name, tensor in saved.items()}  # the optimiser took the tensors themselves
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)
    with pytest.raises(UserError, match=r"exp_avg/gain of shape \(3,\)"):
        load_optimizer_tensors(other, swapped, {**saved, "exp_avg/gain": torch.zeros(3)})
