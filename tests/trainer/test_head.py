"""A head's scale and cap come from the configuration, its pieces make what the whole makes, its gradient is float32."""

import pytest
import torch
from torch.nn.functional import linear
from trainer_cases import VOCAB, make_trainer, random_batch, tiny_model, tiny_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from baton.policy import head
from baton.policy.head import RequestedScores, find_head, head_scores, set_max_logits
from baton.policy.load import _warn_once, load_model, load_skeleton
from baton.policy.logprobs import compute_in, padded_scores
from baton.policy.settings import LoraSettings
from baton.rollout.engines.embedded.packed import PackedLinears

pytestmark = pytest.mark.numerics

SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
FAMILIES = {
    "llama": ({}, 1.0, None),
    "qwen3": ({}, 1.0, None),
    "gemma2": ({"final_logit_softcapping": 30.0, "sliding_window": 4}, 1.0, 30.0),
    "gemma3_text": ({"final_logit_softcapping": 5.0, "sliding_window": 4}, 1.0, 5.0),
    "granite": ({"logits_scaling": 8.0}, 0.125, None),
    "cohere": ({"logit_scale": 0.0625}, 0.0625, None),
    "cohere2": ({"logit_scale": 0.25, "sliding_window": 4}, 0.25, None),
}
WANTED = RequestedScores(temperature=0.7, with_entropy=True, entropy_has_gradient=True)


