"""Laws of naming where an array comes from."""

import pytest

from course_lib.measure import origin


@pytest.mark.parametrize(
    ("scope", "name"),
    [
        (
            "jit(f)/jvp(Model)/while/body/block/mlp/dot_general",
            "block / MLP / product, forward",
        ),
        ("jit(f)/transpose(jvp(Model))/block/mlp/transpose", "block / MLP, backward"),
        (
            "jit(f)/transpose(jvp(Model))/checkpoint/rematted_computation/block/attn/exp",
            "block / attention / exp, recomputed",
        ),
        ("jit(f)/transpose(jvp(Model))/while", "loop over the layers, backward"),
        ("params['block']['mlp']['kernel']", "block / MLP / kernel"),
        ("jit(f)/transpose(jvp(loss))/mul", "loss / mul, backward"),
        ("jit(f)/jvp(Model)/block_3/mlp/mul", "block 3 / MLP / mul, forward"),
        ("y", "y"),
    ],
)
def test_a_label_has_the_models_modules_and_the_pass_and_nothing_of_the_compiler(scope, name):
    assert origin.words(scope) == name
