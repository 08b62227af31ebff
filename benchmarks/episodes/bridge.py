"""Plays scripted multi-turn episodes over chat templates, and checks that every id is exact.

    python -m benchmarks.episodes.bridge --episodes 10000 --out results/bridge.json \
        --pair trl/chat_templates/qwen3.jinja=tokenizers/qwen3 --pair =tokenizers/smollm2

The templates in tests/environments/chat_templates are played with tokenizers that are trained for them; each `--pair`
adds a template, or the tokenizer's own, with the tokenizer of a directory. A directory `new` trains one.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

from transformers import AutoTokenizer

from baton.policy.tokenizer import Tokenizer
from benchmarks.machine import machine
from tests.environments.bridge_cases import REFUSED, BridgeBench, load, template_names, trained_tokenizer


def cases(pairs: list[str]) -> Iterator[tuple[str, str, Tokenizer]]:
    """Yield (template, tokenizer, tokenizer object)."""
    for name in template_names():
        if name not in REFUSED:
            yield name, "trained", load(name)
    for pair in pairs:
        template, _, directory = pair.partition("=")
        if directory == "new":
            yield Path(template).stem, "trained", trained_tokenizer(Path(template).read_text())
            continue
        hf = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        if template:
            hf.chat_template = Path(template).read_text()
        yield Path(template).stem or "its own", Path(directory).name, Tokenizer(hf)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=10_000)
    parser.add_argument("--pair", action="append", default=[])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    found, start_s = [], time.monotonic()
    everything = list(cases(args.pair))
    for place, (template, tokenizer, loaded) in enumerate(everything):
        bench = BridgeBench(loaded)
        for seed in range(place, args.episodes, len(everything)):
            bench.play(seed)
        new_paths = bench.counted_paths()
        assert new_paths == bench.counts["new paths"]
        row = {"template": template, "tokenizer": tokenizer, **bench.counts, "largest difference": bench.worst}
        print(json.dumps(row), flush=True)
        found.append(row)
    args.out.write_text(
        json.dumps({"machine": machine(), "seconds": round(time.monotonic() - start_s), "rows": found}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
