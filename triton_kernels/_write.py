"""Device functions that put quantized blocks into memory: as FP8, or as packed codes.

What is written has a kind: "folded", FP8 elements times 2^(scale - reference); "elements", FP8
elements alone; "codes", a bit stream with the low bits first. A block's data are W values: 8 words
of FP8, 4 words of 4-bit codes, or 8 groups of four 6-bit codes.
"""

import triton
import triton.language as tl

from triton_kernels._blocks import as_words, clip, codes_of, fp8_word, round_elements


@triton.jit
def fp8_data(r, N: tl.constexpr, E5M2: tl.constexpr, PTX: tl.constexpr):
    """Values [N, 32] -> FP8: words [N, 8], or [N, 32] where there is no instruction for words."""
    if PTX:
        even, odd = tl.split(r.reshape(N, 8, 2, 2))
        r0, r2 = tl.split(even)
        r1, r3 = tl.split(odd)
        return fp8_word(r0, r1, r2, r3, E5M2)
    elif E5M2:
        return r.to(tl.float8e5)
    else:
        return r.to(tl.float8e4nv)


@triton.jit
def encode(
    y,
    noise,
    scale,
    fault,
    ref,
    N: tl.constexpr,
    KIND: tl.constexpr,
    CLIP: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    M: tl.constexpr,
    E: tl.constexpr,
    MAX_VALUE: tl.constexpr,
    E5M2: tl.constexpr,
    PTX: tl.constexpr,
):
    """Rotated blocks y [N, 32] -> their data [N, W]."""
    if CLIP:
        y = clip(y, scale, MAX_VALUE)
    if KIND != "folded":
        ref = scale
    r, q = round_elements(y, noise, scale, ref, fault, STOCHASTIC, M, PTX)
    if KIND != "codes":
        return fp8_data(r, N, E5M2, PTX)
    else:
        code = tl.where(fault[:, None], 0, codes_of(r, q, M, E))
        COUNT: tl.constexpr = 8 if M + E == 3 else 4
        shifts = (1 + M + E) * tl.arange(0, COUNT)
        return tl.sum(code.reshape(N, 32 // COUNT, COUNT) << shifts[None, None, :], 2)


@triton.jit
def put(ptr, data, index, inside, KIND: tl.constexpr, BITS: tl.constexpr):
    """Stores data [N, W] of blocks `index` [N]."""
    if data.dtype != tl.int32:
        to = ptr + (index * 32)[:, None] + tl.arange(0, 32)[None, :]
        tl.store(to, data, mask=inside[:, None])
    elif KIND != "codes":
        to = as_words(ptr) + (index * 8)[:, None] + tl.arange(0, 8)[None, :]
        tl.store(to, data, mask=inside[:, None])
    elif BITS == 4:
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
