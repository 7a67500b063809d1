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


def prepared(
    x: jax.Array, request: Request, *, axis: int
) -> tuple[jax.Array, OperandSpec, tuple[jax.Array, ...]]:
    """A tensor as the kernels take it: whole blocks along `axis`.

    Transforms larger than a block are done beforehand, in plain JAX.

    Returns:
      The tensor, what is left to do, and the kernel's inputs: tensor, signs, seed; the tensor
      itself stands in for those that it does not read.

    Raises:
      ValueError: a seed is missing.
    """
    _, spec, seed, sign_seed, _ = request
    if spec.rounding == "stochastic" and seed is None:
        raise ValueError("stochastic rounding needs a seed; pass a uint32[2]")
    if spec.hadamard > BLOCK:
        x = rotate(x, axis=axis, spec=spec, sign_seed=sign_seed)
        spec = dataclasses.replace(spec, hadamard=0, signs="none", pre_scale=1.0)
    x = pad(x, axis=axis, multiple=BLOCK)
    signs = x
    if spec.signs == "random":
        signs = block_signs(spec, sign_seed, count=BLOCK)
    return x, spec, (x, signs, x if seed is None else seed)


def block_signs(spec: OperandSpec, sign_seed: jax.Array | None, *, count: int) -> jax.Array:
    """The random signs of `count` values, float32: those of a transform again and again.

    Raises:
      ValueError: there is no seed.
    """
    if sign_seed is None:
        raise ValueError("random signs need a sign_seed; pass a uint32[2]")
    return jnp.tile(random_signs(spec.hadamard, sign_seed), count // spec.hadamard)


def view_shapes(
    rows: int, length: int, *, fmt: MXFormat, kind: Kind, norms: int = 1
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes of data, scales, refs and norms, the latter in `norms` parts that add up."""
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
        jax.ShapeDtypeStruct((norms, rows), jnp.float32),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """What the kernels know of a tensor while they are compiled, besides its sizes.

    Attributes:
      kind: what is written, see `View`.
      norms: whether squared norms are.
      pre_scale, signs, hadamard: what happens to a block beforehand.
      rule: of the scale.
      clip: whether values may be larger than a block holds. Where not, only those of blocks at the
        largest scale can: the kernels look for them.
      ends: whether scales may lie near the ends of float32's range. The largest leaves too large
        elements.
      stochastic: whether elements are rounded so.
      m, e: an element's mantissa and exponent bits.
      max_exponent, max_value: of an element.
      top, low, least: see `Fold`.
      e5m2: whether FP8 is E5M2, not E4M3.
      fp8: whether the machine converts to FP8.
      ptx: whether kernels may use NVIDIA's instructions.
    """

    kind: Kind
    norms: bool
    pre_scale: float
    signs: bool
    hadamard: int
    rule: str
    clip: bool
    ends: bool
    stochastic: bool
    m: int
    e: int
    max_exponent: int
    max_value: float
    top: int
    low: int
    least: int
    e5m2: bool
    fp8: bool
    ptx: bool


def constants(spec: OperandSpec, *, kind: Kind, machine: Machine, norms: bool = False) -> Constants:
    """The constants that follow from how a tensor is quantized, and where."""
    fold = FOLDS[spec.format]
    return Constants(
        kind=kind,
        norms=norms,
        pre_scale=float(spec.pre_scale),
        signs=spec.signs == "random",
        hadamard=spec.hadamard,
        rule=spec.scale_rule,
        clip=spec.scale_rule == "floor" or kind == "elements",
        ends=True,
        stochastic=spec.rounding == "stochastic",
        m=spec.mx.mantissa_bits,
        e=spec.mx.exponent_bits,
        max_exponent=spec.mx.max_exponent,
        max_value=spec.mx.max_value,
        top=fold.top,
        low=fold.low,
        least=fold.least,
        e5m2=fold.dtype == jnp.float8_e5m2 and kind != "elements",
        fp8=machine.fp8,
        ptx=machine.ptx,
    )
