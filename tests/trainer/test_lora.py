"""Adapters: what is trained, what is published, what a checkpoint is, and that an engine serves the same policy."""

import importlib.util
import json
import math

import pytest
import torch
from test_packing import gpt2
from trainer_cases import are_bit_equal, make_trainer, parameters, random_batch, tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM

from baton.errors import EngineFault, UserError
from baton.policy import adapters
from baton.policy.load import load_model
from baton.policy.settings import LoraSettings
from baton.policy.tensors import policy_tensors
from baton.rollout.engines.embedded.network import Network
from baton.specs.model import read_model
from baton.trainer import factory
from baton.trainer.parallel.messages import TrainerSetup
from baton.types import PolicyVersion

pytestmark = pytest.mark.numerics

LORA = LoraSettings(rank=4, alpha=8.0)
IDS = torch.tensor([[2, 3, 4, 5, 6]])


@pytest.fixture
def base(tmp_path):
    """A model on disk, as every run has one."""
    tiny_model().save_pretrained(tmp_path / "base")
    tiny_tokenizer().hf.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def load(path):
    return load_model(str(path), dtype=torch.float32, device=torch.device("cpu"))


def trained(base, steps=2, lora=LORA, **settings):
    trainer = make_trainer(load(base), lora=lora, lr=1e-2, **settings)
    for step in range(1, steps + 1):
        trainer.step(random_batch(step))
    return trainer


@torch.no_grad()
def logits(model):
    return model(IDS).logits


def test_only_the_adapter_is_trained(base):
    trainer = trained(base)
    before, now = load(base).state_dict(), trainer.model.state_dict()
    changed = [name for name in now if ".lora_" not in name and not torch.equal(now[name], before[original(name)])]
    assert changed == []
    assert all(".lora_" in name for name in trainer.learners[0].parameters)
    assert (logits(trainer.model) - logits(load(base))).abs().max() > 1e-3


def original(name):
    return name.replace(".base_layer", "")


@pytest.mark.parametrize("place", ["cpu", "meta"])
def test_adapters_are_equal_and_in_float32_whatever_the_dtype_and_the_device_of_the_model(place):
    def added(model):
        adapters.add_adapters(model, LORA, seed=7)
        return adapters.raw_tensors(model)

    expected, found = added(tiny_model()), added(tiny_model().to(place, torch.bfloat16))
    assert {(tensor.dtype, tensor.device.type) for tensor in found.values()} == {(torch.float32, "cpu")}
    assert are_bit_equal(found, expected)
    assert all(tensor.any() == ("lora_A" in name) for name, tensor in found.items())


def test_before_the_first_update_the_policy_is_the_base_model(base):
    assert torch.equal(logits(make_trainer(load(base), lora=LORA).model), logits(load(base)))


def test_what_is_published_is_the_adapter_and_an_engine_serves_the_same_policy(base):
    trainer = trained(base)
    published = trainer.publish().tensors
    assert all(name.endswith((".lora_A.weight", ".lora_B.weight")) for name in published)
    whole = sum(t.numel() for t in policy_tensors(load(base)).values())
    assert sum(t.numel() for t in published.values()) < 0.7 * whole  # rank 4 of 32; far less on a real model
    network = Network(load(base), 8, 32)
    network.load(published)
    torch.testing.assert_close(logits(network.model), logits(trainer.model), atol=1e-5, rtol=1e-5)
    trainer.step(random_batch(3))
    network.load(trainer.publish().tensors)  # merged into the base, not into the last version
    torch.testing.assert_close(logits(network.model), logits(trainer.model), atol=1e-5, rtol=1e-5)
    other = tiny_model(seed=4)
    network.load(policy_tensors(other))  # a whole model is a new base
    assert torch.equal(logits(network.model), logits(other))


