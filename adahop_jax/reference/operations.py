"""The operations that every backend offers, on plain 2-D arrays; here in plain JAX.

A backend is an object with nine of these functions: `quantize` and `dequantize` for arrays that
are stored; `operand`, `residual`, `views` for both at once, `load`, `matmul` and `largest` for
products; and `speedup`. What `operand` and `load` return is the backend's own: whatever its
`matmul` takes. Here it is the dequantized values in bfloat16, which holds every element times
every scale exactly. In operands and residuals the contracted axis comes last. Each is compiled as a
unit, to be quick outside `jit` too.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from adahop_jax._devices import default_device
from adahop_jax._formats import MXFormat, OperandSpec
from adahop_jax.reference.bits import normal_or_zero, rounded
from adahop_jax.reference.hadamard import hadamard, pad, random_signs
from adahop_jax.reference.philox import uniform
from adahop_jax.reference.quantize import decode, encode, pack, unpack


def rotate(
    x: jax.Array, *, axis: int, spec: OperandSpec, sign_seed: jax.Array | None = None
) -> jax.Array:
    """What `spec` does before rounding: pre-scale, signs, transform, padding to whole blocks.

    Args:
      x: (rows, columns) float32, bfloat16 or float16.
      axis: 0 or 1, the axis that the product contracts.
      spec: how the operand is quantized.
      sign_seed: uint32[2], needed where `spec.signs` is "random".

    Returns:
      `x` padded where the spec neither scales nor rotates, else float32; times `hadamard`^(1/2) if
      rotated, since the transform is unnormalized.
    """
    if spec.pre_scale != 1.0:
        x = normal_or_zero(x) * jnp.float32(spec.pre_scale)
    x = pad(x, axis=axis, multiple=spec.padded_length(1))
    if spec.hadamard:
        if spec.signs == "random":
            if sign_seed is None:
                raise ValueError("random signs need a sign_seed; pass a uint32[2]")
            signs = random_signs(spec.hadamard, sign_seed)
            signs = jnp.tile(signs, x.shape[axis] // spec.hadamard)
            x = x.astype(jnp.float32) * (signs[:, None] if axis == 0 else signs[None, :])
        x = hadamard(x, axis=axis, size=spec.hadamard)
    return x


@functools.partial(jax.jit, static_argnames=("axis", "spec"))
def quantize(
    x: jax.Array,
    *,
    axis: int,
    spec: OperandSpec,
    seed: jax.Array | None = None,
    sign_seed: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """For storage: packed codes and scale bytes.

    Args:
      x: (rows, columns) float32, bfloat16 or float16.
      axis: 0 or 1, along which the blocks run.
      spec: how the operand is quantized.
      seed: uint32[2], needed where `spec.rounding` is "stochastic".
      sign_seed: uint32[2], needed where `spec.signs` is "random".

    Returns:
      codes: uint8, packed along `axis`; scales: uint8, one a block along `axis`.
    """
    codes, scales = _encode(x, axis, spec, seed, sign_seed)
    return pack(codes, axis=axis, fmt=spec.mx), scales


@functools.partial(jax.jit, static_argnames=("axis", "fmt"))
def dequantize(codes: jax.Array, scales: jax.Array, *, axis: int, fmt: MXFormat) -> jax.Array:
    """Packed codes and scale bytes -> float32 values of the padded shape, exactly."""
    return decode(unpack(codes, axis=axis, fmt=fmt), scales, axis=axis, fmt=fmt)


@functools.partial(jax.jit, static_argnames=("axis", "spec", "norms"))
def residual(
    x: jax.Array,
    *,
    axis: int,
    spec: OperandSpec,
    seed: jax.Array | None = None,
    sign_seed: jax.Array | None = None,
    norms: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """`quantize`'s result with `axis` last, and the squared norms along it if `norms`.

    Returns:
      codes: uint8 (others, bytes); scales: uint8 (others, blocks); norms: float32 (others,) of `x`
      as it comes, or None.
    """
    codes, scales = quantize(x, axis=axis, spec=spec, seed=seed, sign_seed=sign_seed)
    return _last(codes, axis), _last(scales, axis), squared_norms(x, axis=axis) if norms else None


@functools.partial(jax.jit, static_argnames=("axis", "spec", "norms"))
def operand(
    x: jax.Array,
    *,
    axis: int,
    spec: OperandSpec,
    seed: jax.Array | None = None,
    sign_seed: jax.Array | None = None,
    norms: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """`quantize`'s result as this backend's `matmul` takes it, and norms as `residual` has them."""
    codes, scales = _encode(x, axis, spec, seed, sign_seed)
    values = decode(codes, scales, axis=axis, fmt=spec.mx).astype(jnp.bfloat16)
    return _last(values, axis), squared_norms(x, axis=axis) if norms else None


class Wanted(NamedTuple):
    """A view of a tensor: what `residual` makes of it if it is to be stored, else `operand`.

    Attributes:
      stored: which.
      axis, spec, seed, sign_seed, norms: as those take them.
    """

    stored: bool
    axis: int
    spec: OperandSpec
    seed: jax.Array | None = None
    sign_seed: jax.Array | None = None
    norms: bool = False


def views(x: jax.Array, *wanted: Wanted) -> list[tuple[Any, ...]]:
    """Several views of a tensor, which a backend may make in one read.

    Returns:
      For each, what `residual` or `operand` returns.
    """
    return [
        (residual if stored else operand)(
            x, axis=axis, spec=spec, seed=seed, sign_seed=sign_seed, norms=norms
        )
        for stored, axis, spec, seed, sign_seed, norms in wanted
    ]


def load(codes: jax.Array, scales: jax.Array, *, spec: OperandSpec) -> jax.Array:
    """What `residual` stored as this backend's `matmul` takes it."""
    return dequantize(codes, scales, axis=1, fmt=spec.mx).astype(jnp.bfloat16)


