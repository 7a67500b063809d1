"""Fused transform and quantization along the first axis: MX blocks within columns, transposed.

A product wants its operands with the contracted axis last, so the view of X (tokens, in) along
tokens is (in, tokens): rows are read and rows of the transpose written, in one pass.

A folded operand needs a reference exponent a row before all of the row was seen. The kernel guesses
it from eight values of the row; the format's window of binades is wide enough that the guess nearly
always serves, and where it does not, sets a flag. `_settle_kernel` writes flagged rows again, with
the reference exponents that the row kernel would have used.
"""

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
def _columns(
    x_ptr,
    first,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STRIDE: tl.constexpr,
    row,
    COUNT: tl.constexpr,
    N: tl.constexpr,
):
    """COUNT rows from `row` on, STRIDE apart, of N columns from `first` on: float32 [N, COUNT]."""
    if COLUMNS % 2 == 0 and x_ptr.dtype.element_ty != tl.float32:
        # Two columns at a time: they share a word.
        W: tl.constexpr = COLUMNS // 2
        word = first // 2 + tl.arange(0, N // 2)
        ptr = as_words(x_ptr) + row.to(tl.int64) * W + word
        inside = (word < W) & (row < ROWS)
        words = stack_loads(ptr, STRIDE * W, inside, COUNT).reshape(N // 2, COUNT)
        low, high = halves(words, x_ptr.dtype.element_ty)
        return tl.join(low, high).permute(0, 2, 1).reshape(N, COUNT)
    else:
        column = first + tl.arange(0, N)
        ptr = x_ptr + row.to(tl.int64) * COLUMNS + column
        inside = (column < COLUMNS) & (row < ROWS)
        loaded = stack_loads(ptr, STRIDE * COLUMNS, inside, COUNT)
        return loaded.reshape(N, COUNT).to(tl.float32)


@triton.jit
def _noise(row, first, seed_ptr, COUNT: tl.constexpr, N: tl.constexpr):
    """Noise for COUNT rows from `row` on of N columns from `first` on: [N, COUNT]."""
    rows = row + tl.arange(0, COUNT)
    return tl.trans(uniform(rows, first // 4 + tl.arange(0, N // 4), seed_ptr, COUNT, N // 4))


@triton.jit
def _block(
    x_ptr,
    signs_ptr,
    seed_ptr,
    first,
    block,
    ref,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    C: tl.constexpr,
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
    E5M2: tl.constexpr,
    PTX: tl.constexpr,
):
    """Data, scale exponents, faults and squared norms of one block in each of C columns."""
    x = _columns(x_ptr, first, ROWS, COLUMNS, 1, block * 32, 32, C)
    norm = tl.zeros((C,), tl.float32)
    if NORMS:
        norm = tl.sum(x * x, 1)
    noise = 0.0
    if STOCHASTIC:
        noise = _noise(block * 32, first, seed_ptr, 32, C)
    y = rotate(x, signs_ptr, C, PRE_SCALE, SIGNS, HADAMARD, PTX)
    scale, fault = block_scales(y, RULE, M, MAX_EXP)
    data = encode(
        y, noise, scale, fault, ref, C, KIND, CLIP, STOCHASTIC, M, E, MAX_VALUE, E5M2, PTX
    )
    return data, scale, fault, norm


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
    """A program: C columns, two blocks of 32 rows each."""
    BLOCKS: tl.constexpr = ROWS // 32
    STRIPS: tl.constexpr = (COLUMNS + C - 1) // C
    PARTS: tl.constexpr = (BLOCKS + 1) // 2
    first = (tl.program_id(0) % STRIPS) * C
    part = tl.program_id(0) // STRIPS
    block = part * 2
    column = first + tl.arange(0, C)

    guess = tl.zeros((C,), tl.int32)
    if KIND == "folded":
        # Eight rows all over the tensor: padding and masked tokens lie at its ends.
        head = _columns(x_ptr, first, ROWS, COLUMNS, ROWS // 8, part * 0, 8, C)
        largest = to_bits(tl.max(tl.abs(head), 1)) >> 23
        # A rotated block's largest value is some four times its values' usual size.
        guess = largest - 127 - MAX_EXP + (2 if HADAMARD else 0)
        guess = tl.minimum(tl.maximum(guess, -127), 127 - MAX_EXP - TOP)
        if part == 0:
            tl.store(ref_ptr + column, (guess + 127).to(tl.uint8), mask=column < COLUMNS)

    # One block after the other, which saves registers; stored together, 64 bytes of a row.
    data0, scale0, fault0, norm0 = _block(
        x_ptr,
        signs_ptr,
        seed_ptr,
        first,
        block,
        guess,
        ROWS,
        COLUMNS,
        C,
        KIND,
        NORMS,
        PRE_SCALE,
        SIGNS,
        HADAMARD,
        RULE,
        CLIP,
        STOCHASTIC,
        M,
        E,
        MAX_EXP,
        MAX_VALUE,
        E5M2,
        PTX,
    )
    data1, scale1, fault1, norm1 = _block(
        x_ptr,
        signs_ptr,
        seed_ptr,
        first,
        block + 1,
        guess,
        ROWS,
        COLUMNS,
        C,
        KIND,
        NORMS,
        PRE_SCALE,
        SIGNS,
        HADAMARD,
        RULE,
        CLIP,
        STOCHASTIC,
        M,
        E,
        MAX_EXP,
        MAX_VALUE,
        E5M2,
        PTX,
    )
    if NORMS:
        norm = norm_ptr + column.to(tl.int64) * PARTS + part
        tl.store(norm, norm0 + norm1, mask=column < COLUMNS)
    W: tl.constexpr = data0.shape[1]
    N: tl.constexpr = 2 * C
    nth = block + tl.arange(0, 2)
    index = (column.to(tl.int64)[:, None] * BLOCKS + nth[None, :]).reshape(N)
    inside = ((column < COLUMNS)[:, None] & (nth < BLOCKS)[None, :]).reshape(N)
    data = tl.join(data0, data1).permute(0, 2, 1).reshape(N, W)
    put(data_ptr, data, index, inside, KIND, 1 + M + E)
    scale = tl.join(scale0, scale1).reshape(N)
    fault = tl.join(fault0, fault1).reshape(N)
    put_scales(scale_ptr, scale, fault, index, inside)
    if KIND == "folded":
        # Zero blocks and faults fit everywhere. A block at the largest scale may hold more than
        # its largest element.
        above = scale - tl.broadcast_to(guess[:, None], (C, 2)).reshape(N)
        outside = (above > TOP) | (above < LOW) | (scale == 127 - MAX_EXP)
        outside = outside & (scale > -127) & (fault == 0) & inside
        tl.store(flag_ptr + index * 0 + tl.program_id(0) % STRIPS, 1, mask=outside)


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
    """A program: C columns, and the blocks of one of SEGMENTS. `data_ptr` is read and written."""
    BLOCKS: tl.constexpr = ROWS // 32
    STRIPS: tl.constexpr = (COLUMNS + C - 1) // C
    AT_ONCE: tl.constexpr = 128
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
            ptr = scale_ptr + (column.to(tl.int64) * BLOCKS)[:, None] + nth[None, :]
            there = inside[:, None] & (nth < BLOCKS)[None, :]
            byte = tl.load(ptr, mask=there, other=0).to(tl.int32)
            most = tl.maximum(most, tl.max(tl.where(byte == 255, 0, byte), 1))
        settled = tl.maximum(most - 127 - TOP, -127)
        for i in range((BLOCKS + SEGMENTS - 1) // SEGMENTS):
            block = i * SEGMENTS + segment
            data, _, _, _ = _block(
                x_ptr,
                signs_ptr,
                seed_ptr,
                first,
                block,
                settled,
                ROWS,
                COLUMNS,
                C,
                KIND,
                False,
                PRE_SCALE,
                SIGNS,
                HADAMARD,
                RULE,
                True,
                STOCHASTIC,
                M,
                E,
                MAX_EXP,
                MAX_VALUE,
                E5M2,
                PTX,
            )
            index = column.to(tl.int64) * BLOCKS + block
            put(data_ptr, data, index, inside & (block < BLOCKS), KIND, 1 + M + E)
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
    parts = triton.cdiv(rows // 32, 2)
    paired = x.dtype.itemsize == 2 and columns % 2 == 0
    shapes = view_shapes(columns, rows, fmt=spec.mx, kind=kind, norms=parts if norms else 1)
    sizes = {"ROWS": rows, "COLUMNS": columns}
    facts = constants(spec, kind=kind, machine=machine, norms=norms)
    strips = triton.cdiv(columns, COLUMNS_PER_PROGRAM)
    data, scales, refs, squares, flags = _launch.launch(
        _kernel,
        *inputs,
        out=(*shapes, jax.ShapeDtypeStruct((strips if kind == "folded" else 1,), jnp.int32)),
        zeroed=(4,) if kind == "folded" else (),
        grid=strips * parts,
        num_warps=2 if paired else 4,
        C=COLUMNS_PER_PROGRAM,
        **sizes,
        **facts,
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
            **sizes,
            **facts,
        )
    return View.of(data, scales, refs, squares, kind=kind, norms=norms)
