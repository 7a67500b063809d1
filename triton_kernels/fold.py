"""Unpack and fold: stored codes and scales into the FP8 operand that a product reads."""

import jax
import triton
import triton.language as tl

from adahop_jax._formats import MXFormat, OperandSpec
from adahop_jax._view import View
from triton_kernels import _launch
from triton_kernels._blocks import as_words, fp8_word, fp8_words, power_of_two, values_of
from triton_kernels._constants import constants, view_shapes
from triton_kernels._write import put
from triton_kernels.machines import Machine

WARPS = 8
BLOCKS_PER_PROGRAM = 256
MOST_BLOCKS = 512


@triton.jit
def _look_up(low, high, selector):
    """Four bytes, each one of the eight in `low` and `high`, by 3 bits of each nibble selected."""
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;",
        "=r,r,r,r",
        [low, high, selector],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _four(words, low, high):
    """The lower four E2M1 codes of each word as FP8, magnitudes looked up, signs put on."""
    magnitude = _look_up(low, high, words & 0x7777)
    sign = _look_up(words * 0, words * 0 - 0x7F7F7F80, (words >> 1) & 0x4444)
    return magnitude | sign


@triton.jit
def _codes(codes_ptr, index, inside, N: tl.constexpr, Q: tl.constexpr):
    """Codes of blocks `index` [N], int32 [N, 32]."""
    if Q.m == 1:
        ptr = codes_ptr + (index * 16)[:, None] + tl.arange(0, 16)[None, :]
        byte = tl.load(ptr, mask=inside[:, None], other=0).to(tl.int32)
        return tl.join(byte & 15, byte >> 4).reshape(N, 32)
    else:
        ptr = codes_ptr + (index * 24)[:, None] + (3 * tl.arange(0, 8))[None, :]
        word = tl.load(ptr, mask=inside[:, None], other=0).to(tl.int32)
        word |= tl.load(ptr + 1, mask=inside[:, None], other=0).to(tl.int32) << 8
        word |= tl.load(ptr + 2, mask=inside[:, None], other=0).to(tl.int32) << 16
        shifts = 6 * tl.arange(0, 4)
        return ((word[:, :, None] >> shifts[None, None, :]) & 63).reshape(N, 32)


@triton.jit
def _kernel(
    codes_ptr,
    scale_ptr,
    data_ptr,
    ref_ptr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_B: tl.constexpr,
    Q: tl.constexpr,
):
    """A program: BLOCK_R whole rows, BLOCK_B blocks of each at a time."""
    N: tl.constexpr = BLOCK_R * BLOCK_B
    PASSES: tl.constexpr = (BLOCKS + BLOCK_B - 1) // BLOCK_B
    n = tl.arange(0, N)
    first = tl.program_id(0) * BLOCK_R
    rows = first + tl.arange(0, BLOCK_R)
    row = first + n // BLOCK_B

    top = tl.zeros((BLOCK_R,), tl.int32)
    for i in range(PASSES):
        block = i * BLOCK_B + n % BLOCK_B
        inside = (row < ROWS) & (block < BLOCKS)
        ptr = scale_ptr + row.to(tl.int64) * BLOCKS + block
        byte = tl.load(ptr, mask=inside, other=0).to(tl.int32)
        byte = tl.where(byte == 255, 0, byte).reshape(BLOCK_R, BLOCK_B)
        top = tl.maximum(top, tl.max(byte, 1))
    low = tl.maximum(top - Q.top, 0)
    tl.store(ref_ptr + rows, low.to(tl.uint8), mask=rows < ROWS)
    ref = tl.broadcast_to(low[:, None], (BLOCK_R, BLOCK_B)).reshape(N)
    for i in range(PASSES):
        block = i * BLOCK_B + n % BLOCK_B
        inside = (row < ROWS) & (block < BLOCKS)
        index = row.to(tl.int64) * BLOCKS + block
        byte = tl.load(scale_ptr + index, mask=inside, other=0).to(tl.int32)
        factor = tl.where(byte == 255, float("nan"), power_of_two(byte - ref))
        if Q.ptx and Q.m == 1:
            # Only eight magnitudes can occur in a block.
            few = fp8_word(0.0 * factor, 0.5 * factor, factor, 1.5 * factor, Q.e5m2)[:, None]
            many = fp8_word(2 * factor, 3 * factor, 4 * factor, 6 * factor, Q.e5m2)[:, None]
            ptr = as_words(codes_ptr) + (index * 4)[:, None] + tl.arange(0, 4)[None, :]
            words = tl.load(ptr, mask=inside[:, None], other=0)
            few = tl.broadcast_to(few, (N, 4))
            many = tl.broadcast_to(many, (N, 4))
            pair = tl.join(_four(words, few, many), _four(words >> 16, few, many)).reshape(N, 8)
            put(data_ptr, pair, index, inside, Q)
        else:
            value = values_of(_codes(codes_ptr, index, inside, N, Q), Q) * factor[:, None]
            put(data_ptr, fp8_words(value, N, 8, Q), index, inside, Q)


def fold(codes: jax.Array, scales: jax.Array, *, fmt: MXFormat, machine: Machine) -> View:
    """Stored codes and scales as a folded operand.

    Reads 1/2 byte an element of MXFP4 and 1/32 of scales; writes 1.

    Args:
      codes: uint8 (rows, bytes), packed along the contracted axis.
      scales: uint8 (rows, blocks).
      fmt: their format.
      machine: that runs it.

    Returns:
      A folded `View`, of whole blocks.
    """
    rows, blocks = scales.shape
    block_b = min(triton.next_power_of_2(blocks), MOST_BLOCKS)
    block_r = max(1, BLOCKS_PER_PROGRAM // block_b)
    data, _, refs, _ = view_shapes(rows, blocks * 32, fmt=fmt, kind="folded")
    folded, refs = _launch.launch(
        _kernel,
        codes,
        scales,
        out=(data, refs),
        grid=triton.cdiv(rows, block_r),
        num_warps=WARPS,
        ROWS=rows,
        BLOCKS=blocks,
        BLOCK_R=block_r,
        BLOCK_B=block_b,
        Q=constants(OperandSpec(format=fmt.name), kind="folded", machine=machine),
    )
    return View(folded, None, refs, None)
