"""Laws of a compiled program as it is read: every instruction, and how often it
runs.
"""

import jax
import jax.numpy as jnp
import pytest
from shapes import DEVICES, array, place

from course_lib.many_devices.pipeline_parallel import stage
from course_lib.measure import hlo, origin, virtual

# Forms that XLA writes for other backends and larger programs, in one small one.
TEXT = r"""
HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[8]{0})->f32[8]{0}}

FileNames
1 "model.py"

FunctionNames
1 "step"
2 "Block.__call__"

FileLocations
1 {file_name_id=1 function_name_id=1 line=9 end_line=9 column=1 end_column=2}
2 {file_name_id=1 function_name_id=2 line=4 end_line=4 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
3 {file_location_id=2 parent_frame_id=2}

%cheap (p.0: f32[8]) -> f32[8] {
  ROOT %p.0 = f32[8]{0} parameter(0)
}

%dear (p.1: f32[8]) -> f32[8] {
  %p.1 = f32[8]{0} parameter(0)
  ROOT %neg = f32[8]{0} negate(%p.1), metadata={op_name="NAMED" stack_frame_id=3}
}

%body (t: (s32[], f32[8])) -> (s32[], f32[8]) {
  %t = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = f32[8]{0} get-tuple-element(%t), index=1
  %choice = f32[8]{0} conditional(%i, %x, %x), branch_computations={%cheap, %dear}
  ROOT %next = (s32[], f32[8]{0}) tuple(%i, /*index=1*/%choice)
}

%condition (t.1: (s32[], f32[8])) -> pred[] {
  %t.1 = (s32[], f32[8]{0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%t.1), index=0
  %limit = s32[] constant(3)
  ROOT %less = pred[] compare(%i.1, %limit), direction=LT
}

ENTRY %main (x.1: f32[8]) -> (f32[8], /*index=1*/bf16[2,3]) {
  %x.1 = f32[8]{0:T(8,128)S(5)} parameter(0)
  %table = bf16[2,3]{1,0} constant({ { 1, 2, (3) }, { 4, 5, 6 } })
  %zero = s32[] constant(0)
  %start = (s32[], f32[8]{0}) tuple(%zero, %x.1)
  %loop = (s32[], f32[8]{0}) while(%start), condition=%condition, body=%body, KNOWN
  %gather = ((f32[8]{0}), f32[16]{0}) all-gather-start(%x.1), OF_TWO, dimensions={0}
  %y = f32[8]{0} get-tuple-element(%loop), index=1
  ROOT %out = (f32[8]{0}, bf16[2,3]{1,0}) tuple(%y, %table)
}
""".lstrip()


for short, long in {
    "NAMED": r"jit(step)/state[\'w\']/neg",
    "OF_TWO": "replica_groups={{0,1}}",
    "KNOWN": 'backend_config={"known_trip_count":{"n":"3"},'
    '"known_init_step":{"init":"0","step":"1"}}',
}.items():
    TEXT = TEXT.replace(short, long)


def named(module):
    return {i.name: (i, executions) for i, executions in hlo.scheduled(module)}


def test_names_shapes_operands_and_calls_are_read():
    module = hlo.parse(TEXT)
    found = {name: i for name, (i, _) in named(module).items()}
    assert (module.name, module.entry.root.name) == ("jit_step", "out")
    assert [(s.type, s.dims) for s in found["out"].shapes] == [("f32", (8,)), ("bf16", (2, 3))]
    assert [i.name for i in found["next"].operands] == ["i", "choice"]
    assert found["loop"].calls["body"][0].name == "body"
    assert found["table"].literal.startswith("{ { 1")
    assert found["neg"].scope == "jit(step)/state['w']/neg" and found["loop"].scope == ""
    assert [i.name for i in module.entry.parameters] == ["x.1"]
    assert found["x.1"].shapes[0].space == hlo.HOST_SPACE and found["y"].shapes[0].space == 0
    assert found["gather"].opcode == "all-gather-start"
    assert found["gather"].bytes == (8 + 16) * 4


def test_an_instruction_has_the_lines_that_called_each_other():
    module = hlo.parse(TEXT)
    found = {name: module.frames.get(i.frame, ()) for name, (i, _) in named(module).items()}
    lines = hlo.Frame("model.py", 4, "Block.__call__"), hlo.Frame("model.py", 9, "step")
    assert found["neg"] == lines and found["loop"] == ()
    assert origin.line(lines) == "model.py:4 in Block.__call__" and origin.line(()) == ""
    library = hlo.Frame("/lib/site-packages/flax/linear.py", 7, "Linear.__call__")
    assert origin.line((library, *lines)) == origin.line(lines)
    assert origin.line((library,)) == "linear.py:7 in Linear.__call__"


