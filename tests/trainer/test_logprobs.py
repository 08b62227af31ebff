"""Log-probabilities of a padded microbatch are those of each row by itself."""

import pytest
import torch
from trainer_cases import VOCAB, tiny_model

from baton.policy.head import RequestedScores
from baton.policy.logprobs import compute_in, padded_scores, prefer_float32_attention

pytestmark = pytest.mark.numerics

LENGTHS, FIRST = (11, 7, 5), 2


@pytest.fixture
def ids_BS():
    torch.manual_seed(1)
    ids = torch.randint(2, VOCAB, (3, 11))
    for row, length in enumerate(LENGTHS):
        ids[row, length:] = 0
    return ids


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("tied", [True, False])
def test_they_equal_a_full_unpadded_forward(ids_BS, temperature, tied):
    model = tiny_model(tie_word_embeddings=tied)
    with torch.no_grad():
        scores = padded_scores(model, ids_BS, first=FIRST, wanted=RequestedScores(temperature, with_entropy=True))
        found, entropy = scores.logprobs, scores.entropy
    assert found.shape == entropy.shape == (3, 11 - FIRST)
    for row, length in enumerate(LENGTHS):
        with torch.no_grad():
            logits = model(ids_BS[row : row + 1, :length]).logits[0].double() / temperature
        table = logits.log_softmax(-1)[FIRST - 1 : length - 1]  # place t is predicted from place t − 1
        alone = table.gather(-1, ids_BS[row, FIRST:length, None]).squeeze(-1)
        torch.testing.assert_close(found[row, : length - FIRST].double(), alone, atol=1e-5, rtol=0)
        uncertain = -(table.exp() * table).sum(-1)
        torch.testing.assert_close(entropy[row, : length - FIRST].double(), uncertain, atol=1e-5, rtol=0)


def test_what_the_padding_holds_changes_no_bit(ids_BS):
    model = tiny_model()
    other = ids_BS.clone()
    for row, length in enumerate(LENGTHS):
        other[row, length:] = 33
    with torch.no_grad():
        a = padded_scores(model, ids_BS, first=FIRST).logprobs
        b = padded_scores(model, other, first=FIRST).logprobs
    for row, length in enumerate(LENGTHS):
        assert torch.equal(a[row, : length - FIRST], b[row, : length - FIRST])


def test_a_model_that_cannot_leave_logits_out_gives_the_same(ids_BS):
    class Wrapped(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, input_ids, use_cache):
            return self.model(input_ids=input_ids, use_cache=use_cache)

    model = tiny_model()
    with torch.no_grad():
        a = padded_scores(model, ids_BS, first=FIRST).logprobs
        b = padded_scores(Wrapped(model), ids_BS, first=FIRST).logprobs
    torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


def test_bfloat16_is_close_and_its_attention_runs_in_float32(ids_BS, monkeypatch):
    model = tiny_model()
    with torch.no_grad():
        exact = padded_scores(model, ids_BS, first=FIRST).logprobs
    prefer_float32_attention(model)
    seen = []
    original = torch.nn.functional.scaled_dot_product_attention

    def spy(query, *args, **kwargs):
        seen.append(query.dtype)
        return original(query, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    with compute_in(torch.bfloat16, torch.device("cpu")):
        found = padded_scores(model, ids_BS, first=FIRST).logprobs
    assert seen == [torch.float32, torch.float32]
    assert found.dtype is torch.float32
    for row, length in enumerate(LENGTHS):
        gap = (found - exact)[row, : length - FIRST].abs()
        assert 0 < gap.mean() < 0.05
    found.sum().backward()
    assert all(p.grad.dtype is torch.float32 for p in model.parameters())
