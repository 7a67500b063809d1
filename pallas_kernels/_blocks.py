"""The method on blocks of 32 values, of which each thread of a warpgroup has one.

A block is a row of a (THREADS, 32) array, so that transform, scale, rounding and packing need no
other thread, and are written as they are for a single block. The transform is a butterfly in the
reference's own order: codes and scales equal the reference's bit for bit.

Only values near the ends of float32's range need care: where they may be met, `careful` drops
subnormal sums and cuts off what the largest scale cannot hold.
"""

import jax
import jax.numpy as jnp

from adahop_jax._formats import F32_MANTISSA_BITS, MXFormat, OperandSpec
from adahop_jax.reference import bits as b
from adahop_jax.reference.philox import philox
from adahop_jax.reference.quantize import scale_exponent
from pallas_kernels import _warpgroup as wg

BLOCK = 32


def rotate(x: jax.Array, spec: OperandSpec, signs: jax.Array | None, *, careful: bool) -> jax.Array:
    """Blocks (THREADS, 32) float32 scaled, their signs changed, and times the +-1 Sylvester matrix.

    Args:
      x: the blocks.
      spec: how they are quantized; the transform is no larger than a block.
      signs: float32 (32,), or None.
      careful: whether sums may be subnormal; such count as zeros.
    """
    if careful or spec.pre_scale != 1.0:
        x = b.normal_or_zero(x)
    if spec.pre_scale != 1.0:
        x = x * spec.pre_scale
    if signs is not None:
        x = x * jax.lax.broadcast_in_dim(signs, x.shape, [1])
    if not spec.hadamard:
        return x
    # Subnormal values are dropped, and a zero that is rotated loses its sign.
    x = jnp.where(jnp.abs(x) < float(jnp.finfo(jnp.float32).tiny), 0.0, x)
    place = wg.iota(BLOCK, 1)
    stride = 1
    while stride < spec.hadamard:
        partner = wg.swapped(x, stride)
        x = jnp.where(place & stride == 0, x + partner, partner - x)
        if careful:
            x = b.normal_or_zero(x)
        stride *= 2
    return x


def block_scales(y: jax.Array, spec: OperandSpec) -> tuple[jax.Array, jax.Array]:
    """Exponents of the blocks' scales and bits of their largest magnitudes, int32 (THREADS,).

    Those of a NaN are larger than all others.
    """
    largest = jnp.max(b.to_bits(y) & b.MAGNITUDE, axis=1)
    normal = jnp.where(largest < b.MIN_NORMAL, 0, largest)
    return scale_exponent(normal, spec.mx, spec.scale_rule), largest


def round_elements(
    y: jax.Array,
    scale: jax.Array,
    top: jax.Array,
    ref: jax.Array,
    noise: jax.Array | None,
    spec: OperandSpec,
    *,
    careful: bool,
) -> jax.Array:
    """Blocks rounded to elements times 2^(scale - ref), float32; NaN in those with a fault.

    Args:
      y: rotated blocks (THREADS, 32).
      scale, top: of the blocks, from `block_scales`.
      ref: int32 (THREADS,), the exponent that they are divided by.
      noise: float32 (THREADS, 32), uniform in [0, 1), to round stochastically; or None.
      spec: how they are quantized.
      careful: whether a block may be too large for its scale.
    """
    m = spec.mx.mantissa_bits
    q = y * wg.across(jnp.where(top < b.INFINITY, power_of_two(-ref), jnp.nan), BLOCK)
    # The smallest normal element is 1; below it, steps are as wide as just above.
    unit = power_of_two(scale - ref)
    binade = jnp.maximum(b.from_bits(b.to_bits(q) & b.INFINITY), wg.across(unit, BLOCK))
    if noise is None:
        # float32 keeps nothing below a step if so much is added that its last place is worth one,
        # and rounds ties to even.
        shift = binade * (1.5 * (1 << (F32_MANTISSA_BITS - m)))
        r = (q + shift) - shift
    else:
        inverse = b.from_bits((254 << F32_MANTISSA_BITS) - b.to_bits(binade))
        steps = jnp.abs(q) * inverse * (1 << m)
        whole = steps.astype(jnp.int32).astype(jnp.float32)
        whole = whole + (noise < steps - whole).astype(jnp.float32)
        magnitude = whole * (binade * 2.0**-m)
        r = b.from_bits(b.to_bits(magnitude) | (b.to_bits(q) & b.SIGN))
        r = jnp.where(jnp.abs(q) < jnp.inf, r, jnp.nan)
    if careful or spec.scale_rule == "floor":
        largest = wg.across(unit * spec.mx.max_value, BLOCK)
        r = jnp.minimum(jnp.maximum(r, -largest), largest)
    return r


