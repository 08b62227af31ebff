"""Compute the memory tables of docs/recipes.md and docs/gpu-memory.md with the estimates of `baton train --dry-run`.

`python -m tests.recipe.recipe_memory` writes the tables. A model is its configuration only: the shapes of the published
checkpoints with the tokenizer of the shipped model and no weights. Rows of datasets are made by hand.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from pathlib import Path

import pytest

from baton.recipe.load import load_recipe
from baton.recipe.recipe import Recipe
from baton.run.dry_run import Footprint, footprint
from tests.tasks.hub_cache import snapshot, store_dataset, use_cache

ROOT = Path(__file__).parents[2]
BETWEEN = re.compile(r"(<!-- memory: [^\n]* -->\n).*?(<!-- /memory -->)", re.DOTALL)
SHAPES = {  # layers, hidden, heads, KV heads, MLP, vocabulary, tied embeddings: config.json of published checkpoints
    "Qwen/Qwen2.5-0.5B-Instruct": (24, 896, 14, 2, 4864, 151936, True),
    "Qwen/Qwen2.5-1.5B-Instruct": (28, 1536, 12, 2, 8960, 151936, True),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": (28, 1536, 12, 2, 8960, 151936, False),
    "Qwen/Qwen2.5-3B": (36, 2048, 16, 2, 11008, 151936, True),
    "Qwen/Qwen2.5-3B-Instruct": (36, 2048, 16, 2, 11008, 151936, True),
    "Qwen/Qwen2.5-7B-Instruct": (28, 3584, 28, 4, 18944, 152064, False),
    "Qwen/Qwen2.5-7B-Instruct-1M": (28, 3584, 28, 4, 18944, 152064, False),
}
DATASETS = {
    "openai/gsm8k": ("train", "test"),
    "agentica-org/DeepScaleR-Preview-Dataset": ("train",),
    "HuggingFaceH4/MATH-500": ("test",),
    "HuggingFaceH4/aime_2024": ("train",),
}
RECIPES = (
    "gsm8k-0.5b",
    "gsm8k-1.5b-lora",
    "deepscaler-1.5b-async",
    "math-7b-swarm",
    "countdown-3b",
    "knights-knaves-7b-lora",
    "sokoban-3b-lora",
)
"""Recipes that nobody has run yet, in the order of the page."""
SIZES = {
    "0.5B": "Qwen/Qwen2.5-0.5B-Instruct",
    "1.5B": "Qwen/Qwen2.5-1.5B-Instruct",
    "3B": "Qwen/Qwen2.5-3B-Instruct",
    "7B": "Qwen/Qwen2.5-7B-Instruct",
}
GIB = 2**30


def fill_cache(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Store configurations without weights and datasets of a few rows in an empty Hugging Face cache."""
    hub = use_cache(root, monkeypatch)
    for name, (layers, hidden, heads, kv_heads, mlp, vocabulary, tied) in SHAPES.items():
        folder = snapshot(hub, "model", name, "0" * 40)
        for file in (ROOT / "models" / "quickstart").glob("*"):
            if file.suffix != ".safetensors" and file.name != "config.json":
                shutil.copy(file, folder)
        (folder / "pytorch_model.bin").touch()
        config = {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "intermediate_size": mlp,
            "vocab_size": vocabulary,
            "tie_word_embeddings": tied,
            "max_position_embeddings": 32768,
            "bos_token_id": 0,
            "eos_token_id": 0,
        }
        (folder / "config.json").write_text(json.dumps(config))
    for first, (name, splits) in enumerate(DATASETS.items()):
        column = "question" if name == "openai/gsm8k" else "problem"
        chosen = {}
        for second, split in enumerate(splits):
            begin = 1000 * (10 * first + second)  # no problem is in two datasets or splits
            numbers = range(begin, begin + 40)
            chosen[split] = [{column: f"Add {i} and {i % 7}.", "answer": str(i + i % 7)} for i in numbers]
        store_dataset(hub, name, {"main": chosen}, commit=str(first) * 40)  # equal commits would share a cache


def estimate(recipe: str, *overrides: str) -> Footprint:
    """Return what `--dry-run` shows for a recipe on a machine with enough memory."""
    return footprint(
        load_recipe(Recipe, ROOT / "recipes" / f"{recipe}.toml", ["eval.num_prompts=8", *overrides]), is_here=False
    )


def recipes_table() -> str:
    """Render the memory of each recipe."""
    lines = [
        "| recipe | model | trainer, each rank | engine: weights | engine: KV cache of all slots |",
        "|---|---|---|---|---|",
    ]
    for name in RECIPES:
        found = estimate(name)
        weights = found.engine_bytes - found.cache_bytes
        cells = (found.trainer_bytes, weights, found.cache_bytes)
        size = f"{found.parameters / 1e9:.2f} B"
        lines.append(f"| `{name}` | {size} | " + " | ".join(f"{cell / GIB:.1f} GiB" for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def sizes_table() -> str:
    """Render the memory of models by size."""
    lines = [
        "| model | trainer: all weights | with a reference model (KL) | with a critic (`ppo`) | LoRA, rank 16 "
        "| engine: weights, bfloat16 | KV cache of 1,000 tokens |",
        "|---|---|---|---|---|---|---|",
    ]
    for size, name in SIZES.items():
        small = (f"model.path={name}", "trainer.dtype=bfloat16")
        plain = estimate("gsm8k-0.5b", *small)
        with_kl = estimate("gsm8k-0.5b", *small, "algorithm.kl_coef=0.01")
        with_critic = estimate("gsm8k-0.5b", *small, "algorithm=ppo")
        adapter = estimate("gsm8k-0.5b", *small, "lora.rank=16")
        cells = [found.trainer_bytes for found in (plain, with_kl, with_critic, adapter)]
        cells.append(plain.engine_bytes - plain.cache_bytes)
        recipe = load_recipe(Recipe, ROOT / "recipes" / "gsm8k-0.5b.toml")
        per_token = plain.cache_bytes / (recipe.engine.slots * recipe.engine.max_context_tokens)
        row = " | ".join(f"{cell / GIB:.1f} GiB" for cell in cells)
        lines.append(f"| {size} | {row} | {1000 * per_token / 2**20:.0f} MiB |")
    return "\n".join(lines) + "\n"


PAGES = {ROOT / "docs" / "recipes.md": recipes_table, ROOT / "docs" / "gpu-memory.md": sizes_table}

if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        fill_cache(Path(folder), patch)
        for path, render in PAGES.items():
            text = path.read_text(encoding="utf-8")
            path.write_text(BETWEEN.sub(lambda m, r=render: f"{m[1]}\n{r()}\n{m[2]}", text), encoding="utf-8")
