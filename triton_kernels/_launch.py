"""The one place that calls jax-triton."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax_triton


def launch(
    kernel: Any,
    *arrays: jax.Array,
    out: Sequence[jax.ShapeDtypeStruct],
    grid: int,
    num_warps: int,
    num_stages: int = 1,
    aliases: Mapping[int, int] | None = None,
    **constants: Any,
) -> tuple[jax.Array, ...]:
    """Runs a kernel on a one-dimensional grid; its pointers are the arrays, then the results.

    jax-triton has no batching rule: `vmap` runs the kernel once for each element.

    Args:
      kernel: a `triton.jit` function.
      arrays: inputs.
      out: shapes and dtypes of the results, whose memory is not initialized.
      grid: number of programs.
      num_warps, num_stages: as Triton has them.
      aliases: number of an input -> number of the result that takes over its memory.
      constants: the kernel's constexpr arguments.

    Returns:
      The results.
    """

    @jax.custom_batching.sequential_vmap
    def call(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return jax_triton.triton_call(
            *arrays,
            kernel=kernel,
            out_type=tuple(out),
            grid=(grid,),
            num_warps=num_warps,
            num_stages=num_stages,
            input_output_aliases=dict(aliases or {}),
            **constants,
        )

    return call(*arrays)
