"""Fused transform and quantization along the last axis: MX blocks within rows."""

import jax
import triton
import triton.language as tl

from adahop_jax._formats import OperandSpec
from triton_kernels import _launch
from triton_kernels._blocks import (
    as_words,
    block_scales,
    clip,
    from_bits,
    halves,
    rotate,
    stack_loads,
    uniform,
)
from triton_kernels._view import Kind, View, constants, prepared, view_shapes
from triton_kernels._write import encode, put, put_scales
from triton_kernels.machines import Machine

WARPS = 8
BLOCKS_PER_PROGRAM = 256
MOST_BLOCKS = 512


@triton.jit
def _blocks_of(x_ptr, index, inside, N: tl.constexpr):
    """Blocks `index` [N] of 32 contiguous values as float32 [N, 32]."""
    if x_ptr.dtype.element_ty == tl.float32:
        ptr = as_words(x_ptr) + (index * 32)[:, None] + tl.arange(0, 4)[None, :]
        words = stack_loads(ptr, 4, inside[:, None], 8)
        return from_bits(words.permute(0, 2, 3, 4, 1).reshape(N, 32))
    else:
        ptr = as_words(x_ptr) + (index * 16)[:, None] + tl.arange(0, 4)[None, :]
        words = stack_loads(ptr, 4, inside[:, None], 4).permute(0, 2, 3, 1).reshape(N, 16)
        low, high = halves(words, x_ptr.dtype.element_ty)
        return tl.join(low, high).reshape(N, 32)


@triton.jit
def _kernel(
    x_ptr,
    signs_ptr,
    seed_ptr,
    data_ptr,
    scale_ptr,
    ref_ptr,
    norm_ptr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_B: tl.constexpr,
    KIND: tl.constexpr,
    NORMS: tl.constexpr,
    PRE_SCALE: tl.constexpr,
    SIGNS: tl.constexpr,
    HADAMARD: tl.constexpr,
    RULE: tl.constexpr,
    CLIP: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    M: tl.constexpr,
    E: tl.constexpr,
    MAX_EXP: tl.constexpr,
    MAX_VALUE: tl.constexpr,
    TOP: tl.constexpr,
    LOW: tl.constexpr,
    E5M2: tl.constexpr,
    PTX: tl.constexpr,
):
    """A program: BLOCK_R whole rows, BLOCK_B blocks of each at a time."""
    N: tl.constexpr = BLOCK_R * BLOCK_B
    PASSES: tl.constexpr = (BLOCKS + BLOCK_B - 1) // BLOCK_B
    n = tl.arange(0, N)
    first = tl.program_id(0) * BLOCK_R
    rows = first + tl.arange(0, BLOCK_R)
    row = first + n // BLOCK_B

    # One reference exponent a row, from its largest scale. A row that is longer than one pass is
    # read twice.
    top = tl.full((BLOCK_R,), -127, tl.int32)
    if KIND == "folded" and PASSES > 1:
        for i in range(PASSES):
            block = i * BLOCK_B + n % BLOCK_B
            inside = (row < ROWS) & (block < BLOCKS)
            x = _blocks_of(x_ptr, row.to(tl.int64) * BLOCKS + block, inside, N)
            y = rotate(x, signs_ptr, N, PRE_SCALE, SIGNS, HADAMARD, PTX)
            scale, fault = block_scales(y, RULE, M, MAX_EXP)
            scale = tl.where(fault, -127, scale).reshape(BLOCK_R, BLOCK_B)
            top = tl.maximum(top, tl.max(scale, 1))
    norm = tl.zeros((BLOCK_R,), tl.float32)
    for i in tl.range(0, PASSES):
        block = i * BLOCK_B + n % BLOCK_B
        inside = (row < ROWS) & (block < BLOCKS)
        if ROWS % BLOCK_R == 0 and BLOCKS % BLOCK_B == 0:
            inside = tl.full((N,), True, tl.int1)
        index = row.to(tl.int64) * BLOCKS + block
        x = _blocks_of(x_ptr, index, inside, N)
        if NORMS:
            norm += tl.sum(tl.sum(x * x, 1).reshape(BLOCK_R, BLOCK_B), 1)
        y = rotate(x, signs_ptr, N, PRE_SCALE, SIGNS, HADAMARD, PTX)
        scale, fault = block_scales(y, RULE, M, MAX_EXP)
        noise = 0.0
        if STOCHASTIC:
            group = i * (BLOCK_B * 8) + tl.arange(0, BLOCK_B * 8)
            noise = uniform(rows, group, seed_ptr, BLOCK_R, BLOCK_B * 8).reshape(N, 32)
        if KIND == "folded" and PASSES == 1:
            top = tl.max(tl.where(fault, -127, scale).reshape(BLOCK_R, BLOCK_B), 1)
        if KIND == "folded" and not CLIP:
            # A block at the largest scale may hold more than its largest element.
            if tl.max(top, 0) == 127 - MAX_EXP:
                y = clip(y, scale, MAX_VALUE)
        low = tl.maximum(top - TOP, -127)
        ref = tl.broadcast_to(low[:, None], (BLOCK_R, BLOCK_B)).reshape(N)
        data = encode(
            y,
            noise,
            scale,
            fault,
            ref,
            N,
            KIND,
            CLIP,
            STOCHASTIC,
            M,
            E,
            MAX_VALUE,
            E5M2,
            PTX,
        )
        put(data_ptr, data, index, inside, KIND, 1 + M + E)
        put_scales(scale_ptr, scale, fault, index, inside)
    if KIND == "folded":
        byte = tl.maximum(top - TOP, -127) + 127
        tl.store(ref_ptr + rows, byte.to(tl.uint8), mask=rows < ROWS)
    if NORMS:
        tl.store(norm_ptr + rows, norm, mask=rows < ROWS)


def quantize_rows(
    x: jax.Array,
    *,
    spec: OperandSpec,
    kind: Kind,
    machine: Machine,
    seed: jax.Array | None = None,
    sign_seed: jax.Array | None = None,
    norms: bool = False,
) -> View:
    """Rotates and quantizes along the last axis, in one pass over memory.

    Reads 2 bytes an element of BF16; writes 1 as FP8 or 1/2 as packed MXFP4, and 1/32 of scales.

    Args:
      x: (rows, columns) float32, bfloat16 or float16.
      spec: how it is quantized.
      kind: what is written, see `View`.
      machine: that runs it.
      seed: uint32[2], for stochastic rounding.
      sign_seed: uint32[2], for random signs.
      norms: whether to return the rows' squared norms too.

    Returns:
      A `View` with rows as x has them.
    """
    x, spec, inputs = prepared(x, axis=1, spec=spec, seed=seed, sign_seed=sign_seed)
    rows, blocks = x.shape[0], x.shape[1] // 32
    block_b = min(triton.next_power_of_2(blocks), MOST_BLOCKS)
    block_r = max(1, BLOCKS_PER_PROGRAM // block_b)
    results = _launch.launch(
        _kernel,
        *inputs,
        out=view_shapes(rows, x.shape[1], fmt=spec.mx, kind=kind, norms=1),
        grid=triton.cdiv(rows, block_r),
        num_warps=WARPS,
        ROWS=rows,
        BLOCKS=blocks,
        BLOCK_R=block_r,
        BLOCK_B=block_b,
        **constants(spec, kind=kind, machine=machine, norms=norms),
    )
    return View.of(*results, kind=kind, norms=norms)
