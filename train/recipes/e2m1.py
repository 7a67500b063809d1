"""Rounding to the elements of FP4, E2M1: 0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives."""

import jax
import jax.numpy as jnp

LARGEST = 6.0


def nearest(x: jax.Array) -> jax.Array:
    """Float32 to the nearest element, ties to even; beyond 6 to 6."""
    magnitude, step = _split(x)
    return jnp.sign(x) * jnp.round(magnitude / step) * step


def stochastic(x: jax.Array, noise: jax.Array) -> jax.Array:
    """Float32 to one of the two elements around it, so that the mean is x; beyond 6 to 6.

    Args:
      x: of any shape.
      noise: float32 of the same shape, uniform in [0, 1).
    """
    magnitude, step = _split(x)
    whole = jnp.floor(magnitude / step)
    up = noise < magnitude / step - whole
    return jnp.sign(x) * (whole + up.astype(jnp.float32)) * step


def _split(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The magnitude, at most 6, and the distance of the elements around it."""
    magnitude = jnp.minimum(jnp.abs(x), LARGEST)
    return magnitude, jnp.where(magnitude < 2, 0.5, jnp.where(magnitude < 4, 1.0, 2.0))
