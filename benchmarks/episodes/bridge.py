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
from contextlib import suppress
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
    start_s = time.monotonic()
    played = [(template, tokenizer, BridgeBench(loaded)) for template, tokenizer, loaded in cases(args.pair)]
    with suppress(KeyboardInterrupt):  # the episodes so far are written
        for seed in range(args.episodes):
            played[seed % len(played)][2].play(seed)
    rows = []
    for template, tokenizer, bench in played:
        rows.append({"template": template, "tokenizer": tokenizer, **bench.counts, "largest difference": bench.worst})
        print(json.dumps(rows[-1]))
        assert bench.counted_paths() == bench.counts["new paths"]
    sums = {key: sum(row.get(key, 0) for row in rows) for key in ("episodes", "turns", "tokens", "new paths")}
    result = {"machine": machine(), "seconds": round(time.monotonic() - start_s), "sums": sums, "rows": rows}
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
