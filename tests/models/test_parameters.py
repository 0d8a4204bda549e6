"""Models start with the numbers, and drop the values, of the Flax modules they once were."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from slow_cases import slow

from course_lib import configs
from course_lib.models.transformer import Transformer

SIZES = dict(num_layers=2, hidden_size=32, head_dim=8, num_heads=4, max_seq_len=16)
SIZES |= dict(vocab_size=64, num_outputs=64, dropout_rate=0.1, dtype="float32", remat=())
LATER = {"parallel_block": True, "qk_norm": True, "num_kv_heads": 2, "use_bias": False}
EXPERTS = {"num_experts": 4, "experts_per_token": 2}
UNROLLED = {"scan_layers": False}


# sums of absolute parameters, and of logits with dropout, of the last Flax version
@pytest.mark.parametrize(
    ("changes", "parameters", "logits"),
    [
        ({}, 3746.91801, 1662.78799),
        (LATER, 3413.17372, 1589.86918),
        (EXPERTS, 9135.32178, 1554.67820),
        slow({"remat": ("MLP", "Attn"), **UNROLLED}, 3715.06313, 1637.29370),
        slow(LATER | UNROLLED, 3425.54295, 1602.60574),
        slow(EXPERTS | UNROLLED, 9128.05750, 1568.93815),
    ],
    ids=str,
)
def test_first_parameters_and_dropout_are_those_of_the_flax_modules(
    changes, parameters, logits
):
    config = configs.get("155m").model
    config.update(SIZES | changes)
    model, tokens = Transformer(config), jnp.arange(32).reshape(2, 16) * 7 % 64

    @jax.jit
    def run(key, mask):
        params = model.init(key, tokens, train=False)["params"]
        rngs = {"dropout": mask}
        return params, model.apply({"params": params}, tokens, train=True, rngs=rngs)

    first, found = jax.device_get(run(jax.random.key(5), jax.random.key(3)))
    total = sum(np.abs(leaf, dtype=np.float64).sum() for leaf in jax.tree.leaves(first))
    # other keys would change the first sum by 0.2%, other masks the second by 1%
    assert total == pytest.approx(parameters, rel=1e-6)
    assert np.abs(found, dtype=np.float64).sum() == pytest.approx(logits, rel=1e-4)
