"""Arrays of which each thread of a warpgroup has a row, and tiles in shared memory.

Mosaic's name for such an array's layout is that of Blackwell's tensor memory, which lies so; on
Hopper it serves as well. How many values of a row a thread holds in one register's vector is free
to choose: single ones to compute with, as many as fill 16 bytes to load and to store.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from adahop_jax.reference.hadamard import pad

THREADS = 128
VECTOR_BYTES = 16
ROWS = plgpu.Layout.TCGEN05_TMEM_NATIVE(1)
"""Of (THREADS, n) arrays: a thread has a row, in single values."""
PER_ROW = ROWS.reduce(1)
"""Of (THREADS,) arrays: a thread has a value."""
ALL = ROWS.reduce(0)
"""Of (n,) arrays: every thread has all of it."""


def load_rows(ref: Any) -> jax.Array:
    """A (THREADS, n) tile; its rows are loaded by vectors where they lie in memory as such."""
    itemsize = jnp.dtype(ref.dtype).itemsize
    vectors = plgpu.Layout.TCGEN05_TMEM_NATIVE(vector_of(ref.shape[1] * itemsize) // itemsize)
    return plgpu.layout_cast(plgpu.load(ref, layout=vectors, optimized=False), ROWS)


def load_columns(ref: Any) -> jax.Array:
    """A (n, THREADS) tile, transposed."""
    return plgpu.load(ref.T, layout=ROWS, optimized=False)


def load_each(ref: Any) -> jax.Array:
    """A (THREADS,) vector, a value for each thread."""
    return plgpu.load(ref, layout=PER_ROW, optimized=False)


def load_all(ref: Any) -> jax.Array:
    """A (n,) vector, all of it for each thread."""
    return plgpu.load(ref, layout=ALL, optimized=False)


def in_vectors(rows: jax.Array) -> jax.Array:
    """(THREADS, n) in vectors that fill 16 bytes once they are bytes."""
    return plgpu.layout_cast(rows, plgpu.Layout.TCGEN05_TMEM_NATIVE(vector_of(rows.shape[1])))


def vector_of(width: int) -> int:
    """The longest vector of bytes in a row of `width`."""
    return min(VECTOR_BYTES, width & -width)


def across(per_row: jax.Array, width: int) -> jax.Array:
    """(THREADS,) -> (THREADS, width), each thread's value again and again."""
    return jax.lax.broadcast_in_dim(per_row, (THREADS, width), [0])


def columns_of(rows: jax.Array) -> list[jax.Array]:
    """(THREADS, n) -> n of (THREADS, 1)."""
    return [rows[:, i : i + 1] for i in range(rows.shape[1])]


def beside(columns: list[jax.Array]) -> jax.Array:
    """The inverse of `columns_of`."""
    return jnp.concatenate(columns, axis=1)


def shared(shape: tuple[int, ...], dtype: Any) -> Any:
    """Tiles in shared memory, swizzled so that neighbouring rows lie in different banks."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(shape[-1] * itemsize * 8)
    if swizzle == VECTOR_BYTES:
        return plgpu.SMEM(shape, dtype)
    transforms = plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle)
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def interleaved(parts: tuple[jax.Array, ...]) -> jax.Array:
    """Several (THREADS, n) -> (THREADS, several * n): the first columns of all, then the next."""
    if len(parts) == 1:
        return parts[0]
    columns = [columns_of(part) for part in parts]
    return beside([part[i] for i in range(len(columns[0])) for part in columns])


def swapped(rows: jax.Array, stride: int) -> jax.Array:
    """(THREADS, n), every `stride` columns in place of the next as many, and these of those."""
    parts = [rows[:, i : i + stride] for i in range(0, rows.shape[1], stride)]
    return beside([parts[i ^ 1] for i in range(len(parts))])


def each(value: float) -> jax.Array:
    """A value for each thread: (THREADS,)."""
    return plgpu.layout_cast(jnp.full((THREADS,), value), PER_ROW)


def iota(width: int, dimension: int) -> jax.Array:
    """int32 (THREADS, width), numbered along a dimension."""
    return plgpu.broadcasted_iota(jnp.int32, (THREADS, width), dimension, layout=ROWS)


def whole(x: jax.Array) -> jax.Array:
    """Zeros after the ends of a 2-D array, up to whole tiles: TMA's tiles have to be whole."""
    return pad(pad(x, axis=0, multiple=THREADS), axis=1, multiple=THREADS)


def whole_vector(x: jax.Array) -> jax.Array:
    """Zeros after the end of a 1-D array, likewise."""
    return pad(x[None, :], axis=1, multiple=THREADS)[0]
