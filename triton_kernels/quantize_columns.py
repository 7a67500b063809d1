"""Fused transform and quantization along the first axis: MX blocks within columns, transposed.

A product wants its operands with the contracted axis last, so the view of X (tokens, in) along
tokens is (in, tokens): rows are read and rows of the transpose written, in one pass. A folded
operand needs a reference exponent a row before all of the row was seen: see `settle`.
"""

import dataclasses

import jax
import triton
import triton.language as tl

from adahop_jax._view import Request, View
from triton_kernels import _launch
from triton_kernels._blocks import (
    as_words,
    block_scales,
    halves,
    largest_bits,
    rotate,
    stack_loads,
    uniform,
)
from triton_kernels._constants import constants, prepared, view_shapes
from triton_kernels._write import encode, put, put_scales
from triton_kernels.machines import Machine
from triton_kernels.settle import guess, settle

COLUMNS_PER_PROGRAM = 128


@triton.jit
def _words(x_ptr, first, block, ROWS: tl.constexpr, COLUMNS: tl.constexpr, C: tl.constexpr):
    """A block of 32 rows of C columns from `first` on, as they are stored.

    Words of two columns where there are such, [C / 2, 32], else values [C, 32].
    """
    row = block * 32
    if COLUMNS % 2 == 0 and x_ptr.dtype.element_ty != tl.float32:
        W: tl.constexpr = COLUMNS // 2
        word = first // 2 + tl.arange(0, C // 2)
        ptr = as_words(x_ptr) + row.to(tl.int64) * W + word
        return stack_loads(ptr, W, (word < W) & (row < ROWS), 32).reshape(C // 2, 32)
    else:
        column = first + tl.arange(0, C)
        ptr = x_ptr + row.to(tl.int64) * COLUMNS + column
        inside = (column < COLUMNS) & (row < ROWS)
        return stack_loads(ptr, COLUMNS, inside, 32).reshape(C, 32)


@triton.jit
def _noise(block, first, seed_ptr, C: tl.constexpr):
    """Noise for a block of 32 rows of C columns from `first` on: [C, 32]."""
    rows = block * 32 + tl.arange(0, 32)
    return tl.trans(uniform(rows, first // 4 + tl.arange(0, C // 4), seed_ptr, 32, C // 4))


@triton.jit
def _block(x, noise, signs_ptr, ref, Q: tl.constexpr):
    """Data, scale exponents, faults and squared norms of one block x [N, 32] in N columns."""
    N: tl.constexpr = x.shape[0]
    norm = tl.zeros((N,), tl.float32)
    if Q.norms:
        norm = tl.sum(x * x, 1)
    y = rotate(x, signs_ptr, N, Q)
    scale, fault = block_scales(largest_bits(y), Q)
    return encode(y, noise, scale, fault, ref, N, Q), scale, fault, norm


@triton.jit
def _quantized(
    words,
    signs_ptr,
    seed_ptr,
    first,
    block,
    ref,
    DTYPE: tl.constexpr,
    C: tl.constexpr,
    Q: tl.constexpr,
):
    """The same of one block in C columns, from what `_words` loaded."""
    noise = 0.0
    if Q.stochastic:
        noise = _noise(block, first, seed_ptr, C)
    if words.shape[0] == C:
        return _block(words.to(tl.float32), noise, signs_ptr, ref, Q)
    else:
        # One column of a pair after the other, which saves registers.
        low, high = halves(words, DTYPE)
        noise0, noise1 = noise, noise
        if Q.stochastic:
            noise0, noise1 = tl.split(noise.reshape(C // 2, 2, 32).permute(0, 2, 1))
        ref0, ref1 = tl.split(ref.reshape(C // 2, 2))
        data0, scale0, fault0, norm0 = _block(low, noise0, signs_ptr, ref0, Q)
        data1, scale1, fault1, norm1 = _block(high, noise1, signs_ptr, ref1, Q)
        data = tl.join(data0, data1).permute(0, 2, 1).reshape(C, data0.shape[1])
        scale = tl.join(scale0, scale1).reshape(C)
        return data, scale, tl.join(fault0, fault1).reshape(C), tl.join(norm0, norm1).reshape(C)


@triton.jit
def _kernel(
    x_ptr,
    signs_ptr,
    seed_ptr,
    ref_ptr,
    flag_ptr,
    data_ptr,
    scale_ptr,
    norm_ptr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    C: tl.constexpr,
    Q: tl.constexpr,
):
    """A program: C columns, two blocks of 32 rows each."""
    BLOCKS: tl.constexpr = ROWS // 32
    STRIPS: tl.constexpr = (COLUMNS + C - 1) // C
    N: tl.constexpr = 2 * C
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    strip = tl.program_id(0) % STRIPS
    part = tl.program_id(0) // STRIPS
    first = strip * C
    block = part * 2
    column = first + tl.arange(0, C)

    # All is loaded before anything is worked on.
    words0 = _words(x_ptr, first, block, ROWS, COLUMNS, C)
    words1 = _words(x_ptr, first, block + 1, ROWS, COLUMNS, C)
    ref = tl.zeros((C,), tl.int32)
    if Q.kind == "folded":
        ref = tl.load(ref_ptr + column, mask=column < COLUMNS, other=127).to(tl.int32) - 127

    # Stored together, 64 bytes of a row.
    data0, scale0, fault0, norm0 = _quantized(
        words0, signs_ptr, seed_ptr, first, block, ref, dtype, C, Q
    )
    data1, scale1, fault1, norm1 = _quantized(
        words1, signs_ptr, seed_ptr, first, block + 1, ref, dtype, C, Q
    )
    if Q.norms:
        norm = norm_ptr + part.to(tl.int64) * COLUMNS + column
        tl.store(norm, norm0 + norm1, mask=column < COLUMNS)
    nth = block + tl.arange(0, 2)
    index = (column.to(tl.int64)[:, None] * BLOCKS + nth[None, :]).reshape(N)
    inside = ((column < COLUMNS)[:, None] & (nth < BLOCKS)[None, :]).reshape(N)
    data = tl.join(data0, data1).permute(0, 2, 1).reshape(N, data0.shape[1])
    put(data_ptr, data, index, inside, Q)
    scale = tl.join(scale0, scale1).reshape(N)
    fault = tl.join(fault0, fault1).reshape(N)
    if Q.kind == "folded":
        # Zero blocks and faults fit everywhere. A block at the largest scale may hold more than
        # its largest element.
        above = scale - tl.broadcast_to(ref[:, None], (C, 2)).reshape(N)
        outside = (above > Q.top) | (above < Q.low) | (scale == 127 - Q.max_exponent)
        outside = outside & (scale > -127) & (fault == 0) & inside
        tl.store(flag_ptr + index * 0 + strip, 1, mask=outside)
    else:
        put_scales(scale_ptr, scale, fault, index, inside)


def quantize_columns(x: jax.Array, request: Request, *, machine: Machine) -> View:
    """Rotates and quantizes along the first axis, in one pass over memory, and transposes.

    Reads 2 bytes an element of BF16; writes 1 as FP8, or 1/2 as packed MXFP4 and 1/32 of scales. Of
    folded columns, those that are flagged are settled.

    Args:
      x: (rows, columns) float32, bfloat16 or float16.
      request: for the view.
      machine: that runs it.

    Returns:
      A `View` whose rows are x's columns.
    """
    kind, norms = request.kind, request.norms
    x, spec, inputs = prepared(x, request, axis=0)
    rows, columns = x.shape
    strips = triton.cdiv(columns, COLUMNS_PER_PROGRAM)
    parts = triton.cdiv(rows // 32, 2)
    paired = x.dtype.itemsize == 2 and columns % 2 == 0
    shape, scale_shape, _, norm_shape = view_shapes(
        columns, rows, fmt=spec.mx, kind=kind, norms=parts if norms else 1
    )
    facts = constants(spec, kind=kind, machine=machine, norms=norms)
    refs = flags = inputs[0]  # stands in for what is not read
    out = [shape, scale_shape, norm_shape]
    if kind == "folded":
        within = -127, 127 - spec.mx.max_exponent
        _, refs, flags = guess(x, None, facts, flags=strips, within=within)
        out.append(jax.ShapeDtypeStruct(flags.shape, flags.dtype))
    data, scales, squares, *set_flags = _launch.launch(
        _kernel,
        *inputs,
        refs,
        flags,
        out=out,
        aliases={4: 3} if kind == "folded" else None,
        grid=strips * parts,
        num_warps=2 if paired else 4,
        ROWS=rows,
        COLUMNS=columns,
        C=COLUMNS_PER_PROGRAM,
        Q=facts,
    )
    if kind == "folded":
        facts = dataclasses.replace(facts, norms=False)
        data, refs, squares = settle(
            inputs,
            *set_flags,
            data,
            refs,
            squares,
            axis=0,
            facts=facts,
            flagged=COLUMNS_PER_PROGRAM,
        )
    return View.of(request, data, scales, refs, squares)
