"""Unpack and fold: stored codes and scales into the FP8 operand that a product reads.

A row's reference exponent follows from its scales alone, a 32nd of what is read: XLA finds it. The
kernel reads codes and scales by tiles and writes FP8 by tiles, a thread a row at a time.

Lowered by Mosaic GPU, as `quantize` is: codes are tiles that TMA loads, FP8 those that it stores.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from adahop_jax._formats import SCALE_NAN, MXFormat
from adahop_jax._view import BLOCK, FOLDS, View
from adahop_jax.reference.hadamard import pad
from pallas_kernels import _warpgroup as wg
from pallas_kernels._blocks import power_of_two, unpacked
from pallas_kernels._launch import launch

CHUNK = 128
"""Of a row, loaded and stored at a time."""
CHUNKS = 4
"""That a program works on."""
BLOCKS = CHUNK // BLOCK


class Inputs(NamedTuple):
    """What is read.

    Attributes:
      codes: uint8 (rows, bytes).
      scales: uint8 (blocks, rows).
      refs: int32 (rows,), reference exponents + 127.
    """

    codes: Any
    scales: Any
    refs: Any


def _kernel(inputs: Inputs, folded: Any, scratch: tuple[Any, ...], *, fmt: MXFormat) -> None:
    """A block: CHUNKS tiles of THREADS rows."""
    codes, data, arrived = scratch
    rows = pl.ds(lax.axis_index("down") * wg.THREADS, wg.THREADS)
    first = lax.axis_index("across") * CHUNKS
    width = fmt.packed_length(CHUNK)
    for i in range(CHUNKS):
        place = pl.ds((first + i) * width, width)
        plgpu.copy_gmem_to_smem(inputs.codes.at[rows, place], codes.at[i], arrived.at[i])
    ref = wg.load_each(inputs.refs.at[rows])

    def chunk(i: Any, _: None) -> None:
        plgpu.barrier_wait(arrived.at[i])
        octets = wg.load_rows(codes.at[i])
        each = width // BLOCKS
        parts = []
        for j in range(BLOCKS):
            byte = wg.load_each(inputs.scales.at[(first + i) * BLOCKS + j, rows]).astype(jnp.int32)
            factor = jnp.where(byte == SCALE_NAN, jnp.nan, power_of_two(byte - ref))
            value = unpacked(octets[:, j * each : (j + 1) * each], fmt)
            value = value * wg.across(factor, BLOCK)
            parts.append(wg.in_vectors(value).astype(FOLDS[fmt.name].dtype))
        data.at[i][...] = wg.beside(parts)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(data.at[i], folded.at[rows, pl.ds((first + i) * CHUNK, CHUNK)])

    lax.fori_loop(0, CHUNKS, chunk, None)
    plgpu.wait_smem_to_gmem(0)


def fold(codes: jax.Array, scales: jax.Array, *, fmt: MXFormat) -> View:
    """Stored codes and scales as a folded operand.

    Reads 1/2 byte an element of MXFP4 and 1/32 of scales; writes 1.

    Args:
      codes: uint8 (rows, bytes), packed along the contracted axis, not empty.
      scales: uint8 (rows, blocks).
      fmt: their format.

    Returns:
      A folded `View`, of whole blocks.
    """
    (rows, blocks), to = scales.shape, FOLDS[fmt.name]
    top = jnp.max(jnp.where(scales == SCALE_NAN, 0, scales), axis=1).astype(jnp.int32)
    refs = jnp.maximum(top - to.top, 0)
    # Whole programs of whole tiles; of zeros, whatever their scales.
    scales = pad(pad(scales, axis=0, multiple=wg.THREADS), axis=1, multiple=CHUNKS * BLOCKS)
    all_rows, all_blocks = scales.shape
    missing = (all_rows - rows, fmt.packed_length(all_blocks * BLOCK) - codes.shape[1])
    data = launch(
        functools.partial(_kernel, fmt=fmt),
        Inputs(jnp.pad(codes, [(0, size) for size in missing]), scales.T, wg.whole_vector(refs)),
        jax.ShapeDtypeStruct((all_rows, all_blocks * BLOCK), to.dtype),
        grid=(all_rows // wg.THREADS, all_blocks // (CHUNKS * BLOCKS)),
        grid_names=("down", "across"),
        scratch=(
            wg.shared((CHUNKS, wg.THREADS, fmt.packed_length(CHUNK)), jnp.uint8),
            wg.shared((CHUNKS, wg.THREADS, CHUNK), to.dtype),
            plgpu.Barrier(num_barriers=CHUNKS),
        ),
    )
    return View(data[:rows, : blocks * BLOCK], None, refs.astype(jnp.uint8), None)
