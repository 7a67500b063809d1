"""What the quantizing kernels share on the host: shapes, constants, and what they return."""

import dataclasses
from typing import Any, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp

from adahop_jax._formats import MXFormat, OperandSpec
from adahop_jax.reference.hadamard import pad, random_signs
from adahop_jax.reference.operations import rotate
from triton_kernels.machines import Machine

Kind = Literal["folded", "elements", "codes"]
BLOCK = 32


class Fold(NamedTuple):
    """How block scales are folded into FP8 elements.

    Attributes:
      dtype: of the folded elements.
      top: the largest exponent, above a row's reference, at which the largest element is finite.
      low: the smallest at which every element is exact.
    """

    dtype: Any
    top: int
    low: int


FOLDS = {
    "mxfp4": Fold(jnp.float8_e5m2, top=13, low=-15),
    "mxfp6": Fold(jnp.float8_e4m3fn, top=5, low=-6),
}
"""29 binades of block scale for E2M1 in E5M2, 12 for E2M3 in E4M3."""


class View(NamedTuple):
    """A tensor as one product reads it: quantized along the contracted axis, which comes last.

    Attributes:
      data: by kind. "folded": FP8 (rows, length), elements times 2^(block's scale - row's
        reference). "elements": FP8 (rows, length), elements alone. "codes": uint8 (rows, bytes).
      scales: uint8 (rows, blocks), E8M0.
      refs: uint8 (rows,), the rows' reference exponents + 127; None unless folded.
      norms: float32 (rows,), squared norms of the rows before the transform; None unless asked for.
    """

    data: jax.Array
    scales: jax.Array
    refs: jax.Array | None
    norms: jax.Array | None

    @classmethod
    def of(
        cls,
        data: jax.Array,
        scales: jax.Array,
        refs: jax.Array,
        squares: jax.Array,
        *,
        kind: Kind,
        norms: bool,
    ) -> Self:
        """From a kernel's results, of which those not asked for hold nothing."""
        return cls(
            data,
            scales,
            refs if kind == "folded" else None,
            jnp.sum(squares, axis=1) if norms else None,
        )


def prepared(
    x: jax.Array,
    *,
    axis: int,
    spec: OperandSpec,
    seed: jax.Array | None,
    sign_seed: jax.Array | None,
) -> tuple[jax.Array, OperandSpec, tuple[jax.Array, ...]]:
    """A tensor as the kernels take it: whole blocks along `axis`.

    Transforms larger than a block are done beforehand, in plain JAX.

    Returns:
      The tensor, what is left to do, and the kernel's inputs: tensor, signs, seed; the tensor
      itself stands in for those that it does not read.

    Raises:
      ValueError: a seed is missing.
    """
    if spec.rounding == "stochastic" and seed is None:
        raise ValueError("stochastic rounding needs a seed; pass a uint32[2]")
    if spec.signs == "random" and sign_seed is None:
        raise ValueError("random signs need a sign_seed; pass a uint32[2]")
    if spec.hadamard > BLOCK:
        x = rotate(x, axis=axis, spec=spec, sign_seed=sign_seed)
        spec = dataclasses.replace(spec, hadamard=0, signs="none", pre_scale=1.0)
    x = pad(x, axis=axis, multiple=BLOCK)
    signs = x
    if spec.signs == "random":
        signs = jnp.tile(random_signs(spec.hadamard, sign_seed), BLOCK // spec.hadamard)
    return x, spec, (x, signs, x if seed is None else seed)


def view_shapes(
    rows: int, length: int, *, fmt: MXFormat, kind: Kind, norms: int
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes of data, scales, refs and norms, the latter in `norms` parts a row."""
    match kind:
        case "folded":
            data = jax.ShapeDtypeStruct((rows, length), FOLDS[fmt.name].dtype)
        case "elements":
            data = jax.ShapeDtypeStruct((rows, length), jnp.float8_e4m3fn)
        case "codes":
            data = jax.ShapeDtypeStruct((rows, fmt.packed_length(length)), jnp.uint8)
    return (
        data,
        jax.ShapeDtypeStruct((rows, fmt.blocks(length)), jnp.uint8),
        jax.ShapeDtypeStruct((rows if kind == "folded" else 1,), jnp.uint8),
        jax.ShapeDtypeStruct((rows, norms), jnp.float32),
    )


def constants(spec: OperandSpec, *, kind: Kind, machine: Machine, norms: bool) -> dict[str, Any]:
    """The kernels' constants that follow from how a tensor is quantized."""
    return {
        "KIND": kind,
        "NORMS": norms,
        "PRE_SCALE": float(spec.pre_scale),
        "SIGNS": spec.signs == "random",
        "HADAMARD": spec.hadamard,
        "RULE": spec.scale_rule,
        # Where not, only blocks at the largest scale can hold too much: the kernels look for them.
        "CLIP": spec.scale_rule == "floor" or kind == "elements",
        "STOCHASTIC": spec.rounding == "stochastic",
        "MAX_EXP": spec.mx.max_exponent,
        "MAX_VALUE": spec.mx.max_value,
        **format_constants(spec.mx, kind=kind, machine=machine),
    }


def format_constants(fmt: MXFormat, *, kind: Kind, machine: Machine) -> dict[str, Any]:
    """The kernels' constants that follow from the format."""
    fold = FOLDS[fmt.name]
    return {
        "M": fmt.mantissa_bits,
        "E": fmt.exponent_bits,
        "TOP": fold.top,
        "LOW": fold.low,
        "E5M2": kind == "folded" and fold.dtype == jnp.float8_e5m2,
        "PTX": machine.ptx,
    }
