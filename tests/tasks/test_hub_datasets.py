"""Datasets by their names on the hub, read without the network from either cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton.errors import UserError
from baton.tasks.rows import hub_revision, is_hub_name, read_rows
from baton.tasks.stream import AnswerSettings, EvalTaskSettings, TaskMixture, TaskSettings
from tests.tasks.hub_cache import COMMIT, OLDER, store_dataset, store_prepared, use_cache


def gsm8k(config: str = "main", count: int = 4) -> dict[str, list[dict[str, Any]]]:
    return {
        split: [{"question": f"{config} {split} {i}?", "answer": f"1+{i}\n#### {i + 1}"} for i in range(count)]
        for split in ("train", "test")
    }


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    use_cache(tmp_path, monkeypatch)
    return tmp_path


def texts(path: str, split: str = "train", config: str | None = None) -> list[str]:
    return [row["question"] for _, row in read_rows("data", path, split, config)]


def test_a_snapshot_is_read_by_name_split_and_configuration(root: Path) -> None:
    store_dataset(root / "hub", "openai/gsm8k", {"main": gsm8k(), "socratic": gsm8k("socratic")})
    assert texts("openai/gsm8k") == [f"main train {i}?" for i in range(4)]
    assert texts("openai/gsm8k", "test", "socratic")[0] == "socratic test 0?"
    assert hub_revision("data", "openai/gsm8k", None) == COMMIT
    where, _ = read_rows("data", "openai/gsm8k")[2]
    assert where == "openai/gsm8k, row 3"
    with pytest.raises(UserError, match="data: openai/gsm8k has no split 'dev'; it has test, train: set split"):
        texts("openai/gsm8k", "dev")
    with pytest.raises(UserError, match=r"BuilderConfig 'hard' not found. Available: \['main', 'socratic'\]"):
        texts("openai/gsm8k", config="hard")


def test_a_revision_is_read_even_if_a_newer_one_is_in_the_cache(root: Path) -> None:
    store_dataset(root / "hub", "openai/gsm8k", {"main": gsm8k(count=2)}, OLDER)
    store_dataset(root / "hub", "openai/gsm8k", {"main": gsm8k(count=5)})
    assert len(texts("openai/gsm8k")) == 5
    assert len(texts(f"openai/gsm8k@{OLDER}")) == 2
    assert hub_revision("data", f"openai/gsm8k@{OLDER}", None) == OLDER
    with pytest.raises(UserError, match="neither a file nor a dataset that can be loaded"):
        texts(f"openai/gsm8k@{'2' * 40}")


def test_what_the_library_has_prepared_is_read_but_not_as_another_revision(root: Path) -> None:
    store_prepared(root, "openai/gsm8k", "main", gsm8k())
    assert texts("openai/gsm8k", "test") == [f"main test {i}?" for i in range(4)]
    assert texts(f"openai/gsm8k@{COMMIT}") == texts("openai/gsm8k")
    assert hub_revision("data", "openai/gsm8k", None) == COMMIT
    with pytest.raises(UserError, match=f"the cache has only the revision {COMMIT}"):
        texts(f"openai/gsm8k@{OLDER}")


def test_without_a_default_the_error_lists_the_configurations(root: Path) -> None:
    store_dataset(root / "hub", "cais/mmlu", {"anatomy": gsm8k("anatomy"), "virology": gsm8k("virology")})
    with pytest.raises(UserError, match=r"available configs: \['anatomy', 'virology'\]"):
        texts("cais/mmlu")


def test_a_name_that_nobody_has_says_what_to_do(root: Path) -> None:
    with pytest.raises(
        UserError, match=r"'openai/gsm9k' is neither a file nor .*`hf download --repo-type dataset openai"
    ):
        texts("openai/gsm9k")


def test_files_go_before_names(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    assert is_hub_name("data/rows")
    assert not is_hub_name("data/rows.jsonl")  # a missing file
    (root / "data").mkdir()
    assert not is_hub_name("data/rows")
    assert not any(map(is_hub_name, ("rows", "./rows", "a/b/c", "/a/b", "../b")))


def test_a_task_and_a_test_set_of_one_name_are_the_two_splits(root: Path) -> None:
    store_dataset(root / "hub", "openai/gsm8k", {"main": gsm8k()})
    store_dataset(root / "hub", "HuggingFaceH4/aime_2024", {"default": {"train": gsm8k()["train"]}})
    mixture = TaskMixture(
        [TaskSettings(name="gsm8k", path="openai/gsm8k", held_out="none")],
        AnswerSettings(format="last_number"),
        tests=[
            EvalTaskSettings(name="gsm8k_test", path="openai/gsm8k"),
            EvalTaskSettings(name="aime24", path="HuggingFaceH4/aime_2024"),  # its only split is called train
        ],
    )
    prompts = mixture.held_out(256, or_fewer=True)
    assert sorted(p.messages[-1].content for p in prompts if p.task == "gsm8k_test") == [
        f"main test {i}?" for i in range(4)
    ]
    assert {p.answer for p in prompts} == {"1", "2", "3", "4"}
    assert sum(p.task == "aime24" for p in prompts) == 4
