"""Rounding to an MX format and back, bit for bit as the format's descriptor says.

Source: OCP Microscaling Formats (MX) v1.0 for elements, scales and the `floor` rule; the `even`
rule is the one of AMD's MXFP4 code (AdaHOP, arXiv:2604.02525; Quark).
"""

import jax
import jax.numpy as jnp
from jax import lax

from adahop_jax._formats import F32_MANTISSA_BITS, SCALE_BIAS, SCALE_NAN, MXFormat, ScaleRule
from adahop_jax.reference import bits as b


def encode(
    x: jax.Array, *, axis: int, fmt: MXFormat, scale_rule: ScaleRule, noise: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Blocks along `axis` -> codes and scale bytes.

    Args:
      x: (rows, columns) float32, bfloat16 or float16, whole blocks along `axis`.
      axis: 0 or 1.
      fmt: the format.
      scale_rule: "even", "floor" or "ceil".
      noise: float32 of x's shape, uniform in [0, 1), to round stochastically; None rounds to
        nearest, ties to even.

    Returns:
      codes: uint8 of x's shape, one code each: sign bit, exponent field, mantissa.
      scales: uint8, one for each block.

      Subnormal inputs are zeros; a zero block has scale byte 0 and keeps its signs; a block with a
      NaN or an infinity has scale byte 255 and codes 0.
    """
    x_bits = _split(b.to_bits(x), axis, fmt)
    magnitude = x_bits & b.MAGNITUDE
    magnitude = jnp.where(magnitude < b.MIN_NORMAL, 0, magnitude)
    largest = magnitude.max(axis=axis + 1, keepdims=True)
    scale = scale_exponent(largest, fmt, scale_rule)

    scaled = b.from_bits(magnitude) * b.power_of_two(-scale)
    binade = jnp.maximum(b.exponent(b.to_bits(scaled)), fmt.min_exponent)
    steps = scaled * b.power_of_two(fmt.mantissa_bits - binade)
    if noise is None:
        steps = lax.round(steps, lax.RoundingMethod.TO_NEAREST_EVEN)
    else:
        whole = jnp.floor(steps)
        up = _split(noise, axis, fmt) < steps - whole
        steps = whole + up.astype(jnp.float32)
    # A mantissa that rounds up to the next binade carries into the exponent field by itself.
    code = ((binade - fmt.min_exponent) << fmt.mantissa_bits) + steps.astype(jnp.int32)
    sign = (x_bits < 0).astype(jnp.int32) << fmt.magnitude_bits
    code = jnp.minimum(code, fmt.max_code) | sign

    fault = largest >= b.INFINITY
    codes = jnp.where(fault, 0, code).astype(jnp.uint8).reshape(x.shape)
    scales = jnp.where(fault, SCALE_NAN, scale + SCALE_BIAS).astype(jnp.uint8)
    return codes, scales.squeeze(axis + 1)


def scale_exponent(largest: jax.Array, fmt: MXFormat, rule: ScaleRule) -> jax.Array:
    """Exponent of a block's scale.

    Args:
      largest: int32 bits of the float32 magnitude that is the block's largest, no subnormal.
      fmt: the format.
      rule: "even", "floor" or "ceil".

    Returns:
      int32 of the same shape, in [-127, `fmt.max_scale_exponent`]; any where a magnitude is not
      finite.
    """
    m = fmt.mantissa_bits
    match rule:
        case "floor":
            e = b.exponent(largest)
        case "even":
            e = b.exponent(largest + (1 << (F32_MANTISSA_BITS - 1 - m)))
        case "ceil":
            top = ((1 << m) - 1) << (F32_MANTISSA_BITS - m)
            e = b.exponent(largest) + ((largest & b.MANTISSA) > top).astype(jnp.int32)
    return jnp.clip(e - fmt.max_exponent, -SCALE_BIAS, fmt.max_scale_exponent)


def decode(codes: jax.Array, scales: jax.Array, *, axis: int, fmt: MXFormat) -> jax.Array:
    """Codes and scale bytes -> float32 values, exactly; subnormal results by their bits.

    Args:
      codes: (rows, columns) uint8, one code each, whole blocks along `axis`.
      scales: uint8, one for each block.
      axis: 0 or 1.
      fmt: the format.

    Returns:
      float32 of the codes' shape; NaN where the scale byte is 255, +-inf above float32's range.
    """
    code = _split(codes.astype(jnp.int32), axis, fmt)
    byte = jnp.expand_dims(scales.astype(jnp.int32), axis + 1)
    magnitude = code & fmt.max_code
    field = magnitude >> fmt.mantissa_bits
    steps = magnitude - (jnp.maximum(field - 1, 0) << fmt.mantissa_bits)
    unit = jnp.maximum(field, 1) - fmt.exponent_bias - fmt.mantissa_bits

    # value = steps * 2^(unit + byte - 127), put together from the bits of the integer `steps`.
    steps_bits = b.to_bits(steps.astype(jnp.float32))
    field = (steps_bits >> F32_MANTISSA_BITS) + unit + byte - SCALE_BIAS
    significand = steps_bits & b.MANTISSA | b.MIN_NORMAL
    normal = (field << F32_MANTISSA_BITS) | (significand & b.MANTISSA)
    subnormal = significand >> jnp.clip(1 - field, 0, 31)
    value = jnp.where(field > 0, normal, subnormal)
    value = jnp.where(field > 2 * SCALE_BIAS, b.INFINITY, value)
    value = jnp.where(steps == 0, 0, value)
    value = jnp.where(byte == SCALE_NAN, b.NAN, value)
    sign = jnp.where(code > fmt.max_code, b.SIGN, 0)
    return b.from_bits(value | sign).reshape(codes.shape)


def pack(codes: jax.Array, *, axis: int, fmt: MXFormat) -> jax.Array:
    """Codes -> bytes: a bit stream along `axis`, low bits first.

    MXFP4 puts the code of even index in the low nibble, the order of `tl.dot_scaled`.
    """
    grouped = _group(codes.astype(jnp.uint32), axis, fmt.pack_group)
    word = sum(
        lax.index_in_dim(grouped, i, axis + 1, keepdims=True) << (fmt.element_bits * i)
        for i in range(fmt.pack_group)
    )
    octets = [(word >> (8 * i)) & 0xFF for i in range(fmt.pack_bytes)]
    return _ungroup(jnp.concatenate(octets, axis + 1), axis).astype(jnp.uint8)


def unpack(packed: jax.Array, *, axis: int, fmt: MXFormat) -> jax.Array:
    """The inverse of `pack`: one code in each uint8."""
    grouped = _group(packed.astype(jnp.uint32), axis, fmt.pack_bytes)
    word = sum(
        lax.index_in_dim(grouped, i, axis + 1, keepdims=True) << (8 * i)
        for i in range(fmt.pack_bytes)
    )
    mask = (1 << fmt.element_bits) - 1
    codes = [(word >> (fmt.element_bits * i)) & mask for i in range(fmt.pack_group)]
    return _ungroup(jnp.concatenate(codes, axis + 1), axis).astype(jnp.uint8)


def _split(x: jax.Array, axis: int, fmt: MXFormat) -> jax.Array:
    """(.., length, ..) -> (.., blocks, block_size, ..), the block's elements at `axis + 1`."""
    return _group(x, axis, fmt.block_size)


def _group(x: jax.Array, axis: int, size: int) -> jax.Array:
    return x.reshape(*x.shape[:axis], x.shape[axis] // size, size, *x.shape[axis + 1 :])


def _ungroup(x: jax.Array, axis: int) -> jax.Array:
    return x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])
