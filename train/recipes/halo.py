"""HALO as a baseline of AdaHOP: the outer Hadamard transform on the gradients' path.

Source: "HALO: Hadamard-Assisted Lower-Precision Optimization", arXiv:2501.02625, level 2, and the
authors' code (IST-DASLab/HALO: `HaloFnLevel2`, and `HaloFnLevel2WithQFSDPBackwardXH` for dW). With
X (tokens, in), W (in, out), dY (tokens, out) and H a Hadamard transform:

    Y  = Q(X H) Q(H^T W)        inner: H cancels within the product
    dX = H^T (Q(H dY) Q(W^T))   outer: dY rotated along tokens, the result rotated back
    dW = H (Q(X H)^T Q(dY))     outer: X rotated along `in`, the result rotated back

Taken as they are: which tensor is rotated along which dim in which product. Adapted, to be a
baseline in MXFP4: HALO fine-tunes with one scale a tensor (INT8, FP8, FP6), here Q rounds to MXFP4,
to nearest, in blocks of 32 along the contracted dim; HALO transforms the whole dim, here H is the
transform of blocks of 32 (tokens or features, the last block filled up with zeros), as in IHT. H
is unnormalized, and 1/32 undoes it. X H is rounded anew for wgrad, since its blocks there lie along
tokens.

Emulated: operands are quantized and dequantized, exact in BF16; products accumulate in float32, in
which they are rotated back, and are rounded once.
"""

import jax

import adahop_jax as ah
from adahop_jax.reference.bits import rounded
from adahop_jax.reference.hadamard import hadamard
from adahop_jax.reference.operations import dot, operand
from train.recipes.own_product import with_gradient

SIZE = 32
PLAIN = ah.OperandSpec()


def _forward(
    x: jax.Array, w: jax.Array, seeds: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    turned_x, turned_w = _turned(x, axis=1), _turned(w, axis=0)
    y = _multiplied(_quantized(turned_x, axis=1), _quantized(turned_w, axis=0)) / SIZE
    return rounded(y, x.dtype), (x, w)


def _backward(residuals: tuple[jax.Array, ...], dy: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x, w = residuals
    turned_dx = _multiplied(_quantized(_turned(dy, axis=0), axis=1), _quantized(w, axis=1))
    turned_dw = _multiplied(_quantized(_turned(x, axis=1), axis=0), _quantized(dy, axis=0))
    dx = _turned(turned_dx, axis=0)[: x.shape[0]] / SIZE
    dw = _turned(turned_dw, axis=0)[: x.shape[1]] / SIZE
    return rounded(dx, x.dtype), rounded(dw, w.dtype), None


product = with_gradient(_forward, _backward)
"""x @ w; draws nothing."""


def _turned(x: jax.Array, *, axis: int) -> jax.Array:
    """H along `axis`, which is its own transpose: float32, padded to whole blocks."""
    return hadamard(x, axis=axis, size=SIZE)


def _quantized(x: jax.Array, *, axis: int) -> jax.Array:
    """MXFP4 with blocks along `axis`, which comes last: BF16 (others, length)."""
    return operand(x, axis=axis, spec=PLAIN)[0]


def _multiplied(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """lhs @ rhs^T in float32."""
    return dot(lhs, rhs, contract=(1, 1))