def family(name, **changes):
    """Of the initial size that a new model has: its logits are small."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**SHAPE, **FAMILIES[name][0], **changes})
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def by_the_models_own_forward(model, ids, first):
    logits = model(input_ids=ids, use_cache=False).logits[:, first - 1 : -1].double() / WANTED.temperature
    table = logits.log_softmax(-1)
    return table.gather(-1, ids[:, first:, None]).squeeze(-1), -(table.exp() * table).sum(-1)


@pytest.mark.parametrize("initializer_range", [0.02, 1.0])  # small logits, and some far above every cap
@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_scores_as_its_own_forward_without_all_logits_at_once(name, initializer_range, monkeypatch):
    model = family(name, initializer_range=initializer_range)
    found = find_head(model)
    assert (found.scale, found.cap) == FAMILIES[name][1:]
    sizes, original = [], head.Head.shaped
    monkeypatch.setattr(head.Head, "shaped", lambda own, x: sizes.append(x.numel()) or original(own, x))
    set_max_logits(model, 3 * VOCAB)
    ids = torch.arange(2 * 9).mul(7).remainder(VOCAB).view(2, 9)
    scores = padded_scores(model, ids, first=2, wanted=WANTED)
    logprobs, entropy = by_the_models_own_forward(model, ids, 2)
    torch.testing.assert_close(scores.logprobs.double(), logprobs, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(scores.entropy.double(), entropy, atol=1e-4, rtol=1e-4)
    places = torch.linspace(-1, 1, logprobs.numel(), dtype=torch.float64).view_as(logprobs)
    expected = torch.autograd.grad((logprobs * places + entropy * places**2).sum(), list(model.parameters()))
    objective = (scores.logprobs * places.float() + scores.entropy * places.float() ** 2).sum()
    for gradient, same in zip(torch.autograd.grad(objective, list(model.parameters())), expected, strict=True):
        torch.testing.assert_close(gradient, same, atol=1e-3 * same.abs().max().item() + 1e-7, rtol=1e-3)
    assert max(sizes) <= 3 * VOCAB
    assert len(sizes) == 2 * 5  # 14 tokens by 3, forwards and backwards


def test_logits_that_are_computed_in_parts_that_fit_a_cache_are_those_of_the_whole(monkeypatch):
    model = family("gemma2")
    hidden = torch.randn(7, SHAPE["hidden_size"], generator=torch.Generator().manual_seed(0), requires_grad=True)
    weights = torch.linspace(-1, 1, 7)
    found = []
    for limit in (2**19, 2 * VOCAB):  # all rows at once; two at a time
        monkeypatch.setattr(head, "CACHED_LOGITS", limit)
        logprobs, entropy = head_scores(find_head(model), hidden, torch.arange(7), WANTED)
        objective = (logprobs * weights + entropy * weights**2).sum()
        found.append([logprobs, entropy, *torch.autograd.grad(objective, [hidden, find_head(model).linear.weight])])
    for whole, parts in zip(*found, strict=True):
        torch.testing.assert_close(parts, whole, atol=1e-6, rtol=1e-5)


def test_a_gemma_with_small_logits_does_not_pass_for_a_model_without_a_cap():
    """Its logits are as good as those of its linear layer; a cap that the configuration does not name is seen too."""
    capped, plain = family("gemma2"), family("gemma2", final_logit_softcapping=None)
    ids = torch.tensor([[2, 3, 4]])
    torch.testing.assert_close(capped(input_ids=ids).logits, plain(input_ids=ids).logits, atol=1e-4, rtol=1e-3)
    assert (find_head(capped).cap, find_head(plain).cap) == (30.0, None)


class Capped(LlamaForCausalLM):
    """A head that no key of the configuration tells of."""

    def forward(self, *args, **kwargs):
        found = super().forward(*args, **kwargs)
        found.logits = 40.0 * (found.logits / 40.0).tanh()
        return found


def test_a_head_that_is_not_known_falls_back_to_the_models_own_forward_and_says_so(caplog):
    torch.manual_seed(0)
    model = Capped(AutoConfig.for_model("llama", **SHAPE)).eval()
    for _ in range(2):
        assert find_head(model) is None
    assert caplog.text.count("the head of Capped is not recognised") == 1
    ids = torch.arange(2 * 9).mul(7).remainder(VOCAB).view(2, 9)
    scores = padded_scores(model, ids, first=2, wanted=RequestedScores(0.7, with_entropy=True))
    logprobs, entropy = by_the_models_own_forward(model, ids, 2)
    torch.testing.assert_close(scores.logprobs.double(), logprobs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(scores.entropy.double(), entropy, atol=1e-5, rtol=1e-5)


def test_adapters_in_the_head_are_not_passed_over():
    pytest.importorskip("peft")
    model = tiny_model(tie_word_embeddings=False)
    assert find_head(model) is not None
    trainer = make_trainer(model, lora=LoraSettings(rank=2, targets=("lm_head", "q_proj")))
    assert find_head(model) is None
    trainer.step(random_batch(1))
    moved = [name for name, p in model.named_parameters() if "lm_head.lora_B" in name and p.abs().max() > 0]
    assert len(moved) == 1


@pytest.mark.parametrize("num_pieces", [1, 128])
def test_in_bfloat16_the_heads_gradient_is_that_of_float64_whatever_the_cut(num_pieces, monkeypatch):
    """The logits are bfloat16's; from there on the reference is computed in float64. The products of the gradient are
    rounded to bfloat16, each of them by at most 2⁻⁹, their sums are not."""
    torch.manual_seed(0)
    tokens, width, vocabulary = 512, 64, 256
    layer = torch.nn.Linear(width, vocabulary)
    hidden = torch.randn(tokens, width, requires_grad=True)
    targets = torch.randint(vocabulary, (tokens,))
    weights = torch.linspace(-1, 1, tokens, dtype=torch.float64)
    rounded = hidden.detach().bfloat16()
    with torch.no_grad():
        products = linear(rounded, layer.weight.bfloat16(), layer.bias.bfloat16())
    leaf = products.double().requires_grad_()
    table = (leaf * 0.5 / WANTED.temperature).log_softmax(-1)
    (table.gather(-1, targets[:, None]).squeeze(-1) * weights).sum().backward()
    expected = leaf.grad.T @ rounded.double()
    monkeypatch.setattr(head, "MAX_LOGITS", tokens // num_pieces * vocabulary)
    with compute_in(torch.bfloat16, torch.device("cpu")):
        logprobs, _ = head_scores(head.Head(layer, scale=0.5), hidden, targets, WANTED)
    (logprobs * weights.float()).sum().backward()
    assert (layer.weight.grad - expected).norm() < 2**-8 * expected.norm()
    assert (layer.bias.grad - leaf.grad.sum(0)).norm() < 1e-5 * leaf.grad.sum(0).norm()
    of_hidden = leaf.grad @ layer.weight.detach().double()
    assert (hidden.grad - of_hidden).norm() < 1e-2 * of_hidden.norm()  # a product in bfloat16


def test_a_float32_head_gives_engine_and_trainer_the_logprobs_of_exact_products(tmp_path):
    """The factors are bfloat16 on both sides; the reference multiplies them in float64."""
    tiny_model(tie_word_embeddings=False, hidden_size=256).save_pretrained(tmp_path)
    tiny_tokenizer().hf.save_pretrained(tmp_path)
    torch.manual_seed(1)
    states, targets = torch.randn(32, 256).bfloat16(), torch.randint(VOCAB, (32,))
    errors, cpu = {}, torch.device("cpu")
    for head_dtype in ("auto", "float32"):
        path = str(tmp_path)
        served = load_model(path, dtype=torch.bfloat16, device=cpu, head_dtype=head_dtype)
        trained = load_model(path, dtype=torch.float32, device=cpu, head_dtype=head_dtype)
        exact = (states.double() @ served.lm_head.weight.double().T).log_softmax(-1)
        with torch.inference_mode():
            PackedLinears(served)
            of_engine = served.lm_head(states).float().log_softmax(-1).gather(-1, targets[:, None])
        found = find_head(trained)
        with compute_in(torch.bfloat16, cpu):
            of_trainer, _ = head_scores(found, states, targets, RequestedScores(1.0, False, False))
        of_trainer.sum().backward()
        assert trained.lm_head.weight.grad.abs().max() > 0
        reference = exact.gather(-1, targets[:, None])
        errors[head_dtype] = [(of.view(-1, 1) - reference).abs().max().item() for of in (of_engine, of_trainer)]
        assert getattr(trained.config, "head_dtype", "auto") == head_dtype
    assert max(errors["float32"]) < 1e-4
    assert min(errors["auto"]) > 1e-2


def test_a_configuration_carries_the_dtype_of_the_head_to_checkpoints_and_workers(tmp_path):
    tiny_model().save_pretrained(tmp_path / "a")
    tiny_tokenizer().hf.save_pretrained(tmp_path / "a")
    cpu = torch.device("cpu")
    model = load_model(str(tmp_path / "a"), dtype=torch.float32, device=cpu, head_dtype="float32")
    trainer = make_trainer(model, dtype="bfloat16")
    trainer.step(random_batch(1))
    trainer.save(tmp_path / "b")
    for loaded in (
        load_model(str(tmp_path / "b"), dtype=torch.bfloat16, device=cpu),
        load_skeleton(tmp_path / "b", dtype=torch.bfloat16, device=cpu, attention="sdpa"),
    ):
        assert loaded(input_ids=torch.tensor([[2, 3]])).logits.dtype is torch.float32
    plain = load_model(str(tmp_path / "a"), dtype=torch.bfloat16, device=cpu)
    assert plain(input_ids=torch.tensor([[2, 3]])).logits.dtype is torch.bfloat16


def test_a_frozen_head_gets_no_gradient_and_hands_on_that_of_the_hidden_states():
    model = tiny_model(tie_word_embeddings=False)
    model.lm_head.weight.requires_grad_(False)
    padded_scores(model, torch.tensor([[2, 3, 4]]), first=1).logprobs.sum().backward()
    assert model.lm_head.weight.grad is None
    assert model.model.norm.weight.grad.abs().max() > 0


@pytest.mark.parametrize(
    ("name", "expected"), [("gemma2", "eager"), ("gpt_oss", "eager"), ("llama", "sdpa"), ("qwen3", "sdpa")]
)
def test_a_family_without_sdpa_gets_eager_attention_and_a_line(name, expected, tmp_path, caplog):
    _warn_once.cache_clear()
    more = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4} if name == "gpt_oss" else {}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(name, **{**SHAPE, **more}), attn_implementation="eager"
    )
    model.save_pretrained(tmp_path)
    for _ in range(2):
        loaded = load_model(str(tmp_path), dtype=torch.float32, device=torch.device("cpu"))
        made = load_skeleton(tmp_path, dtype=torch.float32, device=torch.device("cpu"), attention="sdpa")
        assert loaded.config._attn_implementation == made.config._attn_implementation == expected
    assert caplog.text.count("transformers has no SDPA attention for") == (expected == "eager")
