"""Compare the lengths of sampled responses: Baton's engine and transformers' `generate`, on the same prompts.

    .venv/bin/python benchmarks/smollm2/lengths.py

A biased sampler would show in the mean length. The difference is over prompts; its standard error assumes that the
responses of the two sides are independent.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from baton.policy.tokenizer import Tokenizer
from baton.recipe.load import load_recipe
from baton.recipe.recipe import Recipe
from baton.rollout.engine import EngineSettings
from baton.rollout.engines.embedded.engine import EmbeddedEngine
from baton.tasks.stream import PromptStream, TaskMixture
from baton.types import Lease, PolicyVersion, Report, SamplingParams, Trajectory

HERE = Path(__file__).parent
GROUP_SIZE, MAX_NEW_TOKENS = 8, 64


def load(path: str) -> torch.nn.Module:
    """Load the model in bfloat16."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()


def of_baton(path: str, hf: PreTrainedTokenizerBase, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    """Return the lengths of each prompt's responses in tokens, the end of sequence included."""
    settings = EngineSettings(slots=64, max_context_tokens=192, dtype="bfloat16", row_attention=True)
    engine = EmbeddedEngine(load(path), Tokenizer(hf), settings, PolicyVersion("lengths", 0), (hf.eos_token_id,))
    count = len(prompts) * GROUP_SIZE
    for n in range(count):
        prompt = prompts[n // GROUP_SIZE]
        trajectory = Trajectory(n // GROUP_SIZE, n % GROUP_SIZE, prompt)
        engine.submit(Lease(n, trajectory, SamplingParams(MAX_NEW_TOKENS), n, 0, True))
    lengths, open_leases = [0] * count, count
    while open_leases:
        for report in engine.step():
            assert isinstance(report, Report)
            lengths[report.lease_id] += sum(len(segment.token_ids) for segment in report.segments)
            open_leases -= report.finish_reason is not None
    return [lengths[i : i + GROUP_SIZE] for i in range(0, count, GROUP_SIZE)]


def of_generate(path: str, hf: PreTrainedTokenizerBase, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    """Return the same of `generate`, in batches of eight prompts."""
    model, found = load(path), []
    torch.manual_seed(0)
    for begin in range(0, len(prompts), 8):
        rows = [list(ids) for ids in prompts[begin : begin + 8] for _ in range(GROUP_SIZE)]
        inputs = hf.pad({"input_ids": rows}, return_tensors="pt")
        with torch.inference_mode():
            out = model.generate(
                **inputs, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=MAX_NEW_TOKENS
            )
        new = out[:, inputs["input_ids"].shape[1] :].tolist()
        found += [row.index(hf.eos_token_id) + 1 if hf.eos_token_id in row else len(row) for row in new]
    return [found[i : i + GROUP_SIZE] for i in range(0, len(found), GROUP_SIZE)]


def main() -> None:
    """Sample on both sides and write the raw lengths."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=96)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "lengths.json")
    given = parser.parse_args()
    torch.set_num_threads(1)
    recipe = load_recipe(Recipe, Path("recipes/smollm2-sums.toml"), [])
    path = str(recipe.model.path)
    hf = AutoTokenizer.from_pretrained(path, padding_side="left")
    stream = PromptStream(TaskMixture(recipe.task, recipe.answer), 5)
    prompts = [tuple(Tokenizer(hf).prompt_ids(prompt.messages)) for prompt in stream.take(given.prompts)]
    lengths = {"Baton": of_baton(path, hf, prompts), "generate": of_generate(path, hf, prompts)}
    means = {side: [statistics.mean(row) for row in rows] for side, rows in lengths.items()}
    differences = [a - b for a, b in zip(means["Baton"], means["generate"], strict=True)]
    result = {
        "torch": torch.__version__,
        "mean_tokens": {side: statistics.mean(rows) for side, rows in means.items()},
        "difference": statistics.mean(differences),
        "standard_error": statistics.stdev(differences) / len(differences) ** 0.5,
        "lengths": lengths,
    }
    print({name: value for name, value in result.items() if name != "lengths"})
    given.out.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