def test_a_loop_runs_its_body_as_often_as_its_trip_count_and_its_condition_once_more():
    found = named(hlo.parse(TEXT))
    times = {name: found[name][1] for name in ("choice", "neg", "less", "out")}
    assert times == {"choice": 3, "neg": 3, "less": 4, "out": 1}


def test_of_a_conditional_the_heaviest_branch_runs_if_there_are_weights_else_all_do():
    module = hlo.parse(TEXT)
    assert {"p.0", "p.1"} <= set(named(module))
    weighed = {i.name for i, _ in hlo.scheduled(module, weight=lambda i: i.bytes)}
    assert "neg" in weighed and "p.0" not in weighed


def test_a_loop_of_one_turn_or_none_counts_as_one_unless_it_is_told_how_often_it_runs():
    def program(wanted, x):
        def slot(x, wanted):
            return stage.only_if(wanted, lambda x, turn: jnp.sin(x + turn), x, "F"), None

        return jax.lax.scan(slot, x, wanted)[0]

    inputs = jnp.ones(6, bool), jnp.ones(1000)
    module = hlo.parse(jax.jit(program).lower(*inputs).compile().as_text())

    def sines(taken):
        executed = hlo.scheduled(module, taken=taken)
        inside = [(j, times) for i, times in executed for j in origin.body(i)]
        return sum(times for i, times in inside if i.opcode == "sine")

    assert (sines(None), sines({"F": 4}), sines({"B": 4})) == (6, 4, 6)


def test_a_loop_that_stops_on_data_is_refused_by_name():
    with pytest.raises(
        ValueError, match="while='loop' .* must run a number of times that the compiler knows"
    ):
        hlo.scheduled(hlo.parse(TEXT.replace("known_trip_count", "something_else")))


@pytest.mark.parametrize("text", ["", "HloModule empty", "ENTRY %main () -> f32[] {\n}"])
def test_what_is_no_program_is_refused(text):
    with pytest.raises(ValueError, match="must be HLO"):
        hlo.parse(text)


def test_a_program_that_is_only_lowered_is_told_to_compile_first():
    with pytest.raises(ValueError, match=r"StableHLO: lowered\.compile\(\)\.as_text\(\)"):
        hlo.parse(jax.jit(jnp.sin).lower(1.0).as_text())


@pytest.mark.parametrize(
    ("written", "dtype", "size"),
    [
        ("pred[3]", "bool", 3),
        ("bf16[2,3]{1,0}", "bfloat16", 12),
        ("f32[]", "float32", 4),
        ("s32[<=4]", "int32", 16),
        ("u8[0]", "uint8", 0),
        ("f8e4m3fn[10]", "float8_e4m3fn", 10),
        ("s4[3]", "int4", 2),
        ("c64[2]", "complex64", 16),
        ("token[]", "token", 0),
    ],
)
def test_types_have_jax_s_names_and_their_size(written, dtype, size):
    (shape,) = hlo.read_shapes(written)
    assert (shape.dtype, shape.bytes) == (dtype, size)


@DEVICES
def test_every_line_of_a_real_program_is_read_and_nested_loops_multiply(device):
    def loss(weights, x):
        def inner(x, w):
            with jax.named_scope("mlp"):
                return jnp.tanh(x @ w), None

        def outer(x, _):
            return jax.lax.scan(inner, x, weights)[0], None

        return jax.lax.scan(outer, x, length=5)[0]

    args = place((array(7, 64, 64), array(32, 64)), device)
    text = virtual.compile(jax.jit(loss).lower(*args)).as_text()
    module = hlo.parse(text)
    lines = [line for line in text.splitlines() if line.startswith("  ") and " = " in line]
    assert sum(len(c.instructions) for c in module.computations.values()) == len(lines) > 5
    assert any("mlp" in i.scope for i in module.instructions.values())
    assert [n for i, n in hlo.scheduled(module) if holds_product(i)] == [5 * 7]


def holds_product(i):
    return "gemm" in i.target or any(inner.opcode == "dot" for inner in origin.body(i))
