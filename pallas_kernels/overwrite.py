"""Overwriting: the extracted columns of a product replaced by their side product, in place.

Lowered by Mosaic GPU: a thread has a row of the values, and stores each where its column is. TMA
cannot store a single column, and nothing else stops at the last row: a tile that is not whole is
left to XLA.
"""

from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl

from adahop_jax.reference.bits import rounded
from pallas_kernels import _warpgroup as wg
from pallas_kernels._launch import launch


class Inputs(NamedTuple):
    """What is read.

    Attributes:
      index: int32 (k,), which columns.
      values: (rows, k).
    """

    index: Any
    values: Any


def _kernel(inputs: Inputs, y: Any, scratch: tuple[()]) -> None:
    """A block: THREADS rows."""
    rows = pl.ds(lax.axis_index("down") * wg.THREADS, wg.THREADS)
    values = wg.load_rows(inputs.values.at[rows, :]).astype(y.dtype)
    for i, value in enumerate(wg.columns_of(values)):
        y.at[rows, pl.ds(inputs.index[i], 1)][...] = value


def overwrite_columns(y: jax.Array, index: jax.Array, values: jax.Array) -> jax.Array:
    """y with columns replaced; touches nothing else of it.

    Args:
      y: (rows, columns).
      index: int32 (k,), which columns, all different.
      values: float32 (rows, k), rounded to y's dtype.

    Returns:
      y, in the same memory if nothing else reads it.
    """
    whole = y.shape[0] // wg.THREADS
    if whole:
        y = launch(
            _kernel,
            Inputs(index, values),
            y,
            grid=(whole,),
            grid_names=("down",),
            scratch=(),
        )
    rest = whole * wg.THREADS
    if rest < y.shape[0]:
        where: Any = {"unique_indices": True, "mode": "promise_in_bounds"}
        y = y.at[rest:, index].set(rounded(values[rest:], y.dtype), **where)
    return y
