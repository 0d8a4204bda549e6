"""Laws of a step that is compiled for devices that are not there."""

import dataclasses
import re
import types

import jax
import jax.numpy as jnp
import pytest
from shapes import needs_virtual
from slow_cases import slow

from course_lib import configs, measure, planner
from course_lib.many_devices.cluster_model import Cluster
from course_lib.many_devices.options import Strategy
from course_lib.measure import hardware, virtual
from course_lib.models import attention
from course_lib.program import dry_run, loop, settings


def tiny(**changes):
    """Returns a model of one layer without biases, trained by SGD: few kernels to compile."""
    whole = settings.complete(configs.get("cpu"))
    whole.model.update(num_layers=1, hidden_size=64, head_dim=32, num_heads=2, max_seq_len=32)
    whole.model.use_bias = False
    whole.optimizer.update(name="sgd", weight_decay=0.0, clip_norm=0.0)
    whole.data.update(batch_size=8, seq_len=32)
    whole.update_from_flattened_dict(changes)
    return whole


TRIED = ("Block",), ()  # rematerialization as configured below, and none


def advised(text, layout=0, **given):
    """Returns a configuration with the fields of one of the layouts."""
    flags, again = re.findall(r"^ +(--set .*|as it is)$", text, re.M)[layout], tiny(**given)
    for field, value in re.findall(r"--set (\S+)=(\S+)", flags):
        settings.set_field(again, field, value)
    return again


@pytest.fixture
def compiles_nothing(monkeypatch):
    """Gives a small program in place of the step, which takes long to compile."""

    def compile_small(lowered):
        x = virtual.abstract(jax.ShapeDtypeStruct((8,), "float32"), virtual.devices("h100")[0])
        return compiled(jax.jit(jnp.cos).lower(x))

    compiled = virtual.compile
    monkeypatch.setattr(virtual, "compile", compile_small)
    sends_nothing = types.SimpleNamespace(rows=list)
    monkeypatch.setattr(measure, "ledger", lambda compiled, mesh: sends_nothing)


@needs_virtual
def test_the_programs_step_is_compiled_as_configured_and_a_faster_mesh_is_advice(monkeypatch):
    given = {"training.num_minibatches": 4, "model.remat": ("Block",), "run.non_finite": "skip"}
    whole, memory, compiled = tiny(**given), measure.memory, []
    monkeypatch.setattr(
        measure, "memory", lambda step: (compiled.append(step), memory(step))[1]
    )
    found = dry_run.dry_run(whole, "h100", 2)
    run, _ = loop.build(whole, virtual.devices("h100", 2))
    tree = jax.tree.structure(jax.eval_shape(run.train_step, *run.abstract()))
    assert compiled[0].out_tree == tree and "skipped" in str(tree)
    assert found.memory["peak"] == memory(compiled[0]).peak > found.memory["arguments"]
    assert found.capacity == int(0.9 * hardware.get("h100").memory_bytes)
    assert found.flops == pytest.approx(8 * 32 * planner.shape_of(whole).flops, rel=0.01)

    cluster = Cluster(hardware.get("h100"), 2)
    ranked = [
        (each.step, each, remat)
        for remat in TRIED
        for each in planner.ranked(
            planner.Course(tiny(**given | {"model.remat": remat}), reorder=False), cluster
        )
    ]
    assert (found.axes, found.strategy, found.refused) == ({"data": 2}, Strategy(), "")
    assert found.fits and found.memory["arguments"] == found.estimate.arguments
    assert set(found.sent) == {"all-reduce along data"}
    time, unhidden, advice, *layouts = found.text().splitlines()[-9:]
    assert "2 x" in found.text() and ": fits" in found.text()
    assert "% is exposed communication; MFU " in time
    assert f"or {found.estimate.unhidden.total:.3g} s if transfers of gradients and" in unhidden
    assert advice.startswith("advice ")
    assert " layouts to try, by formulas: closer than 12%" in advice
    fastest = {}
    for _, each, remat in sorted(ranked, key=lambda found: found[0]):
        fastest.setdefault((*each.axes.items(), each.strategy.zero), (each, remat))
    for i, (each, remat) in enumerate(list(fastest.values())[:3]):
        assert f"{each.step:.3g} s per step, MFU {each.mfu:.0%}, " in layouts[2 * i]
        again = advised(found.text(), i, **given)
        settings.check(again)
        assert (settings.axes(again, 2), settings.strategy(again)) == (each.axes, each.strategy)
        assert (again.training.num_minibatches, again.model.remat) == (each.parts, remat)

    large = dataclasses.replace(found, memory=found.memory | {"peak": found.capacity + 1})
    assert not large.fits and "DOES NOT FIT" in large.text() and found.smaller == ""
    noted = dataclasses.replace(found, note="tiles in JAX, not a kernel")
    assert "note                 tiles in JAX, not a kernel" in noted.text()
    assert "\nnote " not in found.text()
    assert "recomputes" not in found.text()
    again = dataclasses.replace(found, recomputed="XLA recomputes 2 instructions")
    assert f"fits\n{'':21}XLA recomputes 2 instructions\n" in again.text()


