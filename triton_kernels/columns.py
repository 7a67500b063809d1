"""A few columns of a tensor: taken out of one, or overwritten in another, in place."""

import jax
import triton
import triton.language as tl

from triton_kernels import _launch

ROWS_PER_PROGRAM = 64


@triton.jit
def _kernel(
    index_ptr,
    x_ptr,
    y_ptr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TAKE: tl.constexpr,
):
    """A program: BLOCK_R rows. From x's columns to y [ROWS, COUNT] if TAKE, else from x to y's."""
    row = (tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    column = tl.load(index_ptr + k, mask=k < COUNT, other=0)
    mask = (row < ROWS)[:, None] & (k < COUNT)[None, :]
    few = row[:, None] * COUNT + k[None, :]
    many = row[:, None] * COLUMNS + column[None, :]
    value = tl.load(x_ptr + (many if TAKE else few), mask=mask)
    to = y_ptr + (few if TAKE else many)
    tl.store(to, value.to(y_ptr.dtype.element_ty), mask=mask)


def take_columns(x: jax.Array, index: jax.Array) -> jax.Array:
    """Columns of x.

    Args:
      x: (rows, columns).
      index: int32 (k,), which columns.

    Returns:
      (rows, k) of x's dtype.
    """
    rows, columns = x.shape
    out = jax.ShapeDtypeStruct((rows, index.shape[0]), x.dtype)
    (taken,) = _launch.launch(
        _kernel, index, x, out=(out,), **_sizes(rows, columns, index.shape[0]), TAKE=True
    )
    return taken


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
        **_sizes(rows, columns, index.shape[0]),
        TAKE=False,
    )
    return y


def _sizes(rows: int, columns: int, count: int) -> dict[str, int]:
    return {
        "grid": triton.cdiv(rows, ROWS_PER_PROGRAM),
        "num_warps": 4,
        "ROWS": rows,
        "COLUMNS": columns,
        "COUNT": count,
        "BLOCK_R": ROWS_PER_PROGRAM,
        "BLOCK_K": triton.next_power_of_2(count),
    }
