"""The inner Hadamard transform: blocks along one axis times the +-1 Sylvester matrix.

Unnormalized, so that it is sums and differences alone; a product of two operands rotated so comes
out `size` times too large, which is a power of two and exact to undo (1/sqrt(32) would not be).
"""

import jax
import jax.numpy as jnp

from adahop_jax.reference.bits import normal_or_zero


def hadamard(x: jax.Array, *, axis: int, size: int) -> jax.Array:
    """H_size times every block of `size` elements along `axis`.

    Args:
      x: (rows, columns) float array; subnormal values count as zeros, and so do subnormal sums.
        -0 counts as 0: zeros that are summed by matrix units lose their sign.
      axis: 0 or 1; zero-padded up to a multiple of `size`.
      size: a power of two.

    Returns:
      float32 of the padded shape, summed as a butterfly with strides 1, 2, 4, ...
    """
    x = pad(normal_or_zero(x), axis=axis, multiple=size)
    x = jnp.where(x == 0, 0.0, x)
    shape = x.shape
    outer, inner = (1, shape[1]) if axis == 0 else (shape[0], 1)
    stride = 1
    while stride < size:
        pairs = x.reshape(outer, shape[axis] // (2 * stride), 2, stride, inner)
        even, odd = pairs[:, :, 0], pairs[:, :, 1]
        x = normal_or_zero(jnp.stack((even + odd, even - odd), axis=2))
        stride *= 2
    return x.reshape(shape)


def random_signs(size: int, seed: jax.Array) -> jax.Array:
    """float32[size] of +-1 from a uint32[2] seed: the diagonal that randomizes the transform."""
    key = jax.random.wrap_key_data(seed, impl="threefry2x32")
    return jax.random.rademacher(key, (size,), jnp.float32)


def pad(x: jax.Array, *, axis: int, multiple: int) -> jax.Array:
    """Zeros after the end of `axis` of a 2-D array, up to a multiple of `multiple`."""
    missing = -x.shape[axis] % multiple
    if not missing:
        return x
    return jnp.pad(x, [(0, missing if i == axis else 0) for i in range(2)])
