"""Laws of naming where an array comes from."""

import pytest

from course_lib.measure import origin


@pytest.mark.parametrize(
    ("scope", "name"),
    [
        (
            "jit(f)/jvp(Model)/while/body/block/mlp/dot_general",
            "block / mlp / product, forward",
        ),
        ("jit(f)/transpose(jvp(Model))/block/mlp/transpose", "block / mlp, backward"),
        (
            "jit(f)/transpose(jvp(Model))/checkpoint/rematted_computation/block/attn/exp",
            "block / attn / exp, recomputed",
        ),
        ("jit(f)/transpose(jvp(Model))/while", "loop over the layers, backward"),
        ("params['block']['mlp']['kernel']", "block / mlp / kernel"),
        ("y", "y"),
    ],
)
def test_a_label_has_the_models_modules_and_the_pass_and_nothing_of_the_compiler(scope, name):
    assert origin.words(scope) == name