@functools.partial(jax.jit, static_argnames=("scale", "dtype"))
def matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    scale: float,
    dtype: jnp.dtype,
    rows: tuple[jax.Array, jax.Array] | None = None,
    columns: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """lhs @ rhs^T, `scale` times, accumulated in float32 and rounded once.

    Args:
      lhs: operand, (rows, length).
      rhs: operand, (columns, length).
      scale: a factor that undoes transform and pre-scales.
      dtype: of the result.
      rows: (int32 indices (k,), float32 values (k, columns)) that replace rows of the result.
      columns: (int32 indices (k,), float32 values (rows, k)) that replace columns of the result.

    Returns:
      (rows, columns) of `dtype`.
    """
    y = dot(lhs, rhs, contract=(1, 1)) * jnp.float32(scale)
    if rows is not None:
        y = y.at[rows[0], :].set(rows[1])
    if columns is not None:
        y = y.at[:, columns[0]].set(columns[1])
    return rounded(y, dtype)


def largest(norms: jax.Array, k: int) -> jax.Array:
    """Indices of the k largest norms, ties to the lower index: int32 (k,), in any order."""
    return lax.top_k(norms, k)[1]


def speedup(
    *, rows: int, columns: int, length: int, stored: MXFormat | None, extracted: str | None
) -> float | None:
    """Expected time of a (rows, length) by (length, columns) product in BF16 over its time here.

    Args:
      rows, columns: of the result.
      length: of the contracted axis.
      stored: whether the left operand is a residual.
      extracted: "lhs" or "rhs" if rows or columns are extracted, or None.

    Returns:
      The ratio; None where nothing is known, as here.
    """
    return None


def dot(
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    contract: tuple[int, int],
    precision: lax.PrecisionLike = None,
) -> jax.Array:
    """The product of two 2-D arrays over the axes `contract`, in float32 from the first sum on."""
    if default_device().platform == "cpu":
        # XLA there has no bfloat16 product with a float32 result for every layout that vmap makes.
        lhs, rhs = lhs.astype(jnp.float32), rhs.astype(jnp.float32)
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(lhs, rhs, dims, precision=precision, preferred_element_type=jnp.float32)


def squared_norms(x: jax.Array, *, axis: int) -> jax.Array:
    """Sums of squares over `axis` of a 2-D array, in float32."""
    return jnp.sum(jnp.square(x.astype(jnp.float32)), axis=axis)


def _last(x: jax.Array, axis: int) -> jax.Array:
    return x.T if axis == 0 else x


def _encode(
    x: jax.Array,
    axis: int,
    spec: OperandSpec,
    seed: jax.Array | None,
    sign_seed: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    x = rotate(x, axis=axis, spec=spec, sign_seed=sign_seed)
    noise = None
    if spec.rounding == "stochastic":
        if seed is None:
            raise ValueError("stochastic rounding needs a seed; pass a uint32[2]")
        noise = uniform((x.shape[0], x.shape[1]), seed)
    return encode(x, axis=axis, fmt=spec.mx, scale_rule=spec.scale_rule, noise=noise)
