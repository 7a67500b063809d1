"""The method on blocks of 32 values, of which each thread of a warpgroup has one.

A block is a row of a (THREADS, 32) array, so that transform, scale, rounding and packing need no
other thread, and are written as they are for a single block. The transform is a butterfly in the
reference's own order: codes and scales equal the reference's bit for bit.

Only values near the ends of float32's range need care: where they may be met, `careful` drops
subnormal sums and cuts off what the largest scale cannot hold.
"""

import jax
import jax.numpy as jnp
from jax import lax

from adahop_jax._formats import F32_MANTISSA_BITS, MXFormat, OperandSpec
from adahop_jax.reference import bits as b
from adahop_jax.reference.philox import ROUNDS, State, philox_round
from adahop_jax.reference.quantize import scale_exponent
from pallas_kernels import _warpgroup as wg

BLOCK = 32


def rotate(
    x: jax.Array, spec: OperandSpec, signs: jax.Array | None, *, careful: bool, signed_zeros: bool
) -> jax.Array:
    """Blocks (THREADS, 32) float32 scaled, their signs changed, and times the +-1 Sylvester matrix.

    Args:
      x: the blocks.
      spec: how they are quantized; the transform is no larger than a block.
      signs: float32 (32,), or None.
      careful: whether sums may be subnormal; such count as zeros.
      signed_zeros: whether it matters what sign a zero has, and what is smaller than every step.
    """
    if careful or spec.pre_scale != 1.0:
        x = b.normal_or_zero(x)
    if spec.pre_scale != 1.0:
        x = x * spec.pre_scale
    if signs is not None:
        x = x * lax.broadcast_in_dim(signs, x.shape, [1])
    if not spec.hadamard:
        return x
    if signed_zeros:
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
    # Compared as floats, which drops the signs at no cost, until two are left.
    largest = jnp.abs(y)
    while (half := largest.shape[1] // 2) > 1:
        largest = jnp.maximum(largest[:, :half], largest[:, half:])
    largest = jnp.max(b.to_bits(largest), axis=1)
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
    unit = power_of_two(scale - ref)
    binade = _binade(q, wg.across(unit, BLOCK))
    if noise is None:
        # float32 keeps nothing below a step if so much is added that its last place is worth one,
        # and rounds ties to even.
        shift = binade * (1.5 * (1 << (F32_MANTISSA_BITS - m)))
        r = (q + shift) - shift
    else:
        magnitude = _steps(q, binade, noise, m).astype(jnp.float32) * (binade * 2.0**-m)
        r = b.from_bits(b.to_bits(magnitude) | (b.to_bits(q) & b.SIGN))
        r = jnp.where(jnp.abs(q) < jnp.inf, r, jnp.nan)
    if careful or spec.scale_rule == "floor":
        largest = wg.across(unit * spec.mx.max_value, BLOCK)
        r = jnp.minimum(jnp.maximum(r, -largest), largest)
    return r


def encode_elements(
    y: jax.Array,
    scale: jax.Array,
    top: jax.Array,
    noise: jax.Array | None,
    spec: OperandSpec,
    *,
    careful: bool,
) -> jax.Array:
    """Blocks rounded to codes, int32 (THREADS, 32); zeros in those with a fault.

    Args:
      y, scale, top, noise, spec, careful: as for `round_elements`.
    """
    fmt, m = spec.mx, spec.mx.mantissa_bits
    q = y * wg.across(power_of_two(-scale), BLOCK)
    binade = _binade(q, jnp.ones_like(q))
    # A code counts steps from zero, as many in each binade: of these, the binade's exponent and the
    # steps from the binade on are two parts, and a carry goes from one to the other by itself.
    if noise is None:
        # As in `round_elements`, and what is added holds the exponent.
        bits = b.to_bits(jnp.abs(q) + binade * (1 << (F32_MANTISSA_BITS - m)))
        steps, exponent = bits & ((4 << m) - 1), 127 + F32_MANTISSA_BITS - m
    else:
        bits = b.to_bits(binade)
        steps, exponent = _steps(q, binade, noise, m), 127
    code = steps + (bits >> (F32_MANTISSA_BITS - m)) - (exponent << m)
    if careful or spec.scale_rule == "floor":
        code = jnp.minimum(code, fmt.max_code)
    sign = (b.to_bits(y) >> (31 - fmt.magnitude_bits)) & (1 << fmt.magnitude_bits)
    return (code | sign) & wg.across(jnp.where(top < b.INFINITY, -1, 0), BLOCK)


def _binade(q: jax.Array, unit: jax.Array) -> jax.Array:
    """The power of two below |q|, but `unit`, the smallest normal element, if that is larger.

    Below the smallest normal element, steps are as wide as just above.
    """
    return jnp.maximum(b.from_bits(b.to_bits(q) & b.INFINITY), unit)


def _steps(q: jax.Array, binade: jax.Array, noise: jax.Array, m: int) -> jax.Array:
    """|q| in steps of its binade, stochastically rounded to int32."""
    inverse = b.from_bits((254 << F32_MANTISSA_BITS) - b.to_bits(binade))
    steps = jnp.abs(q) * inverse * (1 << m)
    whole = steps.astype(jnp.int32)
    return whole + (noise < steps - whole.astype(jnp.float32)).astype(jnp.int32)


def packed(code: jax.Array, fmt: MXFormat) -> jax.Array:
    """Codes (THREADS, 32) as bytes, uint8 (THREADS, bytes): a bit stream, low bits first."""
    codes = wg.columns_of(code)
    group, bits = fmt.pack_group, fmt.element_bits
    word = wg.beside(codes[::group])
    for i in range(1, group):
        word = word | (wg.beside(codes[i::group]) << (bits * i))
    octets = tuple(word >> (8 * i) for i in range(fmt.pack_bytes))
    return wg.interleaved(octets).astype(jnp.uint8)


def unpacked(octets: jax.Array, fmt: MXFormat) -> jax.Array:
    """The elements whose codes `packed` made bytes of: float32 (THREADS, 32)."""
    columns = wg.columns_of(octets.astype(jnp.int32))
    word = wg.beside(columns[:: fmt.pack_bytes])
    for i in range(1, fmt.pack_bytes):
        word = word | (wg.beside(columns[i :: fmt.pack_bytes]) << (8 * i))
    return wg.interleaved(
        tuple(_element(word, fmt.element_bits * i, fmt) for i in range(fmt.pack_group))
    )


def _element(word: jax.Array, start: int, fmt: MXFormat) -> jax.Array:
    """The element, float32, whose code starts at a bit of a word.

    Exponent and mantissa lie in a float32 as in a code. Put there under an exponent of 1, they are
    four times the element; below the smallest normal one, which is 1, it is half of that less 1,
    which from there on is larger.
    """
    place = F32_MANTISSA_BITS - fmt.mantissa_bits
    fields = (word << (place - start)) & (fmt.max_code << place)
    four = b.from_bits(fields | (128 << F32_MANTISSA_BITS))
    magnitude = jnp.minimum(four * 0.5 - 1.0, four * 0.25)
    sign = (word << (31 - fmt.magnitude_bits - start)) & b.SIGN
    return b.from_bits(b.to_bits(magnitude) | sign)


def uniform(row: jax.Array, group: jax.Array, seed: jax.Array) -> tuple[jax.Array, ...]:
    """Uniform float32 in [0, 1) for four neighbouring columns of x: 4 g, 4 g + 1, and so on.

    Args:
      row: int32, of x.
      group: int32 of the same shape, g.
      seed: uint32 (2,).
    """
    zero = jnp.zeros_like(row).astype(jnp.uint32)
    counter = group.astype(jnp.uint32), row.astype(jnp.uint32), zero, zero
    state = State(counter, (seed[0], seed[1]))
    # In a loop: written out, the rounds take long to compile.
    words = lax.fori_loop(0, ROUNDS, lambda _, state: philox_round(state), state).counter
    return tuple((word >> 8).astype(jnp.int32).astype(jnp.float32) * 2.0**-24 for word in words)


def power_of_two(e: jax.Array) -> jax.Array:
    """2^e as float32, for int32 e clamped to [-126, 127]."""
    return b.power_of_two(jnp.minimum(jnp.maximum(e, -126), 127))
