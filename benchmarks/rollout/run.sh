#!/usr/bin/env bash
# The modes of rollout on this machine: three workloads on the real engine, and one where a step's time is flat in its width.
set -euo pipefail
cd "$(dirname "$0")/../.."
results=benchmarks/rollout/results
mkdir -p "$results"
python - > "$results/machine.json" <<'END'
import json, os, subprocess, torch, transformers
commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
names = [line.partition(":")[2].strip() for line in open("/proc/cpuinfo") if "model name" in line]
versions = {"torch": torch.__version__, "transformers": transformers.__version__}
print(json.dumps({"commit": commit, "processor": names[0], "cores": os.cpu_count(), "load_average": os.getloadavg(), **versions}))
END
bench() { python -m baton bench rollout recipes/quickstart.toml --json "${@:2}" > "$results/$1.json"; }
async="rollout.mode=async engine.processes=1"
long="rollout.max_new_tokens=512 engine.max_context_tokens=576"
bench short --steps 8 $async
bench short-keep --steps 8 $async rollout.on_new_version=keep
bench long-keep --steps 8 --modes sync,partial,async $async rollout.on_new_version=keep $long
bench flat --flat --steps 24
bench flat-backfill --flat --steps 24 rollout.mode=partial rollout.max_concurrency=512
