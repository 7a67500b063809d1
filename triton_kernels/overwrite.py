"""Overwriting: the extracted columns of a product replaced by their side product, in place."""

import jax
import triton
import triton.language as tl

from triton_kernels import _launch

ROWS_PER_PROGRAM = 64


@triton.jit
def _kernel(
    index_ptr,
    value_ptr,
    y_ptr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A program: BLOCK_R rows. `y_ptr` is written only."""
    row = (tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    column = tl.load(index_ptr + k, mask=k < COUNT, other=0)
    mask = (row < ROWS)[:, None] & (k < COUNT)[None, :]
    value = tl.load(value_ptr + row[:, None] * COUNT + k[None, :], mask=mask)
    to = y_ptr + row[:, None] * COLUMNS + column[None, :]
    tl.store(to, value.to(y_ptr.dtype.element_ty), mask=mask)


def overwrite_columns(y: jax.Array, index: jax.Array, values: jax.Array) -> jax.Array:
    """y with columns replaced; touches nothing else of it.

    Args:
      y: (rows, columns).
      index: int32 (k,), which columns, all different.
      values: (rows, k), rounded to y's dtype.

    Returns:
      y, in the same memory if nothing else reads it.
    """
    rows, columns = y.shape
    (y,) = _launch.launch(
        _kernel,
        index,
        values,
        y,
        out=(jax.ShapeDtypeStruct(y.shape, y.dtype),),
        aliases={2: 0},
        grid=triton.cdiv(rows, ROWS_PER_PROGRAM),
        num_warps=4,
        ROWS=rows,
        COLUMNS=columns,
        COUNT=index.shape[0],
        BLOCK_R=ROWS_PER_PROGRAM,
        BLOCK_K=triton.next_power_of_2(index.shape[0]),
    )
    return y
