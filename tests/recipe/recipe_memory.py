"""Compute the memory tables of docs/recipes.md and docs/gpu-memory.md with the numbers of `baton train --dry-run`.

`python -m tests.recipe.recipe_memory` writes the tables. A model is its configuration only: the shapes of the published
checkpoints.
"""

from __future__ import annotations

import re
from pathlib import Path

from baton.cost.memory import stage_bytes
from baton.recipe.load import load_recipe
from baton.recipe.recipe import Recipe
from baton.run.memory import engine_terms_of, rank_phases_of
from baton.specs.model import ModelSpec, model_spec

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


def model_of(name: str) -> ModelSpec:
    """Return the numbers of a published checkpoint."""
    layers, hidden, heads, kv_heads, mlp, vocabulary, tied = SHAPES[name]
    config = {
        "model_type": "qwen2",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": mlp,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
    }
    return model_spec(config, name)


def estimate(recipe: str, *overrides: str) -> tuple[float, float, float]:
    """Return the bytes of a trainer's rank, an engine's weights and its KV cache on a GPU."""
    loaded = load_recipe(Recipe, ROOT / "recipes" / f"{recipe}.toml", [*overrides])
    model = model_of(loaded.model.path.partition("@")[0])
    rank = float(stage_bytes(rank_phases_of(loaded, model, on_cpu=False), model.num_layers))
    held = {term.name: float(term.bytes(model.num_layers)) for term in engine_terms_of(loaded, model, on_cpu=False)}
    return rank, held["engine: weights"], held["engine: KV cache"]


def recipes_table() -> str:
    """Render the memory of each recipe."""
    lines = [
        "| recipe | model | trainer, each rank | engine: weights | engine: KV cache of all slots |",
        "|---|---|---|---|---|",
    ]
    for name in RECIPES:
        path = load_recipe(Recipe, ROOT / "recipes" / f"{name}.toml").model.path
        size = f"{model_of(path.partition('@')[0]).params / 1e9:.2f} B"
        lines.append(f"| `{name}` | {size} | " + " | ".join(f"{cell / GIB:.1f} GiB" for cell in estimate(name)) + " |")
    return "\n".join(lines) + "\n"


def sizes_table() -> str:
    """Render the memory of models by size."""
    lines = [
        "| model | trainer: all weights | without checkpointing | with a reference model (KL) | with a critic (`ppo`) "
        "| LoRA, rank 16 | engine: weights, bfloat16 | KV cache of 1,000 tokens |",
        "|---|---|---|---|---|---|---|---|",
    ]
    recipe = load_recipe(Recipe, ROOT / "recipes" / "gsm8k-0.5b.toml")
    for size, name in SIZES.items():
        same = (f"model.path={name}", "trainer.dtype=bfloat16", "trainer.max_tokens_per_microbatch=8192")
        small = (*same, "trainer.activation_checkpointing=true")
        changes = ((), ("trainer.activation_checkpointing=false",), ("algorithm.kl_coef=0.01",), ("algorithm=ppo",))
        found = [estimate("gsm8k-0.5b", *small, *more) for more in (*changes, ("lora.rank=16",))]
        cells = [*(rank for rank, _, _ in found), found[0][1]]
        per_token = found[0][2] / (max(16, recipe.engine.slots) * recipe.engine.max_context_tokens)
        row = " | ".join(f"{cell / GIB:.1f} GiB" for cell in cells)
        lines.append(f"| {size} | {row} | {1000 * per_token / 2**20:.0f} MiB |")
    return "\n".join(lines) + "\n"


PAGES = {ROOT / "docs" / "recipes.md": recipes_table, ROOT / "docs" / "gpu-memory.md": sizes_table}

if __name__ == "__main__":
    for path, render in PAGES.items():
        text = path.read_text(encoding="utf-8")
        path.write_text(BETWEEN.sub(lambda m, r=render: f"{m[1]}\n{r()}\n{m[2]}", text), encoding="utf-8")
