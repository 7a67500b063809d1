"""What the quantizing kernels share on the host: shapes and constants."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from adahop_jax._formats import MXFormat, OperandSpec
from adahop_jax._view import BLOCK, FOLDS, Kind, Request, block_signs
from adahop_jax.reference.hadamard import pad
from adahop_jax.reference.operations import rotate
from triton_kernels.machines import Machine


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
      growth: binades by which that is expected to make its largest value exceed its usual ones.
      shrink: factor that undoes it, for norms.
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
    growth: int
    shrink: float
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
        growth=round(math.log2(spec.pre_scale)) + (2 if spec.hadamard else 0),
        shrink=1 / (spec.pre_scale * math.sqrt(max(spec.hadamard, 1))),
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
