"""Device functions that the kernels share: blocks of 32 values rotated, rounded and packed.

Every thread owns whole blocks: they are stacked as [N, 32] from loads of one word each, so that the
transform, the largest magnitude and the packing stay in registers. The butterfly sums in the
reference's own order, so codes and scales equal the reference's bit for bit.

N is a number of blocks, Q the `Constants` of a tensor; an element's smallest normal value is 1.
Q.ptx chooses NVIDIA's instructions where Triton has none; the other branch computes the same
anywhere. Rules: `adahop_jax.reference.quantize`.
"""

import triton
import triton.language as tl

MAGNITUDE = tl.constexpr(0x7FFFFFFF)
SIGN = tl.constexpr(-0x80000000)
EXPONENT = tl.constexpr(0x7F800000)
MANTISSA = tl.constexpr(0x007FFFFF)
MIN_NORMAL = tl.constexpr(0x00800000)

_TO_FP8 = """{{
.reg .b16 low, high;
cvt.rn.satfinite.{0}x2.f32 low, $2, $1;
cvt.rn.satfinite.{0}x2.f32 high, $4, $3;
mov.b32 $0, {{low, high}};
}}"""
TO_E5M2 = tl.constexpr(_TO_FP8.format("e5m2"))
TO_E4M3 = tl.constexpr(_TO_FP8.format("e4m3"))


@triton.jit
def to_bits(x):
    """float32 -> int32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def from_bits(bits):
    """int32 -> float32."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def power_of_two(e):
    """2^e as float32, for int32 e clamped to [-126, 127]."""
    return from_bits((tl.minimum(tl.maximum(e, -126), 127) + 127) << 23)


@triton.jit
def _any_power_of_two(e):
    """2^e as float32, which may be subnormal, for int32 e in [-149, 127]."""
    return from_bits(tl.where(e < -126, 1 << tl.maximum(e + 149, 0), (e + 127) << 23))


