"""Fused transform and quantization on the tensor cores, along one axis or along both in one read.

A tile of x times a block-diagonal Hadamard matrix is its rows rotated, its transpose times the
matrix its columns: both from the same place in shared memory. Sums are the matrix units' own; what
these may not treat as the butterfly does (values near the ends of float32's range, infinities,
which reach the other block of a tile's row as NaN) is flagged, and `settle` does it again. Where
sums are not exact, an element within 2^-18 of a boundary may be rounded the other way.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import triton
import triton.language as tl

from adahop_jax._formats import OperandSpec
from adahop_jax._view import BLOCK, Request, View, block_signs
from triton_kernels import _launch
from triton_kernels._blocks import block_scales, largest_bits
from triton_kernels._constants import Constants, constants, view_shapes
from triton_kernels._write import at, encode, put, put_scales
from triton_kernels.machines import Machine
from triton_kernels.settle import guess, settle

TILE = 64
GROUP = 16
WARPS = 4
STAGES = 3
PROGRAMS_PER_PROCESSOR = 5
ENDS = -60, 60
"""Exponents of scales between which the tensor cores' sums are trusted."""


def takes(x: jax.Array, spec: OperandSpec, machine: Machine) -> bool:
    """Whether the kernel serves a tensor: 16 bits a value, whole words a row, sums that are exact.

    Args:
      x: (rows, columns).
      spec: how it would be quantized.
      machine: that would run it.
    """
    return (
        machine.rotates
        and 0 < spec.hadamard <= BLOCK
        and spec.rounding == "nearest"
        and x.dtype.itemsize == 2
        and x.shape[1] % 8 == 0  # descriptors want rows of a multiple of 16 bytes
        and 2.0**-14 <= spec.pre_scale <= 2.0**15  # all of them float16's, too
        and float(np.asarray(spec.pre_scale, x.dtype)) == spec.pre_scale
    )


