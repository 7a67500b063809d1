"""Selection: where the largest of a list of norms stand, by counting.

As many norms stand before a norm as are larger, or as large at a lower index: that number is its
place in the order. Every norm is compared with all others, which takes no sorting.

Lowered by Mosaic GPU: a thread has one norm, and all of a part of the list to compare it with.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from adahop_jax.reference import bits as b
from adahop_jax.reference.hadamard import pad
from pallas_kernels import _warpgroup as wg
from pallas_kernels._launch import launch

AT_ONCE = 32
"""Norms that one is compared with at a time."""
PART = 2048
"""Norms that a block compares its own with."""


def _kernel(norms: Any, before: Any, scratch: tuple[()]) -> None:
    """A block: how many of a part of the norms stand before each of its own."""
    own, part = lax.axis_index("own") * wg.THREADS, lax.axis_index("part")
    mine = pl.ds(own, wg.THREADS)
    norm = wg.across(wg.load_each(norms.at[mine]), AT_ONCE)
    place = own + wg.iota(AT_ONCE, 0)

    def compare(i: Any, count: jax.Array) -> jax.Array:
        first = part * PART + i * AT_ONCE
        other = wg.load_all(norms.at[pl.ds(first, AT_ONCE)])
        other = lax.broadcast_in_dim(other, norm.shape, [1])
        earlier = first + wg.iota(AT_ONCE, 1) < place
        stands_before = (other > norm) | ((other == norm) & earlier)
        return count + jnp.sum(stands_before.astype(jnp.int32), axis=1)

    before.at[part, mine][...] = lax.fori_loop(0, PART // AT_ONCE, compare, wg.each(0))


def largest(norms: jax.Array, k: int) -> jax.Array:
    """Indices of the k largest norms, ties to the lower index, NaN before all.

    Args:
      norms: float32 (n,), not negative.
      k: how many, at most n.

    Returns:
      int32 (k,), the largest first.
    """
    n = norms.shape[0]
    # Non-negative floats are ordered as their bits are, NaN last.
    bits = (b.to_bits(norms) & b.MAGNITUDE) + 1
    bits = pad(bits[None, :], axis=1, multiple=PART)[0]
    own, parts = pl.cdiv(n, wg.THREADS), bits.shape[0] // PART
    before = launch(
        _kernel,
        bits,
        jax.ShapeDtypeStruct((parts, own * wg.THREADS), jnp.int32),
        grid=(own, parts),
        grid_names=("own", "part"),
        scratch=(),
    )
    place = jnp.sum(before, axis=0)[:n]
    where: Any = {"mode": "drop", "unique_indices": True}
    return jnp.zeros((k,), jnp.int32).at[place].set(jnp.arange(n, dtype=jnp.int32), **where)
