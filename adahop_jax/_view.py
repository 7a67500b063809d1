"""A tensor as kernels hand it to a product: what they are asked for, and what they return."""

from typing import Any, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp

from adahop_jax._formats import OperandSpec
from adahop_jax.reference.hadamard import random_signs

Kind = Literal["folded", "elements", "codes"]
BLOCK = 32


class Request(NamedTuple):
    """How a view is asked for.

    Attributes:
      kind: what is written, see `View`.
      spec: how the tensor is quantized.
      seed: uint32[2], for stochastic rounding.
      sign_seed: uint32[2], for random signs.
      norms: whether its rows' squared norms are asked for too.
    """

    kind: Kind
    spec: OperandSpec
    seed: jax.Array | None = None
    sign_seed: jax.Array | None = None
    norms: bool = False


class Fold(NamedTuple):
    """How block scales are folded into FP8 elements.

    Attributes:
      dtype: of the folded elements.
      top: the largest exponent, above a row's reference, at which the largest element is finite.
      low: the smallest at which every element is exact.
      least: the exponent of the least normal FP8 number.
    """

    dtype: Any
    top: int
    low: int
    least: int


FOLDS = {
    "mxfp4": Fold(jnp.float8_e5m2, top=13, low=-15, least=-14),
    "mxfp6": Fold(jnp.float8_e4m3fn, top=5, low=-6, least=-6),
}
"""29 binades of block scale for E2M1 in E5M2, 12 for E2M3 in E4M3."""

CHUNK = {"plain": 2048, "rotated": 8192}
"""Elements that Hopper's FP8 units may sum before the sum is continued in float32."""


class View(NamedTuple):
    """A tensor as one product reads it: quantized along the contracted axis, which comes last.

    Attributes:
      data: by kind. "folded": FP8 (rows, length), elements times 2^(block's scale - row's
        reference). "elements": FP8 (rows, length), elements alone. "codes": uint8 (rows, bytes).
      scales: uint8 (rows, blocks), E8M0; None if folded.
      refs: uint8 (rows,), the rows' reference exponents + 127; None unless folded.
      norms: float32 (rows,), squared norms of the rows before the transform; None unless asked for.
    """

    data: jax.Array
    scales: jax.Array | None
    refs: jax.Array | None
    norms: jax.Array | None

    @classmethod
    def of(
        cls,
        request: Request,
        data: jax.Array,
        scales: jax.Array,
        refs: jax.Array,
        squares: jax.Array,
    ) -> Self:
        """From a kernel's results, of which those not asked for hold nothing."""
        folded = request.kind == "folded"
        return cls(
            data,
            None if folded else scales,
            refs if folded else None,
            jnp.sum(squares, axis=0) if request.norms else None,
        )


def block_signs(spec: OperandSpec, sign_seed: jax.Array | None, *, count: int) -> jax.Array:
    """The random signs of `count` values, float32: those of a transform again and again.

    Raises:
      ValueError: there is no seed.
    """
    if sign_seed is None:
        raise ValueError("random signs need a sign_seed; pass a uint32[2]")
    return jnp.tile(random_signs(spec.hadamard, sign_seed), count // spec.hadamard)
