"""Laws of `measure.compiler`: what XLA changed, and nothing that the step's author wrote."""

import math
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from shapes import needs_virtual

from course_lib.measure import compiler, flops, hlo, memory, tape, traffic, virtual
from course_lib.measure.traffic import recomputed
from course_lib.measure.units import GIB

ROWS, WIDTH, LAYERS = 196_608, 4096, 10  # 1.5 GiB in each layer's output


def loss(ws, x, *, again=False):
    def layer(x, w):
        return jnp.tanh(x @ w)

    for w in ws:
        x = (jax.checkpoint(layer) if again else layer)(x, w)
    return jnp.mean(x.astype(jnp.float32) ** 2)


def lower(rows=ROWS, layers=LAYERS, function=None, name="a5000", more=(), **jit):
    kernels = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.bfloat16)] * layers
    x = jax.ShapeDtypeStruct((rows, WIDTH), jnp.bfloat16)
    [device] = virtual.devices(name)
    return jax.jit(function or jax.grad(loss), **jit).lower(
        *virtual.abstract((kernels, x, *more), device)
    )


def checkpointed(ws, x):
    return jax.grad(lambda ws: loss(ws, x, again=True))(ws)


@pytest.fixture(scope="module")
def above():
    lowered = lower()
    return lowered, compiler(lowered)


