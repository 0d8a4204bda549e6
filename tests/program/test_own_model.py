"""Laws of the program's loop with a model that is not the course's."""

import dataclasses

import jax
import numpy as np
import pytest
from own_models import L, of_nnx
from slow_cases import slow
from small_run import assert_same_run, configuration

from course_lib import configs, measure, training
from course_lib.measure import hardware
from course_lib.program import journal, loop, observe, own_model

APPLY, INIT = of_nnx(configs.get("cpu").model.vocab_size)
OWN = own_model.builder(APPLY, INIT)
SIZES = dict(data__seq_len=L, run__log_every=1, run__checkpoint_every=1, run__sample_every=3)


@pytest.fixture
def config(text):
    return of_preset(configuration(text, training__steps=3, **SIZES))


def of_preset(config):
    """Takes back the sizes of the tests' Transformer, which another model does not read."""
    config.model.update(configs.get("cpu").model.to_dict())
    return config


@pytest.mark.parametrize("devices", [1, slow(2)])
def test_a_run_that_was_killed_goes_on_bit_for_bit(config, tmp_path, monkeypatch, devices):
    folders = killed, through = tmp_path / "killed", tmp_path / "through"
    arguments = jax.devices()[:devices], OWN

    monkeypatch.setattr(journal, "report", lambda folder: None)  # draws pictures

    def save(self, loss, real=loop.Loop.save):
        if self.step == 2:
            raise KeyboardInterrupt
        real(self, loss)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(loop.Loop, "save", save)
        loop.train(config, killed, *arguments)
    for folder in folders:
        assert loop.train(config, folder, *arguments) == loop.Ended(loop.DONE, 3)
    assert_same_run(killed, through, builder=OWN)
    assert len(journal.read(killed, "samples")) == 1


def test_two_devices_take_the_steps_of_one(config):
    config.optimizer.update(name="sgd", schedule="constant", learning_rate=0.1)
    states = []
    for count in (1, 2):
        run, place = OWN(config, jax.devices()[:count])
        state, batch = run.init(jax.random.key(0)), run.abstract()[1]
        tokens = np.arange(batch.labels.size).reshape(batch.labels.shape) % 7
        batch = dataclasses.replace(
            batch,
            inputs=tokens,
            labels=tokens + 1,
            weights=np.ones(tokens.shape, np.float32),
        )
        states.append(run.train_step(state, jax.device_put(batch, place))[0])
    for a, b in zip(*(jax.tree.leaves(state.params) for state in states), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("strategy__zero", 1),
        ("mesh__tensor", 2),
        ("optimizer__offload", True),
        ("training__backward", "in_place"),
        ("model__num_layers", 12),
        ("model__dtype", "bfloat16"),
    ],
)
def test_what_needs_to_know_the_layers_and_what_would_be_ignored_is_refused(text, field, value):
    whole = of_preset(configuration(text, **SIZES))
    part, name = field.split("__")
    whole[part][name] = value
    wrong = "mesh={.*tensor.*}" if part == "mesh" else f"{part}.{name}={value}"
    with pytest.raises(ValueError, match=f"{wrong} must be .* for another model than the"):
        OWN(whole, jax.devices()[:2])


def test_muon_trains_the_matrices_that_are_chosen(config):
    config.optimizer.name = "muon"
    with pytest.raises(ValueError, match="matrices=where"):
        OWN(config, jax.devices()[:1])
    chosen = own_model.builder(APPLY, INIT, matrices=lambda name: name.endswith("kernel"))
    run, _ = chosen(config, jax.devices()[:1])
    assert "ns_coeffs" in str(run.abstract()[0].opt_state)


def test_its_own_products_count_for_mfu(config):
    run, _ = OWN(config, jax.devices()[:1])
    flops, why = observe._flops_for_mfu(run, hardware.get("h100"))
    assert why == "" and flops == measure.flops(run.train_step, *run.abstract())
    assert flops.total != training.step_flops(config).total

    def hidden():
        raise ValueError("a kernel must have a cost estimate: its FLOPs cannot be seen")

    run = dataclasses.replace(run, flops=hidden)
    why = observe._flops_for_mfu(run, hardware.get("h100"))[1]
    assert why == "its FLOPs cannot be seen"


@pytest.mark.parametrize("width", [-1, 1])
def test_logits_of_another_width_than_the_vocabulary_are_refused(config, width):
    config.model.update(
        vocab_size=config.model.vocab_size + width, num_outputs=config.model.num_outputs + width
    )
    with pytest.raises(
        ValueError, match=r"apply_fn must return logits \[B L V\] of shape \(4, "
    ):
        OWN(config, jax.devices()[:1])