def packed(r: jax.Array, y: jax.Array, top: jax.Array, fmt: MXFormat) -> jax.Array:
    """Elements at scale 1 as bytes, uint8 (THREADS, bytes): a bit stream, low bits first.

    Args:
      r: elements (THREADS, 32).
      y: what was rounded: where r is a zero, the sign is y's.
      top: of the blocks, from `block_scales`; with a fault, codes are zeros.
      fmt: the format.
    """
    m, magnitude = fmt.mantissa_bits, jnp.abs(r)
    # Exponent and mantissa lie in a float32 as in a code; below the smallest normal element, which
    # is 1, after 1 is added.
    below = b.to_bits(magnitude + 1.0) - (1 << F32_MANTISSA_BITS)
    fields = jnp.where(magnitude < 1.0, below, b.to_bits(magnitude))
    code = (fields >> (F32_MANTISSA_BITS - m)) - (126 << m)
    sign = (b.to_bits(y) >> (31 - fmt.magnitude_bits)) & (1 << fmt.magnitude_bits)
    code = jnp.where(wg.across(top, BLOCK) < b.INFINITY, code | sign, 0)

    codes = wg.columns_of(code)
    group, bits = fmt.pack_group, fmt.element_bits
    word = wg.beside(codes[::group])
    for i in range(1, group):
        word = word | (wg.beside(codes[i::group]) << (bits * i))
    octets = tuple(word >> (8 * i) for i in range(fmt.pack_bytes))
    return wg.interleaved(octets).astype(jnp.uint8)


def unpacked(octets: jax.Array, fmt: MXFormat) -> jax.Array:
    """The inverse of `packed`: elements as float32 (THREADS, 32)."""
    columns = wg.columns_of(octets.astype(jnp.int32))
    word = wg.beside(columns[:: fmt.pack_bytes])
    for i in range(1, fmt.pack_bytes):
        word = word | (wg.beside(columns[i :: fmt.pack_bytes]) << (8 * i))
    group, bits, m = fmt.pack_group, fmt.element_bits, fmt.mantissa_bits
    code = wg.interleaved(tuple(word >> (bits * i) for i in range(group)))
    fields = code & fmt.max_code
    value = b.from_bits((fields + (126 << m)) << (F32_MANTISSA_BITS - m))
    below = fields.astype(jnp.float32) * 2.0**-m
    sign = (code & (1 << fmt.magnitude_bits)) << (31 - fmt.magnitude_bits)
    magnitude = jnp.where(fields < (1 << m), below, value)
    return b.from_bits(b.to_bits(magnitude) | sign)


def uniform(row: jax.Array, group: jax.Array, seed: jax.Array) -> tuple[jax.Array, ...]:
    """Uniform float32 in [0, 1) for four neighbouring columns of x: 4 g, 4 g + 1, and so on.

    Args:
      row: int32, of x.
      group: int32 of the same shape, g.
      seed: uint32 (2,).
    """
    zero = jnp.zeros_like(row).astype(jnp.uint32)
    words = philox((group.astype(jnp.uint32), row.astype(jnp.uint32), zero, zero), seed)
    return tuple((word >> 8).astype(jnp.int32).astype(jnp.float32) * 2.0**-24 for word in words)


def power_of_two(e: jax.Array) -> jax.Array:
    """2^e as float32, for int32 e clamped to [-126, 127]."""
    return b.power_of_two(jnp.minimum(jnp.maximum(e, -126), 127))