def test_an_adapter_that_does_not_fit_is_refused_and_changes_nothing(base):
    published = dict(trained(base, steps=1).publish().tensors)
    network = Network(load(base), 8, 32)
    before = logits(network.model)
    name = next(name for name in published if name.endswith("lora_B.weight"))
    for wrong in (
        {**published, name: published[name][:-1]},
        {key: value for key, value in published.items() if key != name},
        {f"model.{key}": value for key, value in published.items()},
    ):
        with pytest.raises(EngineFault, match="a new adapter does not fit: "):
            network.load(wrong)
        assert torch.equal(logits(network.model), before)


def test_the_reference_is_the_model_without_its_adapter(base):
    """No second model is held, and the KL of the first step is 0."""
    trainer = make_trainer(load(base), lora=LORA, lr=1e-2, kl_coef=0.5)
    assert trainer.step(random_batch(1))["kl/ref"] == pytest.approx(0.0, abs=1e-9)
    assert trainer.step(random_batch(2))["kl/ref"] > 1e-4
    assert trainer.passes.reference is trainer.model


def test_a_checkpoint_is_the_adapter_for_peft_and_transformers_and_our_own_loader(base, tmp_path):
    from peft import PeftModel

    trainer = trained(base)
    trainer.save(tmp_path / "step_000002")
    files = {path.name for path in (tmp_path / "step_000002").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= files
    assert "model.safetensors" not in files
    assert json.loads((tmp_path / "step_000002" / "adapter_config.json").read_text())["r"] == 4
    expected = logits(trainer.model)
    by_peft = PeftModel.from_pretrained(load(base), tmp_path / "step_000002")
    torch.testing.assert_close(logits(by_peft), expected, atol=1e-6, rtol=1e-5)
    by_transformers = AutoModelForCausalLM.from_pretrained(tmp_path / "step_000002")
    torch.testing.assert_close(logits(by_transformers), expected, atol=1e-6, rtol=1e-5)
    merged = load(tmp_path / "step_000002")
    torch.testing.assert_close(logits(merged), expected, atol=1e-5, rtol=1e-5)
    assert not any("lora" in name for name in merged.state_dict())


def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(base, tmp_path):
    unbroken = trained(base)
    unbroken.save(tmp_path / "step_000002")
    resumed = make_trainer(load(base), lora=LORA, lr=1e-2)
    resumed.restore(tmp_path / "step_000002")
    assert resumed.version == PolicyVersion("first", 2, unbroken.version.digest)
    assert unbroken.publish().version.digest == unbroken.version.digest
    assert unbroken.step(random_batch(3)) == resumed.step(random_batch(3))
    assert are_bit_equal(parameters(unbroken), parameters(resumed))


def test_a_checkpoint_of_another_kind_is_refused(base, tmp_path):
    trained(base).save(tmp_path / "adapter")
    full = make_trainer(load(base))
    full.step(random_batch(1))
    full.save(tmp_path / "full")
    with pytest.raises(UserError, match="holds no adapter"):
        make_trainer(load(base), lora=LORA).restore(tmp_path / "full")
    with pytest.raises(UserError, match=r"another model .* has shape"):
        make_trainer(load(base), lora=LoraSettings(rank=2)).restore(tmp_path / "adapter")


def test_targets_may_be_named_and_must_exist(base):
    trainer = trained(base, steps=1, lora=LoraSettings(rank=2, targets=("q_proj", "v_proj")))
    modules = {name.split(".")[-3] for name in trainer.publish().tensors}
    assert modules == {"q_proj", "v_proj"}
    for targets in (("nothing",), ("q_proj", "nothing")):
        with pytest.raises(
            UserError, match=r"lora\.targets: got 'nothing', which matches no layer of Qwen3ForCausalLM; "
        ):
            make_trainer(load(base), lora=LoraSettings(targets=targets))
    with pytest.raises(UserError, match=r"got 'embed_tokens', which matches a layer that is not linear; allowed are"):
        make_trainer(load(base), lora=LoraSettings(targets=("q_proj", "embed_tokens")))
    with pytest.raises(UserError, match=r"got 'lm_head', which is the head, but .* ties its head to the embedding"):
        make_trainer(tiny_model(tie_word_embeddings=True), lora=LoraSettings(targets=("lm_head",)))
    with pytest.raises(UserError, match=r"lora\.targets: got no layers; allowed are 'all-linear'"):
        make_trainer(load(base), lora=LoraSettings(targets=()))


@pytest.mark.parametrize("targets", ["all-linear", ("c_attn",)])
def test_a_model_without_linear_layers_gets_no_adapters(targets):
    with pytest.raises(UserError, match=r"lora: GPT2LMHeadModel has no layer of the class torch\.nn\.Linear"):
        make_trainer(gpt2(), lora=LoraSettings(targets=targets))


def test_a_separate_critic_is_trained_in_float32_beside_frozen_weights_in_bfloat16(base):
    trainer = make_trainer(load(base).to(torch.bfloat16), lora=LORA, name="ppo", num_minibatches=2, dtype="bfloat16")
    assert {p.dtype for p in trainer.passes.critic.parameters()} == {torch.float32}
    metrics = [trainer.step(random_batch(step)) for step in (1, 2)]
    assert all(math.isfinite(value) for each in metrics for value in each.values())


def test_without_peft_a_sentence_says_what_to_install(base, monkeypatch):
    monkeypatch.setattr(adapters, "find_spec", lambda name: None if name == "peft" else importlib.util.find_spec(name))
    with pytest.raises(UserError, match=r"run `pip install 'baton-rl\[lora\]'`"):
        make_trainer(load(base), lora=LORA)


def test_versions_of_peft_and_transformers_that_do_not_match_are_refused_with_what_to_install(base, monkeypatch):
    monkeypatch.setattr(adapters, "MIN_PEFT_VERSION", "999.0")
    with pytest.raises(UserError, match=r"needs PEFT 999\.0 or newer, got .*pip install 'baton-rl\[lora\]'"):
        make_trainer(load(base), lora=LORA)


@pytest.mark.parametrize("settings", [{"name": "ppo", "num_minibatches": 2}, {"activation_checkpointing": True}])
def test_adapters_go_with_the_rest(base, settings):
    trainer = trained(base, **settings)
    assert all(math.isfinite(value) for value in trainer.step(random_batch(3)).values())


def test_a_damaged_adapter_is_refused(base, tmp_path):
    trainer = trained(base)
    trainer.save(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(UserError, match=r"adapter_model\.safetensors is damaged"):
        trainer.restore(tmp_path / "adapter")
    with pytest.raises(UserError, match=r"^model\.path: the adapter in '.*' could not be loaded"):
        load(tmp_path / "adapter")


def test_a_checkpoint_of_an_adapter_is_trained_on_merged_but_under_no_second_adapter(base, tmp_path):
    trained(base).save(tmp_path / "adapter")
    merged = load(tmp_path / "adapter")
    before = logits(merged)
    trainer = make_trainer(merged, lr=1e-2)  # PEFT leaves what it merges into frozen
    trainer.step(random_batch(1))
    assert (logits(trainer.model) - before).abs().max() > 1e-3
    assert read_model(tmp_path / "adapter") == read_model(base)
    setup = TrainerSetup(
        model_path=str(tmp_path / "adapter"),
        device="cpu",
        attention="sdpa",
        trainer={},
        algorithm={},
        lora=LORA.model_dump(),
        temperature=1.0,
        total_steps=1,
        version=PolicyVersion("first", 0),
        max_new_tokens=8,
        max_staleness=None,
        seed=0,
        publish_dtype="float32",
    )
    with pytest.raises(UserError, match=r"adapter' holds an adapter, and \[lora\] would train a second one"):
        factory.make_trainer(setup, tiny_tokenizer())


def test_an_adapter_without_a_base_model_and_a_learned_prompt_are_refused(base, tmp_path):
    import peft

    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    peft.get_peft_model(load(base), prompt).save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    config = json.loads(file.read_text())
    for name, reason in ((str(base), "it is a learned prompt"), (None, "names no base model")):
        file.write_text(json.dumps({**config, "base_model_name_or_path": name}))
        with pytest.raises(UserError, match=reason):
            load(tmp_path)