@triton.jit
def as_words(ptr):
    """A pointer to int32 words."""
    return ptr.to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def stack_loads(ptr, stride: tl.constexpr, mask, COUNT: tl.constexpr):
    """Loads at ptr + i * stride for i < COUNT (a power of two), as new last dims of 2, in order."""
    if COUNT == 1:
        return tl.load(ptr, mask=mask, other=0)
    else:
        even = stack_loads(ptr, 2 * stride, mask, COUNT // 2)
        odd = stack_loads(ptr + stride, 2 * stride, mask, COUNT // 2)
        return tl.join(even, odd)


@triton.jit
def halves(words, DTYPE: tl.constexpr):
    """int32 words -> the two 16-bit floats in each as float32, the lower half first."""
    if DTYPE == tl.bfloat16:
        return from_bits(words << 16), from_bits(words & -0x10000)
    else:
        low = words.to(tl.int16).to(DTYPE, bitcast=True)
        high = (words >> 16).to(tl.int16).to(DTYPE, bitcast=True)
        return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def _flush(x):
    """Subnormal float32 -> zero of its sign."""
    bits = to_bits(x)
    return from_bits(tl.where((bits & MAGNITUDE) < MIN_NORMAL, bits & SIGN, bits))


@triton.jit
def _flushing(a, b, INSTRUCTION: tl.constexpr):
    """One of NVIDIA's instructions that count subnormal numbers as zeros."""
    return tl.inline_asm_elementwise(
        INSTRUCTION, "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _sum(a, b, PTX: tl.constexpr):
    """a + b; subnormal numbers count as zeros."""
    if PTX:
        return _flushing(a, b, "add.rn.ftz.f32 $0, $1, $2;")
    else:
        return _flush(a + b)


@triton.jit
def _difference(a, b, PTX: tl.constexpr):
    """a - b; subnormal numbers count as zeros."""
    if PTX:
        return _flushing(a, b, "sub.rn.ftz.f32 $0, $1, $2;")
    else:
        return _flush(a - b)


@triton.jit
def _butterfly(x, N: tl.constexpr, STRIDE: tl.constexpr, PTX: tl.constexpr):
    a, b = tl.split(x.reshape(N, 16 // STRIDE, 2, STRIDE).permute(0, 1, 3, 2))
    x = tl.join(_sum(a, b, PTX), _difference(a, b, PTX))
    return x.permute(0, 1, 3, 2).reshape(N, 32)


@triton.jit
def rotate(x, signs_ptr, N: tl.constexpr, Q: tl.constexpr):
    """Blocks [N, 32] scaled, their signs changed, and times the +-1 Sylvester matrix.

    Holds no subnormal numbers.
    """
    if Q.pre_scale != 1.0:
        x = _flush(x) * Q.pre_scale
    if Q.signs:
        x = x * tl.load(signs_ptr + tl.arange(0, 32))[None, :]
    # Subnormal numbers are dropped, and a zero that is rotated loses its sign.
    if not Q.ptx:
        x = _flush(x)
    zero: tl.constexpr = 0 if Q.hadamard else SIGN
    x = _sum(x, from_bits(tl.full((N, 32), zero, tl.int32)), Q.ptx)
    if Q.hadamard >= 2:
        x = _butterfly(x, N, 1, Q.ptx)
    if Q.hadamard >= 4:
        x = _butterfly(x, N, 2, Q.ptx)
    if Q.hadamard >= 8:
        x = _butterfly(x, N, 4, Q.ptx)
    if Q.hadamard >= 16:
        x = _butterfly(x, N, 8, Q.ptx)
    if Q.hadamard >= 32:
        x = _butterfly(x, N, 16, Q.ptx)
    return x


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest_bits(y):
    """Blocks [N, 32] -> bits of their largest magnitudes [N]; NaN is larger than all."""
    return to_bits(tl.reduce(tl.abs(y), 1, _larger))


@triton.jit
def block_scales(bits, Q: tl.constexpr):
    """Largest magnitudes' bits -> exponents of blocks' scales, and if they hold NaN or infinity."""
    if Q.rule == "even":
        e = (bits + (1 << (22 - Q.m))) >> 23
    elif Q.rule == "floor":
        e = bits >> 23
    else:
        largest: tl.constexpr = ((1 << Q.m) - 1) << (23 - Q.m)
        e = (bits >> 23) + ((bits & MANTISSA) > largest).to(tl.int32)
    if Q.ends:
        e = tl.minimum(tl.where(bits < MIN_NORMAL, 0, e), 254)
    return tl.maximum(e - 127 - Q.max_exponent, -127), bits >= EXPONENT


@triton.jit
def clip(y, scale, Q: tl.constexpr):
    """Values [N, 32] cut to the largest that their blocks can hold."""
    # By halves, as 2^-127 is subnormal.
    limit = (power_of_two(scale + 1) * (0.5 * Q.max_value))[:, None]
    return tl.minimum(tl.maximum(y, -limit), limit)


@triton.jit
def round_elements(y, noise, scale, ref, fault, Q: tl.constexpr):
    """Values [N, 32] rounded to elements, times 2^(scale - ref); NaN in blocks with a fault.

    `noise` is uniform in [0, 1). y holds no subnormals.
    """
    if Q.ends:
        inverse = tl.where(fault, float("nan"), _any_power_of_two(-ref))[:, None]
        unit = power_of_two(scale - ref)[:, None]
    else:
        inverse = tl.where(fault, float("nan"), from_bits((127 - ref) << 23))[:, None]
        unit = from_bits((scale - ref + 127) << 23)[:, None]
    if Q.stochastic:
        q = y * inverse
        # The power of two below |q|, and not below the smallest normal element, which is 1.
        binade = tl.maximum(from_bits(to_bits(q) & EXPONENT), unit)
        steps = tl.abs(q) * from_bits((254 << 23) - to_bits(binade)) * (1 << Q.m)
        whole = tl.floor(steps)
        whole += (noise < steps - whole).to(tl.float32)
        magnitude = whole * (binade * (1.0 / (1 << Q.m)))
        return from_bits(to_bits(magnitude) | (to_bits(q) & SIGN))
    else:
        # float32 keeps nothing below a step of y if so much is added that its last place is worth
        # one, and rounds ties to even. A binade of y is at most 4 units; for one of 0, 1/2, 1, 2
        # and 4 units the sum lies between 1, 1, 1, 2 and 4 times 2^(23 - m) units and twice that.
        slope: tl.constexpr = 0.75 * (1 << (23 - Q.m))
        floor = unit * (1.125 * (1 << (23 - Q.m)))
        if Q.ends:
            q = y * inverse
            shift = from_bits(to_bits(q) & EXPONENT) * slope + floor
        else:
            # One multiplication less, which could overflow.
            shift = from_bits(to_bits(y) & EXPONENT) * (inverse * slope) + floor
        return (y * inverse + shift) - shift


@triton.jit
def codes_of(r, y, Q: tl.constexpr):
    """Elements at scale 1 -> codes, int32: sign, exponent field, mantissa; signs are those of y."""
    # Times 2^-126 an element's fields, also if it is subnormal, lie where float32 has its own.
    code = to_bits(tl.abs(r) * 2.0**-126) >> (23 - Q.m)
    code = tl.minimum(code, (1 << (Q.m + Q.e)) - 1)
    return code | ((to_bits(y) >> 31) & (1 << (Q.m + Q.e)))


@triton.jit
def values_of(code, Q: tl.constexpr):
    """Codes, int32 -> float32, the inverse of `codes_of`."""
    magnitude = from_bits((code & ((1 << (Q.m + Q.e)) - 1)) << (23 - Q.m)) * 2.0**126
    return from_bits(to_bits(magnitude) | ((code << (31 - Q.m - Q.e)) & SIGN))


@triton.jit
def _converted(a, b, c, d, INSTRUCTIONS: tl.constexpr):
    return tl.inline_asm_elementwise(
        INSTRUCTIONS, "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def fp8_word(a, b, c, d, E5M2: tl.constexpr):
    """Four float32 -> FP8, rounded to nearest and saturated, in an int32, a lowest. NVIDIA only."""
    if E5M2:
        return _converted(a, b, c, d, TO_E5M2)
    else:
        return _converted(a, b, c, d, TO_E4M3)


@triton.jit
def fp8_words(r, N: tl.constexpr, W: tl.constexpr, Q: tl.constexpr):
    """Values [N, 4 W] -> FP8, saturated, in words: int32 [N, W]."""
    if Q.ptx:
        even, odd = tl.split(r.reshape(N, W, 2, 2))
        r0, r2 = tl.split(even)
        r1, r3 = tl.split(odd)
        return fp8_word(r0, r1, r2, r3, Q.e5m2)
    else:
        largest: tl.constexpr = 57344.0 if Q.e5m2 else 448.0
        r = tl.where(tl.abs(r) > largest, tl.where(r > 0, largest, -largest), r)
        narrow = r.to(tl.float8e5) if Q.e5m2 else r.to(tl.float8e4nv)
        byte = narrow.to(tl.uint8, bitcast=True).to(tl.int32).reshape(N, W, 4)
        return tl.sum(byte << (8 * tl.arange(0, 4))[None, None, :], 2)


@triton.jit
def uniform(row, group, seed_ptr, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """Uniform float32 [ROWS, 4 * GROUPS] in [0, 1) for rows [ROWS], groups [GROUPS] of 4 columns.

    Philox-4x32-10 with counter (group, row, 0, 0), as `adahop_jax.reference.philox`.
    """
    seed = tl.load(seed_ptr).to(tl.uint64) | (tl.load(seed_ptr + 1).to(tl.uint64) << 32)
    c0 = tl.broadcast_to(group[None, :], (ROWS, GROUPS)).to(tl.uint32)
    c1 = tl.broadcast_to(row[:, None], (ROWS, GROUPS)).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, c0, c1, c0 * 0, c0 * 0)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(ROWS, 4 * GROUPS)
    return (words >> 8).to(tl.float32) * 2.0**-24
