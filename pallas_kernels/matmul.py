"""The product of two folded FP8 operands: two warpgroups multiply in turns, a third loads.

Products keep the matrix units busy; what follows them, undoing the exponents and storing, does not.
So two warpgroups take tiles in turns, and while one stores, the other multiplies. The third loads
tiles of the operands into a ring of buffers, as far ahead as there are buffers.

Both operands have the contracted axis last, as Hopper's FP8 units want them. These add with some 14
bits, so a sum is broken off every `chunk` elements and continued in float32: `docs/numerics.md`.
Tiles are small, and operands read more often than `triton_kernels.matmul` reads them: what pays for
short sums, where storing weighs most, does not for long ones.

Lowered by Mosaic GPU, whose own terms these are: wgmma, TMA, barriers, a task for each warpgroup.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from adahop_jax._formats import SCALE_BIAS
from adahop_jax._view import View
from pallas_kernels import _warpgroup as wg
from pallas_kernels._blocks import power_of_two
from pallas_kernels._launch import launch

TILE = 128
"""Rows, columns and depth of what a warpgroup multiplies at a time."""
SLOTS = 6
"""Buffers in the ring, of a tile of each operand."""
STRIPE = 8
"""Tiles down the rows that are walked before the next columns, for the cache."""
STORED = 128
"""Bytes of a row stored at a time."""
WORKERS = 2
"""Warpgroups that multiply."""
EASY = 80
"""FP8 units' sums lie between 2^-32 and 2^45: times 2^EASY they stay in float32's range."""

REGISTERS = {"load": 40, "multiply": 232}
"""Of a thread: what loads needs few, and leaves its share to those that hold sums."""


class Inputs(NamedTuple):
    """What is read.

    Attributes:
      a, b: FP8 (rows, length) and (columns, length), of whole tiles.
      a_refs, b_refs: uint8, exponents that their rows were divided by, + 127.
    """

    a: Any
    b: Any
    a_refs: Any
    b_refs: Any


class Scratch(NamedTuple):
    """What a block has to itself.

    Attributes:
      a, b: rings of tiles.
      y: a part of a result's tile, for each worker.
      full, empty: barriers of the rings' slots. A barrier's phases count for one worker only, so
        each has a set of its own.
      turn: a barrier for each worker, who waits for it to multiply.
    """

    a: Any
    b: Any
    y: Any
    full: Any
    empty: Any
    turn: Any


@functools.partial(jax.jit, static_argnames=("scale", "chunk", "dtype", "processors"))
def matmul(
    a: View, b: View, *, scale: float, chunk: int, dtype: jnp.dtype, processors: int
) -> jax.Array:
    """a @ b^T, `scale` times, from folded operands; lowered once for all products of a shape.

    Reads every operand once for each of the other's tiles that a pass over the processors holds;
    writes the result once.

    Args:
      a: folded (rows, length); whole tiles are read as they are, others are padded first.
      b: folded (columns, length).
      scale: a factor that undoes transform and pre-scales.
      chunk: elements that the FP8 units may sum before float32 takes over.
      dtype: of the result, bfloat16, float16 or float32.
      processors: of the GPU.

    Returns:
      (rows, columns) of `dtype`.
    """
    m, n = a.data.shape[0], b.data.shape[0]
    itemsize = jnp.dtype(dtype).itemsize
    sides = wg.whole(a.data), wg.whole(b.data)
    refs = (wg.whole_vector(view.refs) for view in (a, b))
    y = launch(
        functools.partial(_kernel, scale=scale, at_once=chunk // TILE),
        Inputs(*sides, *refs),
        jax.ShapeDtypeStruct((sides[0].shape[0], sides[1].shape[0]), dtype),
        grid=(processors,),
        grid_names=("block",),
        scratch=Scratch(
            wg.shared((SLOTS, TILE, TILE), a.data.dtype),
            wg.shared((SLOTS, TILE, TILE), b.data.dtype),
            wg.shared((WORKERS, TILE, STORED // itemsize), dtype),
            plgpu.Barrier(num_arrivals=2, num_barriers=WORKERS * SLOTS),
            plgpu.Barrier(num_barriers=WORKERS * SLOTS),
            plgpu.Barrier(num_barriers=WORKERS),
        ),
        warpgroups=WORKERS + 1,
    )
    return y[:m, :n]


def _kernel(inputs: Inputs, y: Any, scratch: Scratch, *, scale: float, at_once: int) -> None:
    """A block: every `processors`-th tile. `step` counts what it loads, over all of its tiles."""
    a, b, a_refs, b_refs = inputs
    a_ring, b_ring, y_part, full, empty, turn = scratch
    (m, k), n = a.shape, b.shape[0]
    steps = k // TILE
    down, across = m // TILE, n // TILE
    block, blocks = lax.axis_index("block"), lax.axis_size("block")
    tiles = lax.div(down * across - block + blocks - 1, blocks)
    warpgroup = lax.axis_index("warpgroup")

    def corner(tile: jax.Array) -> tuple[jax.Array, jax.Array]:
        i, j = plgpu.planar_snake(tile * blocks + block, (down, across), 0, STRIPE)
        return i * TILE, j * TILE

    def slot(step: jax.Array) -> jax.Array:
        return lax.rem(step, SLOTS)

    def barrier(step: jax.Array) -> jax.Array:
        return lax.rem(lax.div(step, steps), WORKERS) * SLOTS + slot(step)

    @pl.when(warpgroup == WORKERS)
    def _load() -> None:
        plgpu.set_max_registers(REGISTERS["load"], action="decrease")

        def load_tile(tile: jax.Array, _: None) -> None:
            row, column = corner(tile)

            def load(i: jax.Array, _: None) -> None:
                step = tile * steps + i

                @pl.when(step >= SLOTS)
                def _wait() -> None:
                    plgpu.barrier_wait(empty.at[barrier(step - SLOTS)])

                for operand, ring, first in ((a, a_ring, row), (b, b_ring, column)):
                    plgpu.copy_gmem_to_smem(
                        operand.at[pl.ds(first, TILE), pl.ds(i * TILE, TILE)],
                        ring.at[slot(step)],
                        full.at[barrier(step)],
                    )

            lax.fori_loop(0, steps, load, None)

        lax.fori_loop(0, tiles, load_tile, None)

        def see_out(step: jax.Array, _: None) -> None:
            plgpu.barrier_wait(empty.at[barrier(step)])

        lax.fori_loop(jnp.maximum(tiles * steps - SLOTS, 0), tiles * steps, see_out, None)

    @pl.when(warpgroup < WORKERS)
    def _work() -> None:
        plgpu.set_max_registers(REGISTERS["multiply"], action="increase")

        def work(i: jax.Array, _: None) -> None:
            tile = WORKERS * i + warpgroup
            row, column = corner(tile)

            @pl.when(tile > 0)
            def _wait() -> None:
                plgpu.barrier_wait(turn.at[warpgroup])

            total = _sum(tile * steps, (tile + 1) * steps, pass_on=tile + 1 < tiles)
            y_tile = _unfold(
                total, _load_refs(a_refs, row, 1), _load_refs(b_refs, column, 0), scale
            ).astype(y.dtype)
            width = STORED // y.dtype.itemsize
            for at in range(0, TILE, width):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                y_part.at[warpgroup][...] = y_tile[:, at : at + width]
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(
                    y_part.at[warpgroup], y.at[pl.ds(row, TILE), pl.ds(column + at, width)]
                )

        def _load_refs(refs: Any, first: jax.Array, reduced: int) -> jax.Array:
            octets = plgpu.load(
                refs.at[pl.ds(first, TILE)],
                layout=plgpu.Layout.WGMMA.reduce(reduced),
                optimized=False,
            )
            return octets.astype(jnp.int32) - SCALE_BIAS

        def _sum(first: jax.Array, end: jax.Array, *, pass_on: jax.Array) -> jax.Array:
            """Of the products of steps [first, end); float32 takes over after `at_once` of them."""
            if steps <= at_once:
                return _share(first, end, pass_on=pass_on)
            zeros = jnp.zeros((TILE, TILE), jnp.float32)

            def add(i: jax.Array, total: jax.Array) -> jax.Array:
                start = first + i * at_once
                stop = jnp.minimum(start + at_once, end)
                return total + _share(start, stop, pass_on=pass_on & (stop == end))

            shares = -(-steps // at_once)
            return lax.fori_loop(0, shares, add, plgpu.layout_cast(zeros, plgpu.Layout.WGMMA))

        def _share(start: jax.Array, stop: jax.Array, *, pass_on: jax.Array) -> jax.Array:
            def multiply_all(total: Any) -> jax.Array:
                def multiply(step: jax.Array, _: None) -> None:
                    plgpu.barrier_wait(full.at[barrier(step)])
                    right = b_ring.at[slot(step)].transpose((1, 0))
                    plgpu.wgmma(total, a_ring.at[slot(step)], right)
                    plgpu.wgmma_wait(1)

                    @pl.when(step > start)
                    def _release() -> None:
                        plgpu.barrier_arrive(empty.at[barrier(step - 1)])

                lax.fori_loop(start, stop, multiply, None)

                @pl.when(pass_on)
                def _pass_on() -> None:
                    plgpu.barrier_arrive(turn.at[WORKERS - 1 - warpgroup])

                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(empty.at[barrier(stop - 1)])
                return total[...]

            return pl.run_scoped(multiply_all, plgpu.ACC((TILE, TILE), jnp.float32))

        lax.fori_loop(0, lax.div(tiles - warpgroup + WORKERS - 1, WORKERS), work, None)
        plgpu.wait_smem_to_gmem(0)


def _unfold(total: jax.Array, row: jax.Array, column: jax.Array, scale: float) -> jax.Array:
    """A tile's sums times scale 2^(row + column), from exponents of its rows and its columns.

    They are undone up to `EASY` first, and what is left of them, mostly nothing, after: so nothing
    on the way leaves float32's range that the result does not leave.
    """
    row_easy = jnp.minimum(jnp.maximum(row, -EASY), EASY)
    column_easy = jnp.minimum(jnp.maximum(column, -EASY), EASY)
    for factor, dim in (
        (power_of_two(row_easy) * scale, 0),
        (power_of_two(column_easy), 1),
        (power_of_two(row - row_easy), 0),
        (power_of_two(column - column_easy), 1),
    ):
        total = total * lax.broadcast_in_dim(factor, total.shape, [dim])
    return total
