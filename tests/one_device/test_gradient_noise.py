"""Laws of the gradient noise scale."""

import jax.numpy as jnp
import numpy as np
import pytest

from course_lib.one_device import gradient_noise


def distance(params, batch, rng):
    """Half the mean square distance to points: the gradient of one is its difference, its noise
    the points' own.
    """
    return params - batch.mean(axis=0), {}


def test_two_norms_give_back_what_they_were_made_from():
    for small, large in ((1, 2), (8, 512)):
        made = gradient_noise.Noise(signal=3.0, noise=24.0)
        found = gradient_noise.from_norms(
            made.square_norm(small), made.square_norm(large), small, large
        )
        np.testing.assert_allclose(
            [found.signal, found.noise, found.scale], [3.0, 24.0, 8.0], rtol=1e-12
        )


def test_it_finds_the_noise_of_points_whose_noise_is_known():
    dim, deviation, away = 500, 2.0, 0.5
    points = deviation * np.random.default_rng(0).standard_normal((64, 4, dim), np.float32)
    found = gradient_noise.measure(distance, jnp.full(dim, away), list(points))
    # 64 * 4 * 500 samples of a variance: 0.4%
    assert found.noise == pytest.approx(dim * deviation**2, rel=0.05)
    # 2 |G| |g - G| / |G|^2 with |g - G|^2 = 500 * 4 / 256: 3%
    assert found.signal == pytest.approx(dim * away**2, rel=0.1)
    assert found.scale == pytest.approx(16, rel=0.15)


def test_without_noise_the_scale_is_zero_and_without_a_gradient_it_is_infinite():
    point = jnp.ones((2, 3))
    assert gradient_noise.measure(distance, jnp.zeros(3), [point, point]).scale == 0
    assert gradient_noise.Noise(signal=-0.1, noise=1.0).scale == float("inf")


@pytest.mark.parametrize("sizes", [[4], [4, 3]])
def test_batches_that_tell_nothing_are_refused(sizes):
    with pytest.raises(ValueError, match="batches must be at least two of one size"):
        gradient_noise.measure(distance, jnp.zeros(3), [jnp.ones((size, 3)) for size in sizes])
    with pytest.raises(ValueError, match="batch_size=8 must be from 1 to less than larger=8"):
        gradient_noise.from_norms(1.0, 2.0, 8, 8)
