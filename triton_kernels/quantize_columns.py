"""Fused transform and quantization along the first axis: MX blocks within columns, transposed.

A product wants its operands with the contracted axis last, so the view of X (tokens, in) along
tokens is (in, tokens): rows are read and rows of the transpose written, in one pass.

A folded operand needs a reference exponent a row before all of the row was seen. The kernel guesses
it from eight values of the row; the format's window of binades is wide enough that the guess nearly
always serves, and where it does not, sets a flag. `_settle_kernel` writes flagged rows again, with
the reference exponents that the row kernel would have used.
"""

import dataclasses

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from adahop_jax._formats import OperandSpec
from triton_kernels import _launch
from triton_kernels._blocks import (
    as_words,
    block_scales,
    halves,
    rotate,
    stack_loads,
    to_bits,
    uniform,
)
from triton_kernels._view import Kind, View, constants, prepared, view_shapes
from triton_kernels._write import encode, put, put_scales
from triton_kernels.machines import Machine

COLUMNS_PER_PROGRAM = 128
SETTLED_COLUMNS = 64
SETTLED_SEGMENTS = 4


@triton.jit
def _words(
    x_ptr,
    first,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STRIDE: tl.constexpr,
    row,
    COUNT: tl.constexpr,
    C: tl.constexpr,
):
    """COUNT rows from `row` on, STRIDE apart, of C columns from `first` on, as they are stored.

    Words of two columns where there are such, [C / 2, COUNT], else values [C, COUNT].
    """
    if COLUMNS % 2 == 0 and x_ptr.dtype.element_ty != tl.float32:
        W: tl.constexpr = COLUMNS // 2
        word = first // 2 + tl.arange(0, C // 2)
        ptr = as_words(x_ptr) + row.to(tl.int64) * W + word
        inside = (word < W) & (row < ROWS)
        return stack_loads(ptr, STRIDE * W, inside, COUNT).reshape(C // 2, COUNT)
    else:
        column = first + tl.arange(0, C)
        ptr = x_ptr + row.to(tl.int64) * COLUMNS + column
        inside = (column < COLUMNS) & (row < ROWS)
        return stack_loads(ptr, STRIDE * COLUMNS, inside, COUNT).reshape(C, COUNT)


@triton.jit
def _values(words, DTYPE: tl.constexpr, C: tl.constexpr):
    """What `_words` loaded, float32 [C, COUNT]."""
    COUNT: tl.constexpr = words.shape[1]
    if words.shape[0] == C:
        return words.to(tl.float32)
    else:
        low, high = halves(words, DTYPE)
        return tl.join(low, high).permute(0, 2, 1).reshape(C, COUNT)


@triton.jit
def _noise(row, first, seed_ptr, COUNT: tl.constexpr, N: tl.constexpr):
    """Noise for COUNT rows from `row` on of N columns from `first` on: [N, COUNT]."""
    rows = row + tl.arange(0, COUNT)
    return tl.trans(uniform(rows, first // 4 + tl.arange(0, N // 4), seed_ptr, COUNT, N // 4))


@triton.jit
def _block(x, noise, signs_ptr, ref, Q: tl.constexpr):
    """Data, scale exponents, faults and squared norms of one block x [N, 32] in N columns."""
    N: tl.constexpr = x.shape[0]
    norm = tl.zeros((N,), tl.float32)
    if Q.norms:
        norm = tl.sum(x * x, 1)
    y = rotate(x, signs_ptr, N, Q)
    scale, fault = block_scales(y, Q)
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
        noise = _noise(block * 32, first, seed_ptr, 32, C)
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
    data_ptr,
    scale_ptr,
    ref_ptr,
    norm_ptr,
    flag_ptr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    C: tl.constexpr,
    Q: tl.constexpr,
):
    """A program: C columns, two blocks of 32 rows each."""
    BLOCKS: tl.constexpr = ROWS // 32
    STRIPS: tl.constexpr = (COLUMNS + C - 1) // C
    PARTS: tl.constexpr = (BLOCKS + 1) // 2
    N: tl.constexpr = 2 * C
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    strip = tl.program_id(0) % STRIPS
    part = tl.program_id(0) // STRIPS
    first = strip * C
    block = part * 2
    column = first + tl.arange(0, C)

    # All is loaded before anything is worked on.
    words0 = _words(x_ptr, first, ROWS, COLUMNS, 1, block * 32, 32, C)
    words1 = _words(x_ptr, first, ROWS, COLUMNS, 1, block * 32 + 32, 32, C)
    guess = tl.zeros((C,), tl.int32)
    if Q.kind == "folded":
        # Eight rows all over the tensor: padding and masked tokens lie at its ends.
        head = _values(_words(x_ptr, first, ROWS, COLUMNS, ROWS // 8, part * 0, 8, C), dtype, C)
        largest = to_bits(tl.max(tl.abs(head), 1)) >> 23
        # A rotated block's largest value is some four times its values' usual size.
        guess = largest - 127 - Q.max_exponent + (2 if Q.hadamard else 0)
        guess = tl.minimum(tl.maximum(guess, -127), 127 - Q.max_exponent - Q.top)
        if part == 0:
            tl.store(ref_ptr + column, (guess + 127).to(tl.uint8), mask=column < COLUMNS)

    # Stored together, 64 bytes of a row.
    data0, scale0, fault0, norm0 = _quantized(
        words0, signs_ptr, seed_ptr, first, block, guess, dtype, C, Q
    )
    data1, scale1, fault1, norm1 = _quantized(
        words1, signs_ptr, seed_ptr, first, block + 1, guess, dtype, C, Q
    )
    if Q.norms:
        norm = norm_ptr + column.to(tl.int64) * PARTS + part
        tl.store(norm, norm0 + norm1, mask=column < COLUMNS)
    nth = block + tl.arange(0, 2)
    index = (column.to(tl.int64)[:, None] * BLOCKS + nth[None, :]).reshape(N)
    inside = ((column < COLUMNS)[:, None] & (nth < BLOCKS)[None, :]).reshape(N)
    data = tl.join(data0, data1).permute(0, 2, 1).reshape(N, data0.shape[1])
    put(data_ptr, data, index, inside, Q)
    scale = tl.join(scale0, scale1).reshape(N)
    fault = tl.join(fault0, fault1).reshape(N)
    if Q.kind == "folded":
        # Nobody but `_settle_kernel` reads them: they lie as it and this kernel like it.
        place = (nth.to(tl.int64)[None, :] * COLUMNS + column[:, None]).reshape(N)
        put_scales(scale_ptr, scale, fault, place, inside)
        # Zero blocks and faults fit everywhere. A block at the largest scale may hold more than
        # its largest element.
        above = scale - tl.broadcast_to(guess[:, None], (C, 2)).reshape(N)
        outside = (above > Q.top) | (above < Q.low) | (scale == 127 - Q.max_exponent)
        outside = outside & (scale > -127) & (fault == 0) & inside
        tl.store(flag_ptr + index * 0 + strip, 1, mask=outside)
    else:
        put_scales(scale_ptr, scale, fault, index, inside)


@triton.jit
def _settle_kernel(
    x_ptr,
    signs_ptr,
    seed_ptr,
    scale_ptr,
    guess_ptr,
    flag_ptr,
    data_ptr,
    ref_ptr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    C: tl.constexpr,
    FLAGGED: tl.constexpr,
    SEGMENTS: tl.constexpr,
    Q: tl.constexpr,
):
    """A program: C columns, and the blocks of one of SEGMENTS. `data_ptr` is read and written."""
    BLOCKS: tl.constexpr = ROWS // 32
    STRIPS: tl.constexpr = (COLUMNS + C - 1) // C
    AT_ONCE: tl.constexpr = 64
    first = (tl.program_id(0) % STRIPS) * C
    segment = tl.program_id(0) // STRIPS
    column = first + tl.arange(0, C)
    inside = column < COLUMNS
    ref = tl.load(guess_ptr + column, mask=inside, other=127).to(tl.int32) - 127

    settled = ref
    if tl.load(flag_ptr + first // FLAGGED) > 0:
        most = tl.zeros((C,), tl.int32)
        for i in range(0, BLOCKS, AT_ONCE):
            nth = i + tl.arange(0, AT_ONCE)
            ptr = scale_ptr + nth.to(tl.int64)[:, None] * COLUMNS + column[None, :]
            there = (nth < BLOCKS)[:, None] & inside[None, :]
            byte = tl.load(ptr, mask=there, other=0).to(tl.int32)
            most = tl.maximum(most, tl.max(tl.where(byte == 255, 0, byte), 0))
        settled = tl.maximum(most - 127 - Q.top, -127)
        for i in range((BLOCKS + SEGMENTS - 1) // SEGMENTS):
            block = i * SEGMENTS + segment
            words = _words(x_ptr, first, ROWS, COLUMNS, 1, block * 32, 32, C)
            data, _, _, _ = _quantized(
                words, signs_ptr, seed_ptr, first, block, settled, x_ptr.dtype.element_ty, C, Q
            )
            index = column.to(tl.int64) * BLOCKS + block
            put(data_ptr, data, index, inside & (block < BLOCKS), Q)
    if segment == 0:
        tl.store(ref_ptr + column, (settled + 127).to(tl.uint8), mask=inside)


def quantize_columns(
    x: jax.Array,
    *,
    spec: OperandSpec,
    kind: Kind,
    machine: Machine,
    seed: jax.Array | None = None,
    sign_seed: jax.Array | None = None,
    norms: bool = False,
) -> View:
    """Rotates and quantizes along the first axis, in one pass over memory, and transposes.

    Reads 2 bytes an element of BF16; writes 1 as FP8 or 1/2 as packed MXFP4, and 1/32 of scales.
    Columns that are flagged are read and written once more.

    Args:
      x: (rows, columns) float32, bfloat16 or float16.
      spec: how it is quantized.
      kind: what is written, see `View`.
      machine: that runs it.
      seed: uint32[2], for stochastic rounding.
      sign_seed: uint32[2], for random signs.
      norms: whether to return the columns' squared norms too.

    Returns:
      A `View` whose rows are x's columns.
    """
    x, spec, inputs = prepared(x, axis=0, spec=spec, seed=seed, sign_seed=sign_seed)
    rows, columns = x.shape
    strips = triton.cdiv(columns, COLUMNS_PER_PROGRAM)
    parts = triton.cdiv(rows // 32, 2)
    paired = x.dtype.itemsize == 2 and columns % 2 == 0
    shapes = view_shapes(columns, rows, fmt=spec.mx, kind=kind, norms=parts if norms else 1)
    sizes = {"ROWS": rows, "COLUMNS": columns}
    facts = constants(spec, kind=kind, machine=machine, norms=norms)
    data, scales, refs, squares, flags = _launch.launch(
        _kernel,
        *inputs,
        out=(*shapes, jax.ShapeDtypeStruct((strips if kind == "folded" else 1,), jnp.int32)),
        zeroed=(4,) if kind == "folded" else (),
        grid=strips * parts,
        num_warps=2 if paired else 4,
        C=COLUMNS_PER_PROGRAM,
        Q=facts,
        **sizes,
    )
    if kind == "folded":
        refs, data = _launch.launch(
            _settle_kernel,
            *inputs,
            scales,
            refs,
            flags,
            data,
            out=(shapes[2], shapes[0]),
            aliases={6: 1},
            grid=triton.cdiv(columns, SETTLED_COLUMNS) * SETTLED_SEGMENTS,
            num_warps=1 if paired else 2,
            C=SETTLED_COLUMNS,
            FLAGGED=COLUMNS_PER_PROGRAM,
            SEGMENTS=SETTLED_SEGMENTS,
            Q=dataclasses.replace(facts, norms=False, clip=True),
            **sizes,
        )
    return View.of(data, scales, refs, squares, kind=kind, norms=norms)
