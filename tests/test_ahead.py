"""Costs of compiled programs: reading them, and every method's round on a TPU."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from benchmarks import compiled, language
from fedjax_pfl.algorithms import ALGORITHMS

PROGRAM = """HloModule jit_round

%body.1 (p: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {
  %p = (s32[], f32[8,128]{1,0}) parameter(0)
  %x = f32[8,128]{1,0} get-tuple-element(%p), index=1
  %fusion.1 = f32[8,128]{1,0} fusion(%x), calls=%f, metadata={op_name="a/loop_over_batches/transpose(jvp())/mul"}, backend_config={"estimated_cycles":"70"}
  %pool = f32[4,128]{1,0} reduce-window(%fusion.1), metadata={op_name="a/loop_over_batches/max"}
  %sort = f32[16,128]{1,0} sort(%pool), metadata={op_name="a/loop_over_batches/sort"}
}

ENTRY %main.2 (x: f32[8,128]) -> f32[8,128] {
  %x.1 = f32[8,128]{1,0} parameter(0)
  %while = (s32[], f32[8,128]) while(%x.1), condition=%cond, body=%body.1, backend_config={"known_trip_count":{"n":"5"}}
  ROOT %copy = f32[8,128]{1,0} copy(%x.1), backend_config={"estimated_cycles":"9"}
}

%cond (p.1: (s32[], f32[8,128])) -> pred[] {
  %p.1 = (s32[], f32[8,128]{1,0}) parameter(0)
}
"""

BUNDLES = """LB: loop body
     0   :  { %s1 = smov 0 }
   0x1 LB: > { %s2 = sphi %s1, %s3 }
   0x2   : > { %p4 = scmp.ge.s32.totalorder %s3, 6 /* loop exit test */ }
   0x3   :  {}
   0x4   :  { %5 = sbr.rel (!%p4) target = $region1 }
   0x5   :  { %6 = vsyncpa 1 }
"""


def test_parts_of_a_program_and_what_lacks_a_cost(tmp_path):
    (tmp_path / "17-pool-72-final_bundles.txt").write_text(BUNDLES)
    counted = compiled.bundles(tmp_path)
    assert counted == {"pool": 1 + 6 * 4 + 1}
    round, step = compiled.Costs(PROGRAM, counted, 1e6).parts
    assert (round.kind, round.cost, round.missing) == ("round", 9, [])
    assert (step.kind, step.trips, step.cost) == ("local step", 5, 70 + 26)
    assert step.counted == 26
    assert compiled.missing([round, step]) == "sort"


LOOPS = """%layer.1 (p: f32[8,128]) -> f32[8,128] {
  %p = f32[8,128]{1,0} parameter(0)
  %fusion.1 = f32[8,128]{1,0} fusion(%p), metadata={op_name="loop_over_batches/transpose(jvp())/mul"}, backend_config={"estimated_cycles":"3"}
}

%few.1 (p: (s32[], f32[8,128])) -> pred[] {
  %four = s32[]{:T(128)} constant(4), metadata={op_name="a"}
  ROOT %lt = pred[] compare(%p, %four), direction=LT
}

%step.1 (p: f32[8,128]) -> f32[8,128] {
  %p = f32[8,128]{1,0} parameter(0)
  %fusion.2 = f32[8,128]{1,0} fusion(%p), metadata={op_name="loop_over_batches/transpose(jvp())/add"}, backend_config={"estimated_cycles":"5"}
  %while.1 = f32[8,128]{1,0} while(%p), condition=%few.1, body=%layer.1
}

%many.1 (p: (s32[], s32[])) -> pred[] {
  ROOT %lt = pred[] compare(%p, %p), direction=LT
}

ENTRY %main.1 (x: f32[8,128]) -> f32[8,128] {
  %x = f32[8,128]{1,0} parameter(0)
  %while.2 = f32[8,128]{1,0} while(%x), condition=%many.1, body=%step.1
  ROOT %copy = f32[8,128]{1,0} copy(%x), backend_config={"estimated_cycles":"9"}
}
"""


def test_a_local_step_has_its_loops_of_known_length():
    parts = compiled.Costs(LOOPS, {}, 1.0).parts
    trips = [(part.kind, part.trips) for part in parts]
    assert trips == [("round", 1), ("local step", None), ("local step", 4)]
    assert compiled.step(parts) == 5 + 4 * 3


def test_collectives_are_counted_in_bytes():
    text = """  %a = bf16[4,8]{1,0} all-reduce(%x), replica_groups={}
  %b = f32[2,3]{1,0} all-gather-start(%y), dimensions={0}
  %c = f32[2,3]{1,0} all-gather-done(%b)
  %d = f32[5]{0} all-reduce(%z), to_apply=%add
"""
    assert language.collectives(text) == {"all-reduce": 64 + 20, "all-gather": 24}


def test_products_have_the_shapes_of_their_operands():
    text = """ENTRY %main.1 (x: f32[4,8]) -> f32[4,2] {
  %x = f32[4,8]{1,0} parameter(0)
  %w = f32[8,2]{1,0} constant({...})
  %dot = f32[4,2]{1,0} dot(%x, %w), lhs_contracting_dims={1}, metadata={op_name="a"}
  %gemm = (f32[4,2]{1,0}, s8[16]{0}) custom-call(%dot, %w), custom_call_target="__cublas$gemm"
  ROOT %add = f32[4,2]{1,0} add(%dot, %dot)
}
"""
    assert compiled.products(text) == [[(4, 8), (8, 2)], [(4, 2), (8, 2)]]
    assert compiled.float32_products(text) == (["a", ""], 2)
    half = text.replace("%w = f32", "%w = bf16")
    assert compiled.float32_products(half) == ([], 2)


def test_a_gpu_is_rated_by_bytes():
    round, step = compiled.Costs(PROGRAM, {}, 8.0).parts
    assert (round.cost, step.cost) == (9, 70)  # estimates
    assert step.bundled == (8 * 128 + 8 * 128) * 4 / 8  # of fusion.1
    assert [op.name for op in step.missing] == ["sort"]


def test_bytes_count_where_they_take_longer_than_the_bundles():
    _, step = compiled.Costs(PROGRAM, {"pool": 1}, 8.0).parts
    assert step.cost == 70 + (4 * 128 + 8 * 128) * 4 / 8


COMPILE = """
import json, sys
sys.path.insert(0, "tests")
from benchmarks import ahead
from fedjax_pfl.kernels.platform import on
failed = {}
target = ahead.TARGETS[sys.argv[1]]
platform = "tpu" if target.platform == "tpu" else "gpu"
with on(platform), ahead.prepared(target) as (sharding, _):
    import toy
    from fedjax_pfl import simulate
    for name in json.loads(sys.argv[2]):
        task = toy.method_task(name)
        program = simulate.program(toy.METHODS[name], task, width=4, checked=False)
        for step in (True, False):
            try:
                federation = simulate.with_frozen(toy.federation(), task)
                ahead.lower(program, federation, sharding, step=step).compile()
            except Exception as error:
                part = "round" if step else "evaluation"
                failed[f"{name}, {part}"] = str(error).splitlines()[0][:200]
print(json.dumps(failed))
"""
COMPILERS = {"v5e": "libtpu", "h100": "jax_cuda12_plugin"}
# rounds that a compiler refuses, each with the words of its error
REFUSED = {
    "v5e": {},
    "h100": {
        # the deviceless compiler has no device for a callback to the host
        "fedma, round": "gpu",
        "pfedma, round": "gpu",
        # a fault of XLA: no tiles for a product of 24x4
        "fedmrl, evaluation": "tile sizes",
        "fedsr, evaluation": "tile sizes",
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("target", COMPILERS)
def test_every_method_compiles_for_an_accelerator(target):
    if find_spec(COMPILERS[target]) is None:
        pytest.skip(f"{COMPILERS[target]} is not installed")
    names = json.dumps(sorted(ALGORITHMS))
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, target, names],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    failed = json.loads(done.stdout.splitlines()[-1])
    print(target, failed)
    for part, error in failed.items():
        assert part in REFUSED[target], f"{part}: {error}"
        assert REFUSED[target][part] in error
