#!/bin/bash
# Everything to measure when an accelerator is at hand, in at most 9 minutes.
#
#     bash benchmarks/on_accelerator.sh [output folder]
#
# Every part has a timeout of its own, and its output is kept. No part reads data sets
# of TensorFlow. QUICK=1 takes tiny sizes, SLOWER=10 ten times the time.
out=${1:-accelerator}
mkdir -p "$out/runs"
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 FEDJAX_PFL_CACHE=$out/cache

part() { # name, seconds, command ...
  local name=$1 seconds=$(($2 * ${SLOWER:-1})) begin=$SECONDS
  shift 2
  timeout "$seconds" "$@" >"$out/$name.txt" 2>&1
  echo "$name: exit $?, $((SECONDS - begin)) s" | tee -a "$out/parts.txt"
}

methods="fedavg fedprox fedper fedrep fedbn ditto apfl pfedme scaffold pfedc"
clients=100 repeats=3 batch=320 quick=() recipe=() torch=()
if [ -n "$QUICK" ]; then
  methods="fedavg" clients=4 repeats=1 batch=16 quick=(--quick) recipe=(--images=2000)
fi
python -c 'import torch' 2>/dev/null && torch=(--pytorch)

part device 20 python -c '
import jax, jaxlib
print(jax.__version__, jaxlib.__version__, jax.devices())'
part throughput 120 python -m benchmarks.throughput --models=cnn "${torch[@]}" \
  --markdown --repeats=$repeats "${quick[@]}"
part profile 45 python -m benchmarks.profiled --model=cnn --clients=$clients
part kernels 30 python -m benchmarks.profiled --model=mlp --clients=$clients
part resnet18 70 python -m benchmarks.throughput --models=resnet18 "${torch[@]}" \
  --markdown --repeats=1 "${quick[@]}"
part one_model 30 python -c '
import sys
from benchmarks import setting
from benchmarks.runner import Runner
from fedjax_pfl.algorithms import ALGORITHMS
setting.BATCHES["resnet18"] = batch = int(sys.argv[1])
given = {"clients": 1, "steps": 5, "each": 2 * batch, "conv": "xla"}
run = Runner(ALGORITHMS["fedavg"], *setting.build("resnet18", **given), 1, 1)
run()
print(f"one model: {5 * batch / min(run() for _ in range(3)):.0f} images/s")' $batch
part recipes 80 python -m benchmarks.recipes --recipes=pfl_research,pfllib_100 \
  --repeats=1 --markdown "${recipe[@]}"
run=(python -m experiments.main --workdir="$out/runs/first")
part run 30 "${run[@]}" --algo=fedavg --dataset=digits --num_clients=10 --rounds=3
part resume 20 "${run[@]}" --resume --rounds=5
part bfloat16 20 python -m experiments.main --algo=fedavg --dataset=digits \
  --num_clients=10 --rounds=3 --workdir="$out/runs/half" --compute_dtype=bfloat16
part contract 75 python -c '
import sys
from fedjax_pfl import testing
for name in sys.argv[1:]:
    testing.check_algorithm(name)
    print(name, "passes")' $methods