@needs_virtual
def test_xla_recomputes_above_its_budget_and_not_below(above):
    lowered, recomputing = above
    below = lower(rows=ROWS // 2)
    assert recomputing.clones and not compiler(below).clones
    assert "recomputes nothing" in str(compiler(below))
    assert f"recomputes {len(recomputing.clones)} instructions" in str(recomputing)


@needs_virtual
@pytest.mark.parametrize("more_gib", [0, 12])
def test_xla_recomputes_where_temporaries_would_exceed_their_budget(more_gib):
    def step(ws, x, more):  # results of 0.3 GiB, each too small to hold an activation
        return jax.grad(loss)(ws, x), more[:8]

    more = jax.ShapeDtypeStruct((more_gib * GIB // 2 + 8,), jnp.bfloat16)
    lowered = lower(rows=ROWS // 8, function=step, more=(more,))
    program = compiler(lowered)
    percent = 95 * program.temporaries / program.budget  # of the free memory; 95 by default
    for slop, recomputes in (math.ceil(percent), False), (math.floor(percent), True):
        compiled = virtual.compile(lowered, {"xla_gpu_memory_limit_slop_factor": slop})
        assert bool(compiler(compiled).clones) == recomputes


@needs_virtual
def test_arguments_larger_than_the_memory_leave_temporaries_no_budget():
    more = jax.ShapeDtypeStruct((64 * GIB,), jnp.bfloat16)
    program = compiler(lower(8, 1, lambda ws, x, more: more[:8] * x[0, 0], "t4", (more,)))
    assert program.budget == 0
    assert "XLA recomputes above: 0.00" in str(program)


@needs_virtual
def test_the_tape_and_the_roofline_show_what_is_recomputed(above):
    lowered, program = above
    assert max(tape(lowered).bytes["recomputed by XLA"]) == ROWS * WIDTH * 2
    assert "recomputed by XLA" not in tape(lower(rows=ROWS // 2)).bytes
    assert traffic(lowered).added_flops == program.added_flops


@needs_virtual
def test_without_the_pass_nothing_is_recomputed_and_the_peak_is_higher(above):
    lowered, _ = above
    jax.config.update("jax_compiler_enable_remat_pass", False)
    try:
        without = lower()
        assert not compiler(without).clones and compiler(without).budget is None
        assert memory(without).peak > memory(lowered).peak
    finally:
        jax.config.update("jax_compiler_enable_remat_pass", True)


@needs_virtual
def test_what_jax_checkpoint_recomputes_is_written_and_no_clone():
    program = compiler(lower(rows=ROWS // 2, function=checkpointed))
    plain = compiler(lower(rows=ROWS // 2))
    assert not program.clones and program.added_flops == {}
    assert program.written > plain.written


@needs_virtual
def test_the_flops_that_run_are_those_written_and_those_of_clones(above):
    lowered, program = above
    written = flops(jax.grad(loss), *lowered.in_avals[0])
    products = [clone for clone in program.clones if clone.kind == "matmul"]
    assert program.added_flops == {"bfloat16": len(products) * 2 * ROWS * WIDTH**2}
    assert (
        program.flops["bfloat16"] - program.added_flops["bfloat16"] == written.total["bfloat16"]
    )
    assert program.compiled - program.written == len(products)


@needs_virtual
def test_budget_and_results_are_the_limit_in_xlas_warning():
    # XLA writes its warning to the process's stderr, from a level that is read at its start.
    code = """
import jax, test_compiler as t
step = lambda ws, x: jax.tree.map(lambda w, g: w - g, ws, jax.grad(t.loss)(ws, x))
for donate in (), 0:
    program = t.lower(rows=2 * t.ROWS, function=step, donate_argnums=donate)
    print(t.compiler(program).budget + t.memory(program).outputs)
"""
    folders = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    env = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "0", "PYTHONPATH": folders}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    warned = re.findall(r"Can't reduce memory use below \S+ \((\d+) bytes\)", ran.stderr)
    assert ran.stdout.split() == warned and len(warned) == 2


@needs_virtual
def test_collectives_beside_products_are_those_of_the_schedule():
    mesh = jax.make_mesh((2,), ("data",), devices=virtual.devices("h100", 2))
    whole, rows = (NamedSharding(mesh, P(*axis)) for axis in ((), ("data",)))
    matrix = jax.ShapeDtypeStruct((2048, 2048), jnp.bfloat16)
    lowered = jax.jit(jax.grad(loss), out_shardings=whole).lower(
        virtual.abstract([matrix] * 3, whole), virtual.abstract(matrix, rows)
    )
    apart = {"xla_gpu_all_reduce_combine_threshold_bytes": 0}
    combined, three = (compiler(virtual.compile(lowered, o)) for o in (None, apart))
    assert (combined.transfers, combined.overlapped) == (1, 0)
    assert (three.transfers, three.overlapped) == (3, 2)


def test_what_xla_only_moves_or_what_moves_no_bytes_is_not_recomputed():
    module = hlo.parse("""HloModule moved

ENTRY %main (a.remat: f32[4]) -> (f32[4], f32[4]) {
  %a.remat = f32[4]{0} parameter(0)
  %exp.1.remat2 = f32[4]{0} exponential(%a.remat)
  %exp.1.remat3 = f32[4]{0} exponential(%a.remat)
  %tanh = f32[4]{0} tanh(%a.remat)
  %bitcast = f32[4]{0} bitcast(%tanh)
  %bitcast.remat.1 = f32[4]{0} bitcast(%tanh)
  %tanh.remat.1.remat = f32[4]{0} tanh(%a.remat)
  ROOT %t = (f32[4]{0}, f32[4]{0}) tuple(%exp.1.remat2, %tanh.remat.1.remat)
}
""")
    assert [i.name for i in recomputed(module)] == ["exp.1.remat3", "tanh.remat.1.remat"]


def test_a_loop_counts_once_as_text_and_as_often_as_it_turns():
    def scanned(ws, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]

    program = compiler(jax.jit(scanned).lower(jnp.ones((5, 8, 8)), jnp.ones((8, 8))))
    assert (program.written, program.compiled, program.executions) == (1, 1, 5)
    assert program.flops == {"float32": 5 * 2 * 8**3}


def test_what_cannot_be_known_is_unknown():
    def until_large(x):
        return jax.lax.while_loop(lambda x: x[0, 0] < 9, lambda x: x @ x, x)

    lowered = jax.jit(until_large).lower(jnp.ones((8, 8)))
    program, elsewhere = compiler(lowered), compiler(lowered.compile())
    assert program.written == 1
    assert (program.executions, program.flops, program.added_flops, program.budget) == (
        None,
    ) * 4
    assert elsewhere.written is None
    assert "unknown written" in str(elsewhere)


def test_results_that_overwrite_arguments_are_saved_by_donation():
    x = jnp.ones((256, 256))
    for donate, saved in ((), 0), ((0,), x.nbytes):
        lowered = jax.jit(lambda x: x + 1, donate_argnums=donate).lower(x)
        assert compiler(lowered).donated_bytes == saved
