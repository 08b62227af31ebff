from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from rank_pool import RankPool
from trainer_cases import VOCAB, tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM

from tests.model_families import tiny_config


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """Four rank processes for all tests of this folder."""
    found = RankPool(tmp_path_factory.mktemp("scratch"))
    yield found
    found.close()


@pytest.fixture(scope="session")
def expert_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random Qwen3-MoE of 4 experts, of which each token is computed by 2."""
    path = tmp_path_factory.mktemp("experts")
    torch.manual_seed(0)
    shape = {"vocab_size": VOCAB, "initializer_range": 0.3, "num_key_value_heads": 2, "tie_word_embeddings": True}
    config = tiny_config("qwen3_moe")
    config.update(shape)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tiny_tokenizer().hf.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Embedding and head are gathered apart; those of `expert_path` are tied."""
    path = tmp_path_factory.mktemp("model")
    tiny_model(num_key_value_heads=2, tie_word_embeddings=False).save_pretrained(path)
    tiny_tokenizer().hf.save_pretrained(path)
    return str(path)
