#!/usr/bin/env bash
# The modes of rollout on this machine: workloads on the real engine, at 0.8M and 135M, and simulated ones in which the
# time of a step does not depend on its width. With names of results as arguments, only these.
set -euo pipefail
cd "$(dirname "$0")/../.."
results=benchmarks/rollout/results
mkdir -p "$results"
export PYTHONPATH="$PWD/benchmarks:$PWD"
${PYTHON:-python} -c 'import json, machine; print(json.dumps(machine.machine()))' > "$results/machine.json"
bench() {
  if [ -z "$names" ] || [[ " $names " == *" $1 "* ]]; then
    ${PYTHON:-python} -m baton bench rollout "$2" --json "${@:3}" > "$results/$1.json"
  fi
}
names="$*"
async="rollout.mode=async engine.processes=1"
keep="$async rollout.on_new_version=keep"
small="recipes/quickstart.toml"
large="recipes/smollm2-sums.toml"
kernel="engine.dtype=bfloat16 engine.row_attention=true"   # requires a C compiler
copy="$(mktemp -d)"   # the same model with room for 4,096 positions: lengths are scripted, so its outputs do not matter
cp models/quickstart/* "$copy"
sed -i 's/"max_position_embeddings": 1024/"max_position_embeddings": 4096/' "$copy/config.json"
long="engine.max_context_tokens=2112 rollout.max_new_tokens=2048 engine.slots=32 rollout.batch_groups=16"
few="rollout.batch_groups=8 rollout.group_size=8 engine.slots=16"
far="engine.max_context_tokens=2304 rollout.max_new_tokens=2048"
for name in keep resume; do
  if [ $name = keep ]; then mode="$keep"; else mode="$async"; fi
  bench short-$name $small --steps 24 $mode
  bench long-$name $small --steps 4 $mode $long model.path="$copy"
  bench mixed-$name $small --steps 24 --tail 24 --between 1.2 $mode $long model.path="$copy"
  bench kernel-short-$name $small --steps 24 $mode $kernel
  bench kernel-long-$name $small --steps 4 $mode $long $kernel model.path="$copy"
  bench kernel-mixed-$name $small --steps 24 --tail 24 --between 1.2 $mode $long $kernel model.path="$copy"
  bench large-short-$name $large --steps 4 $mode $few $kernel engine.max_context_tokens=320 rollout.max_new_tokens=128
  bench large-mixed-$name $large --steps 8 --tail 24 --between 1.2 $mode $few $kernel $far
done
bench large-long-keep $large --steps 1 --tail 12 $keep $few $kernel $far
bench flat $small --flat --steps 24
bench flat-backfill $small --flat --steps 24 rollout.mode=partial rollout.max_concurrency=512
