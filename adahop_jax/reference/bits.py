"""Float32 values taken apart and put together by their bits, since `log2`, `exp2` and subnormal
arithmetic differ between machines."""

import jax
import jax.numpy as jnp
from jax import lax

from adahop_jax._formats import F32_MANTISSA_BITS

MAGNITUDE = 0x7FFFFFFF
MANTISSA = 0x007FFFFF
INFINITY = 0x7F800000
MIN_NORMAL = 0x00800000
NAN = 0x7FC00000
SIGN = -0x80000000


def to_bits(x: jax.Array) -> jax.Array:
    """float32, bfloat16 or float16 values -> int32 bits of the same values as float32."""
    if x.dtype == jnp.bfloat16:
        # A cast may flush bfloat16's subnormals; their bits are float32's upper half.
        half = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)
        return lax.bitcast_convert_type(half << 16, jnp.int32)
    return lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)


def from_bits(bits: jax.Array) -> jax.Array:
    """int32 bits -> float32."""
    return lax.bitcast_convert_type(bits, jnp.float32)


def rounded(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """`x.astype(dtype)`, whatever becomes of it.

    XLA on GPUs drops a rounding to bfloat16 or float16 whose result is cast back to float32.
    """
    if x.dtype == dtype:
        return x
    if dtype == jnp.bfloat16:
        x = lax.reduce_precision(x.astype(jnp.float32), exponent_bits=8, mantissa_bits=7)
    narrow = x.astype(dtype)
    # `reduce_precision` would flush float16's subnormals.
    return lax.optimization_barrier(narrow) if dtype == jnp.float16 else narrow


def normal_or_zero(x: jax.Array) -> jax.Array:
    """Values as float32, subnormal ones as zeros of their sign: some machines do so anyway."""
    bits = to_bits(x)
    zero = from_bits(bits & SIGN)
    return jnp.where((bits & MAGNITUDE) < MIN_NORMAL, zero, x.astype(jnp.float32))


def exponent(bits: jax.Array) -> jax.Array:
    """⌊log2|x|⌋ of normal float32 values given as int32 bits; -127 for zeros and subnormals."""
    return ((bits & MAGNITUDE) >> F32_MANTISSA_BITS) - 127


def power_of_two(e: jax.Array) -> jax.Array:
    """2^e as float32 for int32 e in [-126, 127], exactly."""
    return from_bits((e + 127) << F32_MANTISSA_BITS)
