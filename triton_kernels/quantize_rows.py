"""Fused transform and quantization along the last axis: MX blocks within rows."""

import jax
import triton
import triton.language as tl

from adahop_jax._view import Request, View
from triton_kernels import _launch
from triton_kernels._blocks import (
    as_words,
    block_scales,
    clip,
    from_bits,
    halves,
    largest_bits,
    rotate,
    stack_loads,
    uniform,
)
from triton_kernels._constants import constants, prepared, view_shapes
from triton_kernels._write import encode, put, put_scales
from triton_kernels.machines import Machine

WARPS = 8
BLOCKS_PER_PROGRAM = 256
MOST_BLOCKS = 512
# As many as run at once: folding takes more registers.
PROGRAMS_PER_PROCESSOR = {"folded": 3, "elements": 3, "codes": 8}


@triton.jit
def _words(x_ptr, index, inside):
    """Blocks `index` [N] of 32 contiguous values, as they lie in memory: int32 [N, 16 or 32]."""
    N: tl.constexpr = index.shape[0]
    COUNT: tl.constexpr = 8 if x_ptr.dtype.element_ty == tl.float32 else 4
    ptr = as_words(x_ptr) + (index * (4 * COUNT))[:, None] + tl.arange(0, 4)[None, :]
    words = stack_loads(ptr, 4, inside[:, None], COUNT)
    if COUNT == 8:
        return words.permute(0, 2, 3, 4, 1).reshape(N, 32)
    else:
        return words.permute(0, 2, 3, 1).reshape(N, 16)


@triton.jit
def _values(words, DTYPE: tl.constexpr):
    """Words of N blocks -> float32 [N, 32]."""
    if DTYPE == tl.float32:
        return from_bits(words)
    else:
        low, high = halves(words, DTYPE)
        return tl.join(low, high).reshape(words.shape[0], 32)


