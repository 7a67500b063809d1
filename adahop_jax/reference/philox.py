"""Philox-4x32-10, the counter-based generator of stochastic rounding (Salmon et al., SC 2011).

The bits of an element depend on the seed and on the element's place alone, so they are the same
for every tile, shard, backend and recomputation. `tl.rand` is the same generator.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


class State(NamedTuple):
    """What a round turns into the next.

    Attributes:
      counter: four uint32 arrays of one shape.
      keys: two uint32 scalars.
    """

    counter: tuple[jax.Array, ...]
    keys: tuple[jax.Array, jax.Array]


def philox(counter: tuple[jax.Array, ...], seed: jax.Array) -> tuple[jax.Array, ...]:
    """Four uint32 words for each counter.

    Args:
      counter: four uint32 arrays of one shape.
      seed: uint32[2].

    Returns:
      Four uint32 arrays of the counters' shape.
    """
    state = State(counter, (seed[0], seed[1]))
    for _ in range(ROUNDS):
        state = philox_round(state)
    return state.counter


def philox_round(state: State) -> State:
    """The state after one of the `ROUNDS` rounds; after the last one, its counter is the result."""
    (c0, c1, c2, c3), (k0, k1) = state
    high0, low0 = _multiply(c0, _MULTIPLIERS[0])
    high2, low2 = _multiply(c2, _MULTIPLIERS[1])
    return State(
        (high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0),
        (k0 + jnp.uint32(_WEYL[0]), k1 + jnp.uint32(_WEYL[1])),
    )


def uniform(shape: tuple[int, int], seed: jax.Array) -> jax.Array:
    """A uniform float32 in [0, 1) for every element of a (rows, columns) array.

    Element (r, c) takes word c % 4 of counter (c // 4, r, 0, 0), its upper 24 bits.
    """
    rows, columns = shape
    groups = -(-columns // 4)
    column = jnp.broadcast_to(jnp.arange(groups, dtype=jnp.uint32), (rows, groups))
    row = jnp.broadcast_to(jnp.arange(rows, dtype=jnp.uint32)[:, None], (rows, groups))
    zero = jnp.zeros((rows, groups), jnp.uint32)
    # Without the barrier XLA works out all four words anew for each of them.
    words = lax.optimization_barrier(philox((column, row, zero, zero), seed))
    words = jnp.stack(words, axis=-1)
    words = words.reshape(rows, groups * 4)[:, :columns]
    return (words >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)


def _multiply(x: jax.Array, constant: int) -> tuple[jax.Array, jax.Array]:
    """High and low 32 bits of x * constant, by halves: `lax.mulhi` fails on sharded arrays."""
    x_high, x_low = x >> 16, x & 0xFFFF
    c_high, c_low = jnp.uint32(constant >> 16), jnp.uint32(constant & 0xFFFF)
    first = x_high * c_low + ((x_low * c_low) >> 16)
    second = x_low * c_high + (first & 0xFFFF)
    return x_high * c_high + (first >> 16) + (second >> 16), x * jnp.uint32(constant)
