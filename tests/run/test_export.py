"""An exported model is the checkpoint's, in one dtype and without an adapter, and its card says how it was trained."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from baton.console import Console
from baton.errors import UserError
from baton.policy.load import load_model, save_merged
from baton.recipe.load import load_recipe
from baton.recipe.recipe import Recipe
from baton.records.run_directory import RunDirectory
from baton.run.assemble import build_loop
from baton.run.export import export_run, learning_curve, model_card
from baton.views.terminal.progress import TerminalObserver

CPU = torch.device("cpu")


def weights(path: Path) -> dict[str, torch.Tensor]:
    return dict(load_model(str(path), dtype=torch.float32, device=CPU).state_dict())


def test_an_export_has_the_newest_checkpoints_weights_in_the_dtype_of_the_first_model(
    small: Any, tmp_path: Path
) -> None:
    assert export_run(small.run, tmp_path / "out") == tmp_path / "out"
    found, wanted = weights(tmp_path / "out"), weights(small.run / "checkpoints" / "step_000003")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert {t.dtype for t in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.float32}
    assert (
        len({file.stat().st_mode for file in (tmp_path / "out").iterdir()}) == 1
    )  # one user writes, another may serve
    assert not (tmp_path / "out" / "baton").exists(), "the state for a resume stays in the run"


def test_an_older_step_and_another_dtype_can_be_chosen(small: Any, tmp_path: Path) -> None:
    export_run(small.run, tmp_path / "out", step=2, dtype="bfloat16")
    wanted = weights(small.run / "checkpoints" / "step_000002")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert found.dtype == torch.bfloat16
    assert all(torch.equal(tensor, wanted[name].bfloat16()) for name, tensor in found.state_dict().items())


def test_other_software_finds_where_a_response_ends(small: Any, tmp_path: Path) -> None:
    export_run(small.run, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    settings = GenerationConfig.from_pretrained(tmp_path / "out")
    assert settings.eos_token_id == tokenizer.eos_token_id
    assert settings.pad_token_id == tokenizer.pad_token_id
    assert tokenizer.chat_template is not None


def test_a_model_without_an_id_that_ends_responses_can_be_exported(small: Any, tmp_path: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(small.model), AutoTokenizer.from_pretrained(small.model)
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token = None
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    save_merged(str(tmp_path / "model"), tmp_path / "out", "float32")
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id is None


def test_an_adapter_is_merged_and_its_run_can_be_the_model_of_another_run(small: Any, tmp_path: Path) -> None:
    given = [f"run.directory={tmp_path}", "run.name=lora", "run.steps=1", "lora.rank=4", "trainer.lr=0.1"]
    recipe = load_recipe(Recipe, small.recipe, [*given, "eval.at_start=false", "eval.every=0"])
    loop = build_loop(recipe, TerminalObserver(Console(quiet=True), 1), resume=False, overwrite=False)
    loop.train()
    loop.close()
    export_run(tmp_path / "lora", tmp_path / "out", dtype="float32")
    assert not list((tmp_path / "out").glob("adapter*"))
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    base = load_file(small.model / "model.safetensors")
    assert tensors.keys() == base.keys()
    changed = {name for name in base if not torch.equal(tensors[name], base[name])}
    assert "model.layers.0.self_attn.q_proj.weight" in changed
    assert "model.embed_tokens.weight" not in changed
    merged = weights(tmp_path / "lora" / "checkpoints" / "step_000001")
    assert all(torch.equal(tensor, merged[name]) for name, tensor in tensors.items())
    assert "a low-rank adapter, merged into the model" in (tmp_path / "out" / "README.md").read_text()
    again = load_recipe(Recipe, small.recipe, [f"model.path={tmp_path / 'lora'}"])
    assert again.model.path == str(tmp_path / "lora" / "checkpoints" / "step_000001")


def test_the_card_has_the_hubs_metadata_and_the_results_up_to_the_exported_step(small: Any) -> None:
    run = RunDirectory.open(small.run)
    card = model_card(run, 2, "bfloat16")
    head = yaml.safe_load(card.split("---")[1])
    assert head["library_name"] == "transformers"
    assert head["tags"] == ["baton", "reinforcement-learning", "grpo"]
    assert "base_model" not in head, "a path of this machine is no name on the hub"
    assert str(small.model.parent) not in card
    assert "2 train steps of grpo on the tasks `chain_sum`, `basic_arithmetic`; all weights, bfloat16." in card
    assert "| accuracy, 95 % interval | step 0 | step 2 |" in card
    assert "step 3" not in card
    assert "| all, greedy | " in card


def test_the_learning_curve_has_a_point_for_each_step_up_to_the_exported_one(small: Any) -> None:
    drawing = ElementTree.fromstring(learning_curve(RunDirectory.open(small.run), 2))
    lines = [line.attrib["points"].split() for line in drawing.iter("{http://www.w3.org/2000/svg}polyline")]
    assert [len(points) for points in lines] == [2, 2]  # rewards of the steps 1 and 2, evaluations of 0 and 2
    assert [point.partition(",")[0] for point in lines[0]] == ["45.0", "345.0"]


def test_what_cannot_be_exported_is_refused(small: Any, tmp_path: Path) -> None:
    (tmp_path / "note.txt").touch()
    with pytest.raises(UserError, match="exists and is not an empty directory: export to another path"):
        export_run(small.run, tmp_path)
    with pytest.raises(UserError, match="has no checkpoint of step 1; there are: 2, 3"):
        export_run(small.run, tmp_path / "out", step=1)
    with pytest.raises(UserError, match="dtype: got 'int8', allowed are float32, bfloat16, float16"):
        export_run(small.run, tmp_path / "out", dtype="int8")
    with pytest.raises(UserError, match=r"is not a run: it has no run\.json"):
        export_run(small.model, tmp_path / "out")
    with pytest.raises(UserError, match=r"^cannot write .*note\.txt/out: Not a directory; give another directory$"):
        export_run(small.run, tmp_path / "note.txt" / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["note.txt"]
