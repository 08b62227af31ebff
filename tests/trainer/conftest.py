from __future__ import annotations

from collections.abc import Iterator

import pytest
from rank_pool import RankPool
from trainer_cases import tiny_model, tiny_tokenizer


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """Four rank processes for all tests of this folder."""
    found = RankPool(tmp_path_factory.mktemp("scratch"))
    yield found
    found.close()


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    tiny_model(num_key_value_heads=2).save_pretrained(path)
    tiny_tokenizer().hf.save_pretrained(path)
    return str(path)
