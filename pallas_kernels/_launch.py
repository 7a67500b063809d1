"""The one place that calls Pallas' Mosaic GPU kernels."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu


def launch(
    kernel: Callable[..., None],
    inputs: Any,
    results: Any,
    *,
    grid: tuple[int, ...],
    grid_names: tuple[str, ...],
    scratch: Any,
    warpgroups: int = 1,
) -> Any:
    """Runs a kernel: kernel(inputs, results, scratch), all of them references.

    `vmap` runs it once for each element.

    Args:
      kernel: the body, run by every warpgroup of every block.
      inputs: a pytree of arrays.
      results: a pytree of what is written: arrays, whose memory is taken over, or shapes and dtypes
        of memory that is not initialized.
      grid: number of blocks along each axis.
      grid_names: of the axes, for `lax.axis_index`.
      scratch: a pytree of what a block has to itself: shared memory and barriers.
      warpgroups: of a block; their axis is "warpgroup".

    Returns:
      The results, arrays.
    """

    @jax.custom_batching.sequential_vmap
    def call(inputs: Any, results: Any) -> Any:
        # XLA merges a call with slices that it reads or only updates, and then forgets whose memory
        # its results take over: what it writes is lost.
        inputs, results = lax.optimization_barrier((inputs, results))
        memory = jax.tree.map(jax.new_ref, results)
        plgpu.kernel(
            kernel,
            scratch_types=(scratch,),
            grid=grid,
            grid_names=grid_names,
            num_threads=warpgroups,
            thread_name="warpgroup",
        )(inputs, memory)
        return lax.optimization_barrier(jax.tree.map(lambda ref: ref[...], memory))

    return call(inputs, jax.tree.map(_memory, results))


def _memory(result: Any) -> jax.Array:
    """Memory for a result: its own, or such as nothing was written to."""
    return result if isinstance(result, jax.Array) else lax.empty(result.shape, result.dtype)
