"""Quartet: all three products in MXFP4; QuEST's rounding forward, unbiased rounding backward.

Source: "Quartet: Native FP4 Training Can Be Optimal for Large Language Models", arXiv:2505.14669,
algorithm 1, and the authors' code (IST-DASLab/Quartet: `QuestMXFP4Quantizer` forward,
`AlbertTsengQuantizer` and `Q(E)Q(Wt)t_Q(Et)Q(Xt)t` backward). With X (tokens, in), W (in, out), dY
(tokens, out), H the normalized Hadamard transform of blocks of 32, and S H the same after random
signs:

    X^, M_x = QuEST(X H)        W^, M_w = QuEST(H W)        Y = X^ W^
    dX = (M_x * [SR(dY S H) SR(W^^T S H)^T]) H^T            S H along `out`
    dW = H^T (M_w * [SR(X^^T S H) SR(dY^T S H)^T])          S H along tokens

QuEST takes a block's scale from its standard deviation,

    s = 2^floor(log2(2.92247856 / 6 std + 1e-8))

rounds x / s to the nearest E2M1, and beyond 6 to 6; the mask M holds where |x / s| < 6, and no
gradient passes elsewhere. SR is the quantizer of Tseng et al. (`recipes.tseng`): scale by the floor
rule, 3/4, stochastic rounding, and nothing clips. The backward pass sees the quantized X^ and W^,
still rotated, and the gradients are rotated back after the mask.

Adapted: signs are drawn anew for each layer and step and go before the transform, as the paper has
it (the code multiplies them after it); nearest is ties to even (the code rounds them to zero).
Dims are filled up with zeros to whole blocks.

Emulated: operands are quantized and dequantized, exact in BF16; products accumulate in float32 and
are rounded once.
"""

import math

import jax
import jax.numpy as jnp

import adahop_jax as ah
from adahop_jax.reference.bits import exponent, power_of_two, rounded, to_bits
from adahop_jax.reference.hadamard import hadamard
from adahop_jax.reference.operations import dot, rotate
from adahop_jax.reference.philox import uniform
from train.recipes import e2m1
from train.recipes.own_product import with_gradient

SIZE = 32
NORM = 1 / math.sqrt(SIZE)
"""Normalizes the library's transform, which is sums and differences alone."""

SEEDS = 5
"""For dY and W^ of dgrad, X^ and dY of wgrad, and the signs."""

GAUSSIAN_SCALE = 2.92247856 / 6
SHRINK = 3 / 4
SIGNED = ah.OperandSpec(hadamard=SIZE, signs="random")


def _forward(
    x: jax.Array, w: jax.Array, seeds: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    x_hat, x_mask = quest(_turned(x, axis=1), axis=1)
    w_hat, w_mask = quest(_turned(w, axis=0), axis=0)
    # Empty arrays carry what the padded ones do not know: dtypes and `in`.
    like_x, like_w = jnp.zeros((0, x.shape[1]), x.dtype), jnp.zeros((0,), w.dtype)
    y = rounded(dot(x_hat, w_hat, contract=(1, 0)), x.dtype)
    return y, (x_hat, x_mask, w_hat, w_mask, seeds, like_x, like_w)


def _backward(residuals: tuple[jax.Array, ...], dy: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x_hat, x_mask, w_hat, w_mask, seeds, like_x, like_w = residuals
    width, signs = like_x.shape[1], seeds[4]
    turned_dx = _unbiased(dy, w_hat, 1, seeds[0], seeds[1], signs)
    turned_dw = _unbiased(x_hat, dy, 0, seeds[2], seeds[3], signs)
    dx = _turned(turned_dx * x_mask.astype(jnp.float32), axis=1)[:, :width]
    dw = _turned(turned_dw * w_mask.astype(jnp.float32), axis=0)[:width]
    return rounded(dx, like_x.dtype), rounded(dw, like_w.dtype), None


product = with_gradient(_forward, _backward)
"""x @ w; takes `SEEDS` seeds."""


def quest(x: jax.Array, *, axis: int) -> tuple[jax.Array, jax.Array]:
    """MXFP4 by QuEST, blocks of 32 along `axis`.

    Args:
      x: float32 (rows, columns), rotated, whole blocks along `axis`.
      axis: 0 or 1.

    Returns:
      The dequantized values, BF16, and where they were not clipped, bool.
    """
    blocks = _blocks(x, axis)
    mean, square = (
        jnp.mean(moment, axis=axis + 1, keepdims=True) for moment in (blocks, jnp.square(blocks))
    )
    deviation = jnp.sqrt(jnp.maximum(square - jnp.square(mean), 0.0))
    scale = power_of_two(exponent(to_bits(GAUSSIAN_SCALE * deviation + 1e-8)))
    scaled = blocks / scale
    values = (e2m1.nearest(scaled) * scale).astype(jnp.bfloat16)
    return values.reshape(x.shape), (jnp.abs(scaled) < e2m1.LARGEST).reshape(x.shape)


def unbiased(x: jax.Array, seed: jax.Array, *, axis: int) -> jax.Array:
    """MXFP4 with blocks of 32 along `axis`, whose mean is 3/4 x.

    Args:
      x: float32 (rows, columns), whole blocks along `axis`.
      seed: uint32[2].
      axis: 0 or 1.

    Returns:
      The dequantized values, BF16.
    """
    blocks = _blocks(x, axis)
    largest = jnp.max(jnp.abs(blocks), axis=axis + 1, keepdims=True)
    scale = power_of_two(jnp.maximum(exponent(to_bits(largest)) - 2, -126))
    noise = _blocks(uniform((x.shape[0], x.shape[1]), seed), axis)
    values = e2m1.stochastic(SHRINK * blocks / scale, noise) * scale
    return values.astype(jnp.bfloat16).reshape(x.shape)


def _blocks(x: jax.Array, axis: int) -> jax.Array:
    """The blocks' elements at `axis + 1`."""
    return x.reshape(*x.shape[:axis], -1, SIZE, *x.shape[axis + 1 :])


def _turned(x: jax.Array, *, axis: int) -> jax.Array:
    """H along `axis`, which is its own inverse: float32, padded to whole blocks."""
    return NORM * hadamard(x, axis=axis, size=SIZE)


def _unbiased(
    lhs: jax.Array,
    rhs: jax.Array,
    axis: int,
    lhs_seed: jax.Array,
    rhs_seed: jax.Array,
    signs: jax.Array,
) -> jax.Array:
    """The product over `axis` of both, each rotated and rounded stochastically: float32."""
    a, b = (
        unbiased(NORM * rotate(tensor, axis=axis, spec=SIGNED, sign_seed=signs), seed, axis=axis)
        for tensor, seed in ((lhs, lhs_seed), (rhs, rhs_seed))
    )
    return dot(a, b, contract=(axis, axis)) / SHRINK**2
