"""Random keys to the 64-bit seeds that kernels take."""

import jax
import jax.numpy as jnp


def seed_of(key: jax.Array) -> jax.Array:
    """uint32[2] from a JAX random key, typed or raw, of any generator."""
    return jax.random.bits(key, (2,), jnp.uint32)
