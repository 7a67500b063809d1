"""Device functions that put quantized blocks into memory: as FP8, or as packed codes.

What is written has a kind: "folded", FP8 elements times 2^(scale - reference); "elements", FP8
elements alone; "codes", a bit stream with the low bits first. A block's data are W words: 8 of FP8,
4 of 4-bit codes, or 8 that hold four 6-bit codes each.
"""

import triton
import triton.language as tl

from triton_kernels._blocks import as_words, clip, codes_of, fp8_words, round_elements


@triton.jit
def _choose(a, b, mask):
    """Bits of a where the mask is set, else of b."""
    return (a & mask) | (b & ~mask)


@triton.jit
def _packed(r, y, N: tl.constexpr, Q: tl.constexpr):
    """Elements at scale 2^Q.least [N, 32] -> packed codes, with y's signs, by way of FP8's bytes.

    At that scale E2M1's fields lie in E5M2's bytes as sign, 000, exponent, mantissa, 0, and E2M3's
    in E4M3's as sign, 00, exponent, mantissa.
    """
    if Q.ends:
        # The largest scale may leave more than the largest element.
        r = tl.minimum(tl.abs(r), Q.max_value * 2.0**Q.least)
    if Q.m == 1:
        r0, r1 = tl.split(r.reshape(N, 16, 2))
        y0, y1 = tl.split(y.reshape(N, 16, 2))
        even = _choose(fp8_words(r0, N, 4, Q) >> 1, fp8_words(y0, N, 4, Q) >> 4, 0x07070707)
        odd = _choose(fp8_words(r1, N, 4, Q) << 3, fp8_words(y1, N, 4, Q), 0x70707070)
        return _choose(even, odd, 0x0F0F0F0F)
    else:
        codes = _choose(fp8_words(r, N, 8, Q), fp8_words(y, N, 8, Q) >> 2, 0x1F1F1F1F)
        low = (codes & 0x3F) | ((codes >> 2) & 0xFC0)
        return low | ((codes >> 4) & 0x3F000) | ((codes >> 6) & 0xFC0000)


@triton.jit
def encode(y, noise, scale, fault, ref, N: tl.constexpr, Q: tl.constexpr):
    """Rotated blocks y [N, 32] -> their data [N, W]."""
    if Q.clip:
        y = clip(y, scale, Q)
    if Q.kind != "codes":
        if Q.kind == "elements":
            ref = scale
        return fp8_words(round_elements(y, noise, scale, ref, fault, Q), N, 8, Q)
    elif Q.fp8:
        r = round_elements(y, noise, scale, scale - Q.least, fault, Q)
        return tl.where(fault[:, None], 0, _packed(r, y, N, Q))
    else:
        r = round_elements(y, noise, scale, scale, fault, Q)
        code = tl.where(fault[:, None], 0, codes_of(r, y, Q))
        COUNT: tl.constexpr = 8 if Q.m == 1 else 4
        shifts = (1 + Q.m + Q.e) * tl.arange(0, COUNT)
        return tl.sum(code.reshape(N, 32 // COUNT, COUNT) << shifts[None, None, :], 2)


@triton.jit
def at(ptr, block, Q: tl.constexpr):
    """Where a block's data start."""
    BYTES: tl.constexpr = 32 if Q.kind != "codes" else 4 * (1 + Q.m + Q.e)
    return ptr + block * BYTES


@triton.jit
def put(ptr, data, index, inside, Q: tl.constexpr, OWNERS: tl.constexpr = 1):
    """Stores data [N, W] of blocks `index` [N], each of which OWNERS threads have in parts."""
    if Q.kind != "codes":
        to = as_words(ptr) + (index * 8)[:, None] + tl.arange(0, 8)[None, :]
        tl.store(to, data, mask=inside[:, None])
    elif Q.m == 1 and OWNERS == 2:
        # A dim for the owners, or the compiler would give whole blocks to threads.
        part = 2 * tl.arange(0, 2)[:, None] + tl.arange(0, 2)[None, :]
        to = as_words(ptr) + (index * 4)[:, None, None] + part[None, :, :]
        tl.store(to, data.reshape(data.shape[0], 2, 2), mask=inside[:, None, None])
    elif Q.m == 1:
        to = as_words(ptr) + (index * 4)[:, None] + tl.arange(0, 4)[None, :]
        tl.store(to, data, mask=inside[:, None])
    else:
        to = ptr + (index * 24)[:, None] + (3 * tl.arange(0, 8))[None, :]
        for i in tl.static_range(3):
            tl.store(to + i, (data >> (8 * i)).to(tl.uint8), mask=inside[:, None])


@triton.jit
def put_scales(ptr, scale, fault, index, inside):
    """Stores the E8M0 bytes of blocks `index` [N]."""
    tl.store(ptr + index, tl.where(fault, 255, scale + 127).to(tl.uint8), mask=inside)