@needs_virtual
def test_what_the_program_would_refuse_is_said_to_be_and_what_would_run_is_compiled(
    compiles_nothing,
):
    given = {"training.num_minibatches": 8}
    found = dry_run.dry_run(tiny(**given), "h100", 2)
    first, second, *_ = found.text().splitlines()
    assert first.startswith("REFUSED ") and "batch_size=8 must be a multiple of 16" in first
    assert second.startswith("instead ")
    again = advised(found.text(), **given)
    assert again.training.num_minibatches < 8
    assert (found.axes, found.strategy) == (settings.axes(again, 2), settings.strategy(again))
    with pytest.raises(ValueError, match="batch_size=8 must be a multiple of 16"):
        dry_run.dry_run(tiny(**given, **{"strategy.zero": 1}), "h100", 2)


@needs_virtual
def test_a_mesh_that_is_given_is_compiled_as_it_is(compiles_nothing):
    given = {"mesh.tensor": 2, "strategy.zero": 1}
    found = dry_run.dry_run(tiny(**given), "h100", 4)
    assert found.advice == "" and found.axes == {"data": 2, "tensor": 2}
    assert found.strategy == Strategy(zero=1)
    by_compiler = dry_run._estimate(
        tiny(**given | {"strategy.by": "compiler"}), Cluster(hardware.get("h100"), 4)
    )
    text = dataclasses.replace(found, estimate=by_compiler).text()
    assert "time per step        no estimate: by='compiler' must be 'hand'" in text


def test_advice_is_never_what_does_not_fit_nor_what_is_slower():
    h100 = hardware.get("h100")
    large = settings.complete(configs.nemotron_340b())
    fields, words = dry_run._suggest(large, Cluster(h100, 2))
    assert fields == {} and "no mesh of data, pipe and tensor is estimated to fit" in words
    fields, _ = dry_run._suggest(tiny(), Cluster(h100, 1))
    best = tiny(**fields)
    fields, words = dry_run._suggest(best, Cluster(h100, 1))
    assert fields == {} and words.splitlines()[2].strip() == "as it is"


@needs_virtual
def test_a_dtype_without_a_unit_runs_without_an_estimate_attention_without_a_kernel_never(
    compiles_nothing,
):
    found = dry_run.dry_run(tiny(**{"model.dtype": "bfloat16"}), "t4", 1)
    assert found.fits and "no rate for bfloat16 products of NVIDIA T4" in found.text()
    assert found.advice == ""
    with pytest.raises(ValueError, match="model.attention='cudnn' cannot run on NVIDIA T4"):
        dry_run.dry_run(
            tiny(**{"model.dtype": "bfloat16", "model.attention": "cudnn"}), "t4", 1
        )


@needs_virtual
@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [("blocks", "bfloat16"), slow("xla", "float16"), slow("xla", "float32")],
)
def test_attention_that_is_not_refused_compiles_for_a_t4(implementation, dtype):
    """The attention alone: a whole step in bfloat16 is compiled for a T4 above."""
    model = tiny(**{"model.attention": implementation, "model.dtype": dtype}).model
    configs.check_attention(model, hardware.get("t4"))
    x = virtual.abstract(
        jax.ShapeDtypeStruct((2, 32, 2, 32), jnp.dtype(dtype)), virtual.devices("t4")[0]
    )

    def loss(*qkv):
        return attention.attend(*qkv, implementation=implementation).sum()

    assert virtual.compile(jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, x, x)).as_text()


@needs_virtual
def test_what_the_compiler_refuses_is_said_in_one_line(monkeypatch):
    monkeypatch.setattr(dry_run, "check_attention", lambda model, accelerator: None)
    monkeypatch.setattr(loop, "check_attention", lambda model, accelerator: None)
    whole = tiny(**{"model.dtype": "bfloat16", "model.attention": "xla"})
    with pytest.raises(
        ValueError, match=r"^target='t4': its compiler refuses the step: UNIMPLEMENTED: [^\n]+$"
    ):
        dry_run.dry_run(whole, "t4", 1)
