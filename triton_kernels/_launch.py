"""The one place that calls jax-triton."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax_triton
from jax_triton import triton_lib

# jax-triton 0.4.1 insists that Triton say whether a descriptor is of the im2col kind, and Triton
# 3.7, which has no other kind than tiled ones, does not say it. Where it matters, it has a default.
triton_lib.TensorDescMeta.__required_keys__ = triton_lib.TensorDescMeta.__required_keys__ - {
    "is_im2col"
}


def launch(
    kernel: Any,
    *arrays: jax.Array,
    out: Sequence[jax.ShapeDtypeStruct],
    grid: int,
    num_warps: int,
    num_stages: int = 1,
    aliases: Mapping[int, int] | None = None,
    tiles: Mapping[int, tuple[int, int]] | None = None,
    written: Mapping[int, tuple[int, int]] | None = None,
    zeroed: Sequence[int] = (),
    scalars: Sequence[int] = (),
    **constants: Any,
) -> tuple[jax.Array, ...]:
    """Runs a kernel on a one-dimensional grid; its arguments: arrays, scalars, then the results.

    jax-triton has no batching rule: `vmap` runs the kernel once for each element.

    Args:
      kernel: a `triton.jit` function.
      arrays: inputs.
      out: shapes and dtypes of the results, whose memory is not initialized.
      grid: number of programs.
      num_warps, num_stages: as Triton has them.
      aliases: number of an input -> number of the result that takes over its memory, and that the
        kernel gets no pointer of. Such results come last: jax-triton counts pointers that way.
      tiles: number of an input -> the block that the kernel loads at a time, by a descriptor made
        on the host: those made on the device need scratch memory, which CUDA graphs refuse.
      written: number of a result -> the block that the kernel stores at a time, by a descriptor
        that follows the inputs in the kernel's arguments.
      zeroed: numbers of results whose memory starts as zeros.
      scalars: integers of 32 bits of which only a 1 is known to the compiler.
      constants: the kernel's constexpr arguments.

    Returns:
      The results.
    """

    @jax.custom_batching.sequential_vmap
    def call(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        shared = dict(aliases or {})
        if shared or written:
            arrays = tuple(map(_apart, arrays))
        operands: list[Any] = list(arrays)
        for i, tile in (tiles or {}).items():
            operands[i] = jax_triton.TensorDescriptor.from_array(arrays[i], tile)
        for i, tile in (written or {}).items():
            shared[len(operands)] = i
            memory = jax.lax.empty(out[i].shape, out[i].dtype)
            operands.append(jax_triton.TensorDescriptor.from_array(memory, tile))
        with warnings.catch_warnings():
            # jax-triton would rather have both as mutable references, which do not pass `vmap`.
            for name in ("input_output_aliases", "zeroed_outputs"):
                warnings.filterwarnings("ignore", f"{name} is deprecated", DeprecationWarning)
            results = jax_triton.triton_call(
                *operands,
                *scalars,
                kernel=kernel,
                out_type=tuple(out),
                grid=(grid,),
                num_warps=num_warps,
                num_stages=num_stages,
                input_output_aliases=shared,
                zeroed_outputs=tuple(zeroed),
                **constants,
            )
        return tuple(map(_apart, results)) if shared else results

    return call(*arrays)


def _apart(array: jax.Array) -> jax.Array:
    """Keeps a call apart from slices that it reads or only updates, as in `scan`.

    XLA makes one of both, and then forgets which results take over an input's memory: what the
    call writes is lost.
    """
    return jax.lax.optimization_barrier(array)