@triton.jit
def _place(
    group,
    i,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """The `i`-th blocks of a group of rows: their indices [N], and which of them there are."""
    n = tl.arange(0, BLOCK_R * BLOCK_B)
    row = group * BLOCK_R + n // BLOCK_B
    block = i * BLOCK_B + n % BLOCK_B
    if ROWS % BLOCK_R == 0 and BLOCKS % BLOCK_B == 0:
        inside = tl.full((BLOCK_R * BLOCK_B,), True, tl.int1)
    else:
        inside = (row < ROWS) & (block < BLOCKS)
    return row.to(tl.int64) * BLOCKS + block, inside


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
    PROGRAMS: tl.constexpr,
    Q: tl.constexpr,
):
    """A program: every PROGRAMS-th group of BLOCK_R whole rows, BLOCK_B blocks of each at a time.

    What comes next is loaded while what was loaded is worked on.
    """
    N: tl.constexpr = BLOCK_R * BLOCK_B
    PASSES: tl.constexpr = (BLOCKS + BLOCK_B - 1) // BLOCK_B
    GROUPS: tl.constexpr = (ROWS + BLOCK_R - 1) // BLOCK_R
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    index, inside = _place(tl.program_id(0), 0, ROWS, BLOCKS, BLOCK_R, BLOCK_B)
    words = _words(x_ptr, index, inside)
    for group in tl.range(tl.program_id(0), GROUPS, PROGRAMS):
        # One reference exponent a row, from its largest scale. A row that is longer than one pass
        # is read twice.
        top = tl.full((BLOCK_R,), -127, tl.int32)
        if Q.kind == "folded" and PASSES > 1:
            for i in range(PASSES):
                index, inside = _place(group, i, ROWS, BLOCKS, BLOCK_R, BLOCK_B)
                x = _values(_words(x_ptr, index, inside), dtype)
                scale, fault = block_scales(largest_bits(rotate(x, signs_ptr, N, Q)), Q)
                scale = tl.where(fault, -127, scale).reshape(BLOCK_R, BLOCK_B)
                top = tl.maximum(top, tl.max(scale, 1))
        rows = group * BLOCK_R + tl.arange(0, BLOCK_R)
        norm = tl.zeros((BLOCK_R,), tl.float32)
        for i in range(PASSES):
            x = _values(words, dtype)
            last = i == PASSES - 1
            following = tl.minimum(tl.where(last, group + PROGRAMS, group), GROUPS - 1)
            index, inside = _place(
                following, tl.where(last, 0, i + 1), ROWS, BLOCKS, BLOCK_R, BLOCK_B
            )
            words = _words(x_ptr, index, inside)
            if Q.norms:
                norm += tl.sum(tl.sum(x * x, 1).reshape(BLOCK_R, BLOCK_B), 1)
            y = rotate(x, signs_ptr, N, Q)
            scale, fault = block_scales(largest_bits(y), Q)
            noise = 0.0
            if Q.stochastic:
                nth = i * (BLOCK_B * 8) + tl.arange(0, BLOCK_B * 8)
                noise = uniform(rows, nth, seed_ptr, BLOCK_R, BLOCK_B * 8).reshape(N, 32)
            if Q.kind == "folded" and PASSES == 1:
                top = tl.max(tl.where(fault, -127, scale).reshape(BLOCK_R, BLOCK_B), 1)
            if Q.kind == "folded" and not Q.clip:
                # A block at the largest scale may hold more than its largest element.
                if tl.max(top, 0) == 127 - Q.max_exponent:
                    y = clip(y, scale, Q)
            low = tl.maximum(top - Q.top, -127)
            ref = tl.broadcast_to(low[:, None], (BLOCK_R, BLOCK_B)).reshape(N)
            data = encode(y, noise, scale, fault, ref, N, Q)
            index, inside = _place(group, i, ROWS, BLOCKS, BLOCK_R, BLOCK_B)
            put(data_ptr, data, index, inside, Q)
            if Q.kind != "folded":
                put_scales(scale_ptr, scale, fault, index, inside)
        if Q.kind == "folded":
            byte = tl.maximum(top - Q.top, -127) + 127
            tl.store(ref_ptr + rows, byte.to(tl.uint8), mask=rows < ROWS)
        if Q.norms:
            tl.store(norm_ptr + rows, norm, mask=rows < ROWS)


def quantize_rows(x: jax.Array, request: Request, *, machine: Machine, processors: int) -> View:
    """Rotates and quantizes along the last axis, in one pass over memory.

    Reads 2 bytes an element of BF16; writes 1 as FP8, or 1/2 as packed MXFP4 and 1/32 of scales.

    Args:
      x: (rows, columns) float32, bfloat16 or float16.
      request: for the view.
      machine: that runs it.
      processors: of the GPU.

    Returns:
      A `View` with rows as x has them.
    """
    kind, _, seed, _, norms = request
    x, spec, inputs = prepared(x, request, axis=1)
    rows, blocks = x.shape[0], x.shape[1] // 32
    if (
        kind == "codes"
        and not (norms or seed is not None)
        and rows * blocks % BLOCKS_PER_PROGRAM == 0
    ):
        # Nothing is asked of whole rows.
        rows, blocks = rows * blocks // BLOCKS_PER_PROGRAM, BLOCKS_PER_PROGRAM
    block_b = min(triton.next_power_of_2(blocks), MOST_BLOCKS)
    block_r = max(1, BLOCKS_PER_PROGRAM // block_b)
    programs = min(triton.cdiv(rows, block_r), PROGRAMS_PER_PROCESSOR[kind] * processors)
    results = _launch.launch(
        _kernel,
        *inputs,
        out=view_shapes(*x.shape, fmt=spec.mx, kind=kind),
        grid=programs,
        num_warps=WARPS,
        ROWS=rows,
        BLOCKS=blocks,
        BLOCK_R=block_r,
        BLOCK_B=block_b,
        PROGRAMS=programs,
        Q=constants(spec, kind=kind, machine=machine, norms=norms),
    )
    return View.of(request, *results)
