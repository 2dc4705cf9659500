#!/bin/bash
# Everything to measure when an accelerator is at hand, in at most 9 minutes.
#
#     bash benchmarks/on_accelerator.sh [output folder] [part ...]
#
# Every part has a timeout of its own, and its output is kept. No part reads data sets
# of TensorFlow. QUICK=1 takes tiny sizes, SLOWER=10 ten times the time.
out=${1:-accelerator}
shift
wanted=" $* "
mkdir -p "$out/runs"
export PYTHONPATH=$PWD:$PYTHONPATH PYTHONUNBUFFERED=1 FEDJAX_PFL_CACHE=$out/cache
export XLA_PYTHON_CLIENT_PREALLOCATE=false

part() { # name, seconds, command ...
  local name=$1 seconds=$(($2 * ${SLOWER:-1})) begin=$SECONDS
  shift 2
  [[ "$wanted" == "  " || "$wanted" == *" $name "* ]] || return
  timeout "$seconds" "$@" >"$out/$name.txt" 2>&1
  echo "$name: exit $?, $((SECONDS - begin)) s" | tee -a "$out/parts.txt"
}

methods=$(python -c '
from fedjax_pfl.algorithms import ALGORITHMS
print(*ALGORITHMS)')
clients=100 batch=320 conv=xla steps=100 size=() recipe=() workers=16
if [ -n "$QUICK" ]; then
  methods="fedavg pfedc" clients=5 batch=16 conv=auto steps=2 workers=2
  size=(--widths=4 --repeats=1 --each=20) recipe=(--images=2000)
fi
forms() { # model, forms, further flags ...
  python -m benchmarks.forms --markdown --clients=$clients --model="$1" --forms="$2" \
    "${@:3}" "${size[@]}"
}
pytorch() { # model ...
  python -c '
import sys
from benchmarks import pytorch, setting
steps = int(sys.argv[1])
for model in sys.argv[2:]:
    given = setting.SHAPES[model], setting.CLASSES, setting.batch_size(model), 1
    print(model, pytorch.steps_per_second(model, *given, steps, 3, device=pytorch.device()))
' $steps "$@"
}
one_model() { # batch, form
  python -c '
import sys
from benchmarks import setting
from benchmarks.runner import Runner
from fedjax_pfl.algorithms import ALGORITHMS
setting.BATCHES["resnet18"] = batch = int(sys.argv[1])
given = {"clients": 1, "steps": 5, "each": 2 * batch, "conv": sys.argv[2]}
run = Runner(ALGORITHMS["fedavg"], *setting.build("resnet18", **given), 1, 1)
run()
print(f"one model: {5 * batch / min(run() for _ in range(3)):.0f} images/s")' "$@"
}
contract() { # method ...
  printf '%s\n' "$@" | xargs -P $workers -I {} timeout 170 python -c '
import sys
from fedjax_pfl import testing
testing.check_algorithm(sys.argv[1])
print(sys.argv[1], "passes")' {}
}
export -f forms pytorch one_model contract
export clients steps workers
run=(python -m experiments.main --workdir="$out/runs/first")
main=(--algo=fedavg --dataset=digits --clients=10)
# a function is run by bash -c, so that timeout can end it
f() { echo "size=(${size[*]}); $*"; }

part device 20 bash -c 'nvidia-smi; python -c "
import jax, jaxlib
print(jax.__version__, jaxlib.__version__, jax.devices())"'
part cnn 120 bash -c "$(f forms cnn auto,winograd,matmul)"
part mlp 40 bash -c "$(f forms mlp28 auto --loops=dynamic,static)"
part lenet 45 bash -c "$(f forms lenet auto --loops=dynamic,static)"
part profile 40 python -m benchmarks.profiled --model=cnn --clients=$clients
part kernels 25 python -m benchmarks.profiled --model=mlp --clients=$clients
part pytorch 40 bash -c 'pytorch mlp28 lenet cnn resnet18'
part xla 60 bash -c "$(f forms cnn xla --widths=100 --repeats=3)"
part resnet18 70 bash -c "clients=$((clients / 5)); $(f forms resnet18 auto,xla \
  --widths=20 --each=64 --repeats=3)"
part one_model 30 bash -c "one_model $batch $conv"
part recipes 80 python -m benchmarks.recipes --recipes=pfl_research,pfllib_100 \
  --repeats=1 --markdown "${recipe[@]}"
part run 40 "${run[@]}" "${main[@]}" --rounds=3
part resume 30 "${run[@]}" --resume --rounds=5
part bfloat16 30 python -m experiments.main "${main[@]}" --rounds=3 \
  --workdir="$out/runs/half" --compute_dtype=bfloat16
part contract 180 bash -c "contract $(echo $methods)"
