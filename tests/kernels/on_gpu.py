"""What the tests on a GPU share: memory that is not zeros, and what FP8 units may lose."""

import jax
import jax.numpy as jnp

from adahop_jax._view import CHUNK

CUT = 2.0**-12
"""Of the sum of |a||b|, lost for every 32 products that are added before a sum is broken off.

Twice what docs/numerics.md says that Hopper's FP8 units lose.
"""


def poison():
    """Fills free memory, in pieces of every size, with what is NaN in each dtype.

    So nothing passes for a result that was never written.
    """
    pieces = [jnp.full((2**k,), 0xFF, jnp.uint8) for k in range(8, 30) for _ in range(2)]
    jax.block_until_ready(pieces)


def lost(size, length, spec):
    """What a product over `length` may lose, where the magnitudes' product is `size`."""
    chunk = CHUNK["rotated" if spec.hadamard else "plain"]
    return -(-min(length, chunk) // 32) * CUT * size
