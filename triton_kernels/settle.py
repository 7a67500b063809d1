"""Rows of a view quantized anew, where a kernel that was in a hurry has flagged them.

Kernels that see a part of a row at a time work with a reference exponent that is guessed before,
from a few values of the row. The format's window of binades is wide enough that the guess nearly
always serves; where it does not, or where tensor cores cannot be trusted with what they met, they
set a flag. Here flagged rows are written again, by the butterfly and with the reference exponents
that `quantize_rows` would have used.
"""

import dataclasses

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from triton_kernels import _launch
from triton_kernels._blocks import EXPONENT, block_scales, largest_bits, rotate, uniform
from triton_kernels._constants import Constants
from triton_kernels._write import encode, put, put_scales

GUESSED = 128
ROWS_PER_PROGRAM = 64
SEGMENTS = 4


@triton.jit
def _guessed(
    x_ptr,
    ref_ptr,
    row,
    ROWS: tl.constexpr,
    LENGTH: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    STRIDE: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    Q: tl.constexpr,
):
    """Stores reference exponents for rows [N] from a few values of each, all over it.

    Padding and masked tokens lie at an end, and sequences begin at even parts of the tokens: the
    values lie between. Where neighbours lie in memory one behind the other, two groups of eight
    cost less than eight single ones. A row of which only zeros are seen is taken for the largest
    of the others.
    """
    inside = row < ROWS
    GROUPS: tl.constexpr = 2 if STRIDE == 1 else 8
    n = tl.arange(0, 16 if STRIDE == 1 else 8)
    EACH: tl.constexpr = n.shape[0] // GROUPS
    FIRST: tl.constexpr = LENGTH * 3 // (8 * GROUPS) // EACH * EACH
    step = FIRST + n // EACH * (LENGTH // GROUPS) + n % EACH
    row_ptr = x_ptr + row.to(tl.int64) * ROW_STRIDE
    ptr = row_ptr[:, None] + step.to(tl.int64)[None, :] * STRIDE
    mask = inside[:, None] & (step < LENGTH)[None, :]
    x = tl.load(ptr, mask=mask, other=0).to(tl.float32)
    bits = largest_bits(x)
    bits = tl.where(bits == 0, tl.max(tl.where(bits < EXPONENT, bits, 0), 0), bits)
    expected = (bits >> 23) - 127 - Q.max_exponent + Q.growth
    ref = tl.minimum(tl.maximum(expected, LEAST - Q.low), MOST - Q.top)
    tl.store(ref_ptr + row, (ref + 127).to(tl.uint8), mask=inside)


@triton.jit
def _guess_kernel(
    x_ptr,
    row_ref_ptr,
    column_ref_ptr,
    flag_ptr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    N: tl.constexpr,
    FLAGS: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    ROW_Q: tl.constexpr,
    COLUMN_Q: tl.constexpr,
):
    """A program: N of the rows, or of the columns after them, and as many flags, at most."""
    DOWN: tl.constexpr = (ROWS + N - 1) // N
    p = tl.program_id(0)
    n = tl.arange(0, N)
    flag = p * N + n
    tl.store(flag_ptr + flag, 0, mask=flag < FLAGS)
    if p < DOWN:
        if ROW_Q is not None:
            row = p * N + n
            _guessed(x_ptr, row_ref_ptr, row, ROWS, COLUMNS, COLUMNS, 1, LEAST, MOST, ROW_Q)
    else:
        if COLUMN_Q is not None:
            column = (p - DOWN) * N + n
            _guessed(
                x_ptr, column_ref_ptr, column, COLUMNS, ROWS, 1, COLUMNS, LEAST, MOST, COLUMN_Q
            )