@triton.jit
def _tile_rows():
    """Rows of a tile in the order in which threads own them, so that none has to change hands."""
    n = tl.arange(0, 64)
    return 16 * (n // 8 % 4) + 8 * (n // 32) + n % 8


@triton.jit
def _matrix(signs_ptr, dtype: tl.constexpr, Q: tl.constexpr):
    """H along a diagonal, with signs and pre-scale; columns as `_view` wants sums in registers."""
    i, j = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    column = 16 * (j // 2 % 4) + 2 * (j // 8) + j % 2
    odd = i & column & (Q.hadamard - 1)
    odd ^= odd >> 4
    odd ^= odd >> 2
    odd ^= odd >> 1
    ones = tl.where(i // Q.hadamard == column // Q.hadamard, 1 - 2 * (odd & 1), 0)
    matrix = ones.to(tl.float32) * Q.pre_scale
    if Q.signs:
        matrix *= tl.load(signs_ptr + i)
    return matrix.to(dtype)


@triton.jit
def _view(
    sums,
    row,
    step,
    ref_ptr,
    data_ptr,
    scale_ptr,
    norm_ptr,
    flag_ptr,
    ROWS: tl.constexpr,
    LENGTH: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    Q: tl.constexpr,
):
    """Writes a tile's part of a view from `sums` [64, 64], two rotated blocks a row.

    The tile's first row is `row`; the contracted axis is at `step` there.
    """
    BLOCKS: tl.constexpr = (LENGTH + 31) // 32
    N: tl.constexpr = 128
    own = _tile_rows()
    # A thread has 16 sums of each of two rows, which the matrix's order has made neighbours.
    y = sums.reshape(4, 2, 8, 8, 4, 2).permute(1, 0, 2, 4, 3, 5).reshape(N, 32)
    largest = largest_bits(y)
    scale, _ = block_scales(largest, Q)

    # Blocks are counted from the tile's first one, which saves arithmetic on 64 bits.
    nth = tl.arange(0, 2)
    origin = row.to(tl.int64) * BLOCKS + step // 32
    index = (own[:, None] * BLOCKS + nth[None, :]).reshape(N)
    if ROWS % 64 == 0 and LENGTH % 64 == 0:
        inside = tl.full((N,), True, tl.int1)
    else:
        inside = (row + own < ROWS)[:, None] & (step // 32 + nth < BLOCKS)[None, :]
        inside = inside.reshape(N)

    if Q.kind == "folded":
        ref = tl.load(ref_ptr + row + own, mask=row + own < ROWS, other=127).to(tl.int32) - 127
        ref = tl.broadcast_to(ref[:, None], (64, 2)).reshape(N)
        low, high = ref + Q.low, ref + Q.top
    else:
        ref = tl.zeros((N,), tl.int32)
        low, high = ref + LEAST, ref + MOST
    # A block of zeros fits everywhere. One with a fault has the largest scale.
    odd = ((scale < low) | (scale > high)) & (largest > 0) & inside
    # Two threads own a block: a second dim for them, of which the first one stores.
    both = tl.zeros((N, 2), tl.int32)
    first = (nth == 0)[None, :]
    tl.store(flag_ptr + row // 64 + both, 1, mask=odd[:, None] & first)

    near = tl.minimum(tl.maximum(scale, low), high)
    sound = tl.zeros((N,), tl.int1)
    data = encode(y, 0.0, near, sound, ref, N, Q)
    put(at(data_ptr, origin, Q), data, index, inside, Q, 2)
    if Q.kind != "folded":
        put_scales(
            scale_ptr + origin,
            scale[:, None] + both,
            both != 0,
            index[:, None] + both,
            inside[:, None] & first,
        )
    if Q.norms:
        # Before it is squared, which float32 may not hold.
        own_y = y.reshape(64, 64) * Q.shrink
        norm = tl.sum(own_y * own_y, 1)
        four = tl.zeros((64, 4), tl.int32)
        mask = (row + own < ROWS)[:, None] & (tl.arange(0, 4) == 0)[None, :]
        ptr = norm_ptr + (step // 64).to(tl.int64) * ROWS + row
        tl.store(ptr + own[:, None] + four, norm[:, None] + four, mask=mask)


@triton.jit
def _kernel(
    x,
    row_signs_ptr,
    column_signs_ptr,
    row_ref_ptr,
    column_ref_ptr,
    flag_ptr,
    row_data_ptr,
    row_scale_ptr,
    row_norm_ptr,
    column_data_ptr,
    column_scale_ptr,
    column_norm_ptr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    ROW_Q: tl.constexpr,
    COLUMN_Q: tl.constexpr,
):
    """A program: every PROGRAMS-th tile, GROUP tiles of rows walked before the next of columns.

    ROW_Q is None if no view along the rows is wanted, COLUMN_Q likewise.
    """
    DOWN: tl.constexpr = (ROWS + 63) // 64
    ACROSS: tl.constexpr = (COLUMNS + 63) // 64
    if ROW_Q is not None:
        row_matrix = _matrix(row_signs_ptr, x.dtype, ROW_Q)
    if COLUMN_Q is not None:
        column_matrix = _matrix(column_signs_ptr, x.dtype, COLUMN_Q)
    for t in tl.range(tl.program_id(0), DOWN * ACROSS, PROGRAMS, num_stages=STAGES):
        group = t // (GROUP * ACROSS)
        # A constant where it can be one: the processor has no division.
        height = GROUP if DOWN % GROUP == 0 else min(DOWN - group * GROUP, GROUP)
        row = (group * GROUP + t % (GROUP * ACROSS) % height) * 64
        column = t % (GROUP * ACROSS) // height * 64
        # Beyond x's edges, the descriptor loads zeros.
        tile = x.load([row, column])
        if ROW_Q is not None:
            _view(
                tl.dot(tile, row_matrix),
                row,
                column,
                row_ref_ptr,
                row_data_ptr,
                row_scale_ptr,
                row_norm_ptr,
                flag_ptr,
                ROWS,
                COLUMNS,
                LEAST,
                MOST,
                ROW_Q,
            )
        if COLUMN_Q is not None:
            _view(
                tl.dot(tile.T, column_matrix),
                column,
                row,
                column_ref_ptr,
                column_data_ptr,
                column_scale_ptr,
                column_norm_ptr,
                flag_ptr + DOWN,
                COLUMNS,
                ROWS,
                LEAST,
                MOST,
                COLUMN_Q,
            )


def quantize_tiles(
    x: jax.Array,
    along_rows: Request | None,
    along_columns: Request | None,
    *,
    machine: Machine,
    processors: int,
) -> tuple[View | None, View | None]:
    """Rotates and quantizes along either axis, or both, in one pass over memory.

    Reads 2 bytes an element; writes for every view 1 as FP8, or 1/2 as packed MXFP4 and 1/32 of
    scales. Rows of a view that are flagged are settled.

    Args:
      x: (rows, columns) that `takes` says yes to.
      along_rows: a view whose blocks run along the last axis, or None.
      along_columns: a view whose blocks run along the first axis, which comes last in it, or None.
      machine: that runs it.
      processors: of the GPU.

    Returns:
      The views, None where none is requested.
    """
    rows, columns = _side(x, 1, along_rows, machine), _side(x, 0, along_columns, machine)
    down, across = (triton.cdiv(size, TILE) for size in x.shape)
    row_refs, column_refs, flags = guess(
        x, rows.folded, columns.folded, flags=down + across, within=ENDS
    )
    programs = min(down * across, PROGRAMS_PER_PROCESSOR * processors)
    *views, flags = _launch.launch(
        _kernel,
        x,
        rows.signs,
        columns.signs,
        row_refs,
        column_refs,
        flags,
        out=(*rows.shapes, *columns.shapes, jax.ShapeDtypeStruct(flags.shape, flags.dtype)),
        aliases={5: 6},
        grid=programs,
        num_warps=WARPS,
        tiles={0: (TILE, TILE)},
        ROWS=x.shape[0],
        COLUMNS=x.shape[1],
        PROGRAMS=programs,
        GROUP=GROUP,
        STAGES=STAGES,
        LEAST=ENDS[0],
        MOST=ENDS[1],
        ROW_Q=rows.facts,
        COLUMN_Q=columns.facts,
    )
    return (
        _settled(x, 1, along_rows, rows, row_refs, flags, 0, *views[:3]),
        _settled(x, 0, along_columns, columns, column_refs, flags, down, *views[3:]),
    )


class _Side(NamedTuple):
    """What the kernel takes for one view.

    Attributes:
      facts: of the view; None if it is not wanted.
      signs: a tile's random signs; anything if there are none.
      shapes: of what is written.
    """

    facts: Constants | None
    signs: jax.Array
    shapes: tuple[jax.ShapeDtypeStruct, ...]

    @property
    def folded(self) -> Constants | None:
        """The facts, if reference exponents are needed."""
        return self.facts if self.facts is not None and self.facts.kind == "folded" else None


def _side(x: jax.Array, axis: int, request: Request | None, machine: Machine) -> _Side:
    if request is None:
        nothing = jax.ShapeDtypeStruct((1,), jnp.uint8)
        return _Side(None, x, (nothing, nothing, nothing))
    spec = request.spec
    data, scales, _, norms = view_shapes(
        x.shape[1 - axis],
        spec.padded_length(x.shape[axis]),
        fmt=spec.mx,
        kind=request.kind,
        norms=triton.cdiv(x.shape[axis], TILE) if request.norms else 1,
    )
    facts = constants(spec, kind=request.kind, machine=machine, norms=request.norms)
    signs = block_signs(spec, request.sign_seed, count=TILE) if spec.signs == "random" else x
    return _Side(dataclasses.replace(facts, ends=False), signs, (data, scales, norms))


def _settled(
    x: jax.Array,
    axis: int,
    request: Request | None,
    side: _Side,
    refs: jax.Array,
    flags: jax.Array,
    first_flag: int,
    data: jax.Array,
    scales: jax.Array,
    squares: jax.Array,
) -> View | None:
    """The view, flagged rows written again."""
    if request is None or side.facts is None:
        return None
    signs = x
    if request.spec.signs == "random":
        signs = block_signs(request.spec, request.sign_seed, count=BLOCK)
    folded = request.kind == "folded"
    data, scales, norms = settle(
        (x, signs, x),
        flags,
        data,
        refs if folded else scales,
        jnp.sum(squares, axis=0) if request.norms else squares,
        axis=axis,
        facts=side.facts,
        flagged=TILE,
        first_flag=first_flag,
    )
    return View(
        data,
        None if folded else scales,
        scales if folded else None,
        norms if request.norms else None,
    )
