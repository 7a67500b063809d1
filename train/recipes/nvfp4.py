"""NVFP4: blocks of 16 with an E4M3 scale each and a float32 scale a tensor.

Source: NVIDIA, "Pretraining Large Language Models with NVFP4", arXiv:2509.25149, and its
re-implementation in IST-DASLab/Quartet-II (`schemes/nvidia.py`). With X (tokens, in), W (in, out),
dY (tokens, out), S H the Hadamard transform of blocks of 16 along tokens after random signs:

    Y  = Q(X) Q(W)           X in blocks of 16 along `in`, W in blocks of 16 x 16
    dX = SR(dY) Q(W)^T       dY in blocks of 16 along `out`, W the very same values
    dW = Q(X^T S H) SR(dY^T S H)^T     both in blocks of 16 along tokens

    Q(v) = E2M1(v / (b t)) b t         b = E4M3(max|v of the block| / m / t)
                                       t = max|v of the tensor| / (448 m)

Q rounds to the nearest, ties to even, with m = 6, the largest E2M1. SR rounds stochastically with
m = 6 * 16/17: rounding b to E4M3 makes it smaller by 1/17 at most, so nothing clips and the mean is
right, but for blocks below 2^-15 of the tensor's largest value, whose b is subnormal.

Adapted: every linear layer of the blocks is quantized, where NVIDIA leaves about 15 % of them in
BF16, and signs are drawn anew for each layer and step, where NVIDIA's are fixed. The head-room of
16/17 is Quartet II's. Dims are filled up with zeros to whole blocks.

Emulated: an element times b is exact in BF16; products accumulate in float32, are multiplied by
both t, and rounded once.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

import adahop_jax as ah
from adahop_jax.reference.bits import rounded
from adahop_jax.reference.operations import dot, rotate
from adahop_jax.reference.philox import uniform
from train.recipes import e2m1
from train.recipes.own_product import with_gradient

BLOCK = 16
SEEDS = 3
"""For dY of dgrad, dY of wgrad, and the signs."""

ALONG_ROWS, ALONG_COLUMNS, SQUARE = (BLOCK, 1), (1, BLOCK), (BLOCK, BLOCK)
LARGEST_SCALE = 448.0
HEAD_ROOM = 17 / 16
ROTATED = ah.OperandSpec(hadamard=BLOCK, signs="random")


class Quantized(NamedTuple):
    """A tensor in NVFP4.

    Attributes:
      values: elements times their blocks' scales, BF16, padded to whole blocks.
      scale: of the tensor, float32 scalar.
    """

    values: jax.Array
    scale: jax.Array


def _forward(
    x: jax.Array, w: jax.Array, seeds: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    y = _multiplied(quantize(x, ALONG_COLUMNS), quantize(w, SQUARE), contract=(1, 0))
    return rounded(y[:, : w.shape[1]], x.dtype), (x, w, seeds)


def _backward(residuals: tuple[jax.Array, ...], dy: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x, w, seeds = residuals
    for_dx = quantize(dy, ALONG_COLUMNS, seed=seeds[0])
    dx = _multiplied(for_dx, quantize(w, SQUARE), contract=(1, 1))
    turned_x, turned_dy = (rotate(t, axis=0, spec=ROTATED, sign_seed=seeds[2]) for t in (x, dy))
    for_dw = quantize(turned_dy, ALONG_ROWS, seed=seeds[1])
    dw = _multiplied(quantize(turned_x, ALONG_ROWS), for_dw, contract=(0, 0)) / BLOCK
    return rounded(dx[:, : x.shape[1]], x.dtype), rounded(dw, w.dtype), None


product = with_gradient(_forward, _backward)
"""x @ w; takes `SEEDS` seeds."""


def quantize(x: jax.Array, block: tuple[int, int], *, seed: jax.Array | None = None) -> Quantized:
    """NVFP4 with blocks of `block` rows and columns.

    Args:
      x: (rows, columns), any float dtype.
      block: its two sides.
      seed: uint32[2] to round stochastically, with head-room; None rounds to nearest.
    """
    largest_element = e2m1.LARGEST / (1.0 if seed is None else HEAD_ROOM)
    padding = [(0, -size % side) for size, side in zip(x.shape, block, strict=True)]
    x = jnp.pad(x.astype(jnp.float32), padding)
    rows, columns = (size // side for size, side in zip(x.shape, block, strict=True))
    blocks = x.reshape(rows, block[0], columns, block[1])

    # One multiplication, of which XLA makes nothing else: ties fall alike wherever it is compiled.
    unit = jnp.float32(1 / (LARGEST_SCALE * largest_element))
    tensor_scale = _one_if_zero(jnp.max(jnp.abs(x), initial=0.0) * unit)
    largest = jnp.max(jnp.abs(blocks), axis=(1, 3), keepdims=True)
    scale = jnp.minimum(largest / (largest_element * tensor_scale), LARGEST_SCALE)
    scale = _one_if_zero(scale.astype(jnp.float8_e4m3fn).astype(jnp.float32))

    scaled = blocks / (scale * tensor_scale)
    if seed is None:
        elements = e2m1.nearest(scaled)
    else:
        elements = e2m1.stochastic(
            scaled, uniform((x.shape[0], x.shape[1]), seed).reshape(blocks.shape)
        )
    return Quantized((elements * scale).reshape(x.shape).astype(jnp.bfloat16), tensor_scale)


def _one_if_zero(x: jax.Array) -> jax.Array:
    return jnp.where(x == 0, 1.0, x)


def _multiplied(lhs: Quantized, rhs: Quantized, *, contract: tuple[int, int]) -> jax.Array:
    return dot(lhs.values, rhs.values, contract=contract) * (lhs.scale * rhs.scale)