def guess(
    x: jax.Array,
    along_rows: Constants | None,
    along_columns: Constants | None,
    *,
    flags: int,
    within: tuple[int, int],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Reference exponents from a few values of each row, or column, and flags that are not set.

    Args:
      x: (rows, columns).
      along_rows: what is known of a folded view along the last axis, or None.
      along_columns: likewise along the first.
      flags: how many, at most one for each row and column.
      within: the least and the largest exponent of a block's scale that a window may span.

    Returns:
      Exponents + 127 of x's rows and of its columns, uint8, which hold nothing if not wanted; and
      int32 (flags,) zeros.
    """
    rows, columns = x.shape
    refs = (jax.ShapeDtypeStruct((size,), jnp.uint8) for size in (rows, columns))
    row_refs, column_refs, unset = _launch.launch(
        _guess_kernel,
        x,
        out=(*refs, jax.ShapeDtypeStruct((flags,), jnp.int32)),
        grid=triton.cdiv(rows, GUESSED) + triton.cdiv(columns, GUESSED),
        num_warps=4,
        ROWS=rows,
        COLUMNS=columns,
        N=GUESSED,
        FLAGS=flags,
        LEAST=within[0],
        MOST=within[1],
        ROW_Q=along_rows,
        COLUMN_Q=along_columns,
    )
    return row_refs, column_refs, unset


@triton.jit
def _loaded(ptr, step, inside, stride, length, BY: tl.constexpr, COUNT: tl.constexpr):
    """COUNT values from `step` on, BY steps of `stride` apart, as new last dims of 2; or zeros."""
    if COUNT == 1:
        return tl.load(ptr, mask=inside & (step < length), other=0).to(tl.float32)
    else:
        even = _loaded(ptr, step, inside, stride, length, 2 * BY, COUNT // 2)
        odd = _loaded(ptr + BY * stride, step + BY, inside, stride, length, 2 * BY, COUNT // 2)
        return tl.join(even, odd)


@triton.jit
def _block(x_ptr, row, inside, block, length, row_stride, stride):
    """A block of every row: float32 [N, 32]."""
    ptr = x_ptr + row.to(tl.int64) * row_stride + tl.cast(block, tl.int64) * (32 * stride)
    return _loaded(ptr, block * 32, inside, stride, length, 1, 32).reshape(row.shape[0], 32)


@triton.jit
def _noise(first, block, seed_ptr, N: tl.constexpr):
    """Noise for a block of N columns of x from `first` on: [N, 32]. Rows are never settled so."""
    nth, group = block * 32 + tl.arange(0, 32), first // 4 + tl.arange(0, N // 4)
    return tl.trans(uniform(nth, group, seed_ptr, 32, N // 4))


@triton.jit
def _kernel(
    x_ptr,
    signs_ptr,
    seed_ptr,
    flag_ptr,
    data_ptr,
    scale_ptr,
    norm_ptr,
    rows,
    length,
    row_stride,
    stride,
    first_flag,
    N: tl.constexpr,
    FLAGGED: tl.constexpr,
    SEGMENTS: tl.constexpr,
    Q: tl.constexpr,
):
    """A program: N rows, and every SEGMENTS-th of their blocks; all of the view is only written.

    A flag stands for FLAGGED rows. `scale_ptr` has the rows' reference exponents if folded. Sizes
    come at run time, so that one kernel serves all: nearly always it only looks at the flags.
    """
    blocks = (length + 31) // 32
    strips = (rows + N - 1) // N
    first = tl.program_id(0) % strips * N
    segment = tl.program_id(0) // strips
    if tl.load(flag_ptr + first_flag + first // FLAGGED) > 0:
        row = first + tl.arange(0, N)
        inside = row < rows
        top = tl.full((N,), -127, tl.int32)
        norm = tl.zeros((N,), tl.float32)
        if Q.kind == "folded" or Q.norms:
            for block in range(blocks):
                x = _block(x_ptr, row, inside, block, length, row_stride, stride)
                norm += tl.sum(x * x, 1)
                scale, fault = block_scales(largest_bits(rotate(x, signs_ptr, N, Q)), Q)
                top = tl.maximum(top, tl.where(fault, -127, scale))
        ref = tl.maximum(top - Q.top, -127)
        if segment == 0:
            if Q.kind == "folded":
                tl.store(scale_ptr + row, (ref + 127).to(tl.uint8), mask=inside)
            if Q.norms:
                tl.store(norm_ptr + row, norm, mask=inside)
        for block in range(segment, blocks, SEGMENTS):
            x = _block(x_ptr, row, inside, block, length, row_stride, stride)
            noise = 0.0
            if Q.stochastic:
                noise = _noise(first, block, seed_ptr, N)
            y = rotate(x, signs_ptr, N, Q)
            scale, fault = block_scales(largest_bits(y), Q)
            index = row.to(tl.int64) * blocks + block
            put(data_ptr, encode(y, noise, scale, fault, ref, N, Q), index, inside, Q)
            if Q.kind != "folded":
                put_scales(scale_ptr, scale, fault, index, inside)


def settle(
    inputs: tuple[jax.Array, ...],
    flags: jax.Array,
    data: jax.Array,
    scales: jax.Array,
    norms: jax.Array,
    *,
    axis: int,
    facts: Constants,
    flagged: int,
    first_flag: int = 0,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Writes flagged rows of a view again.

    Reads the flags; of flagged rows it reads x once, and if they are folded once more for every
    segment, and writes them whole. The view's memory is taken over.

    Args:
      inputs: x (rows, columns), signs and seed as the quantizing kernels take them.
      flags: int32, of which one stands for `flagged` rows of the view.
      data: of the view.
      scales: of its blocks; of its rows, the reference exponents + 127, if it is folded.
      norms: float32 (rows,) of the view; anything if `facts` asks for none.
      axis: of x that is contracted.
      facts: of the view.
      flagged: how many rows, a multiple of `ROWS_PER_PROGRAM`.
      first_flag: where the view's flags start.

    Returns:
      data, scales and norms.
    """
    x = inputs[0]
    rows, length = x.shape[1 - axis], x.shape[axis]
    strides = (1, x.shape[1]) if axis == 0 else (x.shape[1], 1)
    view = data, scales, norms
    data, scales, norms = _launch.launch(
        _kernel,
        *inputs,
        flags,
        *view,
        out=tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in view),
        aliases={4: 0, 5: 1, 6: 2},
        grid=triton.cdiv(rows, ROWS_PER_PROGRAM) * SEGMENTS,
        num_warps=2,
        scalars=(rows, length, *strides, first_flag),
        N=ROWS_PER_PROGRAM,
        FLAGGED=flagged,
        SEGMENTS=SEGMENTS,
        # A block at the largest scale may hold more than its largest element.
        Q=dataclasses.replace(facts, clip=True, ends=True),
    )
    return data, scales, norms
