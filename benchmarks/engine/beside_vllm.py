"""Baton's embedded engine beside vLLM's CPU build and transformers' `generate`: batches of 1 to 64 equal requests.

    make .venv-vllm/.installed
    .venv-vllm/bin/python benchmarks/engine/beside_vllm.py                 # about ten minutes of one core
    .venv-vllm/bin/python benchmarks/engine/beside_vllm.py --sizes 0.8M --repetitions 2

Each side is a process of its own, bound to the same cores, that sleeps while another one runs. All compute in bfloat16,
sample at temperature 1 from the whole vocabulary, and generate the number of tokens that was asked for. Baton and vLLM
also return the log-probability of each token. The table counts processor time, which other work on the machine
disturbs less than wall time; with one thread it is the time on an idle core. Raw results go to
results/beside_vllm.json, the table to results/beside_vllm.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SIDES = ("Baton", "Baton rows", "vLLM", "generate")
BATCHES = (1, 8, 64)
NEW_TOKENS = {"0.8M": 64, "135M": 64, "0.6B": 32}
SHAPES: dict[str, dict[str, Any]] = {
    "0.8M": {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
    "135M": {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    | {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64},
    "0.6B": {"vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}
    | {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
}
"""Qwen3 with random weights; 135M has the shape of SmolLM2, 0.6B that of Qwen3-0.6B."""
TIMEOUT_S = 900
KV_GIB = 2


def main() -> None:
    """Measure, and write raw results and table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--threads", nargs="+", type=int, default=[1])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--table-only", action="store_true", help="make the table from the raw results that are there")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        serve(arguments.side, arguments.model)
        return
    raw = HERE / "results" / "beside_vllm.json"
    if not arguments.table_only:
        from run import machine

        found: dict[str, Any] = {"machine": machine(), "kv_gib": KV_GIB, "cases": []}
        for size in arguments.sizes:
            with tempfile.TemporaryDirectory() as scratch:
                save(size, Path(scratch))
                for threads in arguments.threads:
                    found["cases"] += measure(size, Path(scratch), threads, arguments.batches, arguments.repetitions)
            found["load_average_after"] = os.getloadavg()
            raw.write_text(json.dumps(found, indent=1) + "\n")
    table = make_table(json.loads(raw.read_text())["cases"])
    raw.with_suffix(".md").write_text(table)
    print(table)


def save(size: str, directory: Path) -> None:
    """Save a model with random weights in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    config = Qwen3Config(**SHAPES[size], **special, max_position_embeddings=1024, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)


def measure(size: str, model: Path, threads: int, batches: list[int], repetitions: int) -> list[dict[str, Any]]:
    """Start all sides on the first `threads` cores, and let them take turns; one record for each batch size."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    own = {
        "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}-{cores[-1]}",
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the front end runs in the engine's process, as Baton's does
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads),
    }
    processes = {}
    for side in SIDES:
        command = [sys.executable, __file__, "--side", side, "--model", str(model)]
        processes[side] = subprocess.Popen(
            ["taskset", "-c", ",".join(map(str, cores)), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | own,
        )
        ask(processes[side], 1, 4)  # until the engine has started
    records = []
    for batch in batches:
        passes = []
        for process in processes.values():
            ask(process, batch, 4)  # warm up
        for _ in range(repetitions):
            passes.append({side: ask(process, batch, NEW_TOKENS[size]) for side, process in processes.items()})
            passes[-1]["load_average"] = os.getloadavg()[0]
        records.append({"size": size, "threads": threads, "batch": batch, "tokens": NEW_TOKENS[size], "passes": passes})
        print(size, threads, batch, {s: round(t["cpu_s"], 2) for s, t in list(passes[-1].items())[:-1]}, flush=True)
    for process in processes.values():
        assert process.stdin is not None
        process.stdin.close()
        process.wait(60)
    return records


def ask(process: subprocess.Popen[str], batch: int, tokens: int) -> dict[str, Any]:
    """Have a side generate a batch; return its times."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{batch} {tokens}\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    if not answer:
        sys.exit(f"error: a side ended with {process.wait(60)}; run it alone with --side to see why")
    times: dict[str, Any] = json.loads(answer)
    return times


def serve(side: str, model: Path) -> None:
    """Answer each line, `batch tokens`, with the times of one batch, as JSON."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print does not mix with the answers
    run = {
        "Baton": baton_side,
        "Baton rows": partial(baton_side, row_attention=True),
        "vLLM": vllm_side,
        "generate": generate_side,
    }[side](model)
    for line in sys.stdin:
        batch, tokens = map(int, line.split())
        print(json.dumps(run(batch, tokens)), file=out, flush=True)


Run = Callable[[int, int], dict[str, Any]]
"""Generates `tokens` tokens for each of `batch` prompts; returns the times."""


def baton_side(model: Path, *, row_attention: bool = False) -> Run:
    """The embedded engine with 64 slots. row_attention: with its compiled kernels."""
    import torch
    from sides import Baton

    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    engine = Baton(model, "bfloat16", row_attention=row_attention)
    return lambda batch, tokens: asdict(engine.run(drawn(batch, tokens)))


def generate_side(model: Path) -> Run:
    """`generate` of transformers, the whole batch at once."""
    import torch
    from sides import Generate, stopwatch

    side = Generate(model, "bfloat16")

    def run(batch: int, tokens: int) -> dict[str, Any]:
        with torch.inference_mode(), stopwatch() as timing:
            side._generate(drawn(batch, tokens), tokens)
        return asdict(timing)

    return run


def vllm_side(model: Path) -> Run:
    """vLLM with its compiler, in this process."""
    from sides import stopwatch
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(
        model=str(model),
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=192,
        max_num_seqs=64,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )

    def run(batch: int, tokens: int) -> dict[str, Any]:
        params = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, logprobs=0, detokenize=False)
        prompts = [TokensPrompt(prompt_token_ids=list(one.prompt_ids)) for one in drawn(batch, tokens)]
        with stopwatch() as timing:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        assert all(len(each.outputs[0].token_ids) == tokens for each in outputs)
        return asdict(timing)

    return run


_dice = random.Random(0)


def drawn(batch: int, tokens: int) -> list[Any]:
    """Return requests with prompts of 16 random tokens, which no side has seen before."""
    from workload import PROMPT_TOKENS, VOCABULARY, Request

    return [Request(tuple(_dice.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)), tokens) for _ in range(batch)]


def make_table(cases: list[dict[str, Any]]) -> str:
    """Markdown: tokens per processor second of each side, and the ratios by repetition."""
    lines = [
        "| model | threads | batch | Baton tok/s | Baton, row attention | vLLM | generate "
        "| row attention × vLLM (range) | Baton × vLLM (range) | row attention × generate (range) |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for case in cases:
        tokens = case["batch"] * case["tokens"]
        sides = set(case["passes"][0])
        times = {s: statistics.median(p[s]["cpu_s"] for p in case["passes"]) for s in SIDES if s in sides}
        speeds = [f"{tokens / times[side]:,.0f}" if side in sides else "" for side in SIDES]
        ratios = []
        for side, other in (("Baton rows", "vLLM"), ("Baton", "vLLM"), ("Baton rows", "generate")):
            if not {side, other} <= sides:  # results from before row attention
                ratios.append("")
                continue
            found = sorted(p[other]["cpu_s"] / p[side]["cpu_s"] for p in case["passes"])
            ratios.append(f"**{statistics.median(found):.2f}** ({found[0]:.2f} – {found[-1]:.2f})")
        lines.append(f"| {' | '.join([case['size'], str(case['threads']), str(case['batch']), *speeds, *ratios])} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
