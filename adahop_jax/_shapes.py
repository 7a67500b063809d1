"""Arrays of any rank as the 2-D views that operations take, and back."""

import math

import jax
import jax.numpy as jnp


def two_d(x: jax.Array, axis: int) -> tuple[jax.Array, int]:
    """`x` as (others, length) if the negative `axis` is its last, else as (length, others).

    Returns:
      The view and the place of `axis` in it, 1 or 0.
    """
    if axis == -1:
        return x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), 1
    x = jnp.moveaxis(x, axis, 0)
    return x.reshape(x.shape[0], math.prod(x.shape[1:])), 0


def restore(flat: jax.Array, shape: tuple[int, ...], axis: int) -> jax.Array:
    """The inverse of `two_d` for an array of `shape`, whose `axis` may have changed size."""
    if axis == -1:
        return flat.reshape(*shape[:-1], flat.shape[1])
    others = shape[:axis] + shape[axis + 1 :]
    return jnp.moveaxis(flat.reshape(flat.shape[0], *others), 0, axis)


def negative_axis(where: str, x: jax.Array, axis: int) -> int:
    """`axis` counted from the end.

    Raises:
      ValueError: it is out of range.
    """
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(
            f"{where}: axis {axis} is out of range for shape {x.shape}; "
            f"wanted {-x.ndim} <= axis < {x.ndim}"
        )
    return axis % x.ndim - x.ndim
