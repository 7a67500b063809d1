"""The product on matrix units that know MX blocks: codes and scales as they are stored.

NVIDIA Blackwell (`tcgen05.mma ... kind::mxf4.block_scale`) and AMD CDNA4 (`v_mfma_scale_f32`).
MXFP6 has no element type in Triton; it goes in as MXFP8, whose E4M3 holds every E2M3.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from adahop_jax._view import View
from triton_kernels import _launch
from triton_kernels.machines import Machine


@triton.jit
def _kernel(
    a_ptr,
    b_ptr,
    a_scale_ptr,
    b_scale_ptr,
    y_ptr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    SCALE: tl.constexpr,
    FORMAT: tl.constexpr,
    PACKED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """A program: one tile. PACKED elements share a byte."""
    DOWN: tl.constexpr = (M + BM - 1) // BM
    ACROSS: tl.constexpr = (N + BN - 1) // BN
    tile = tl.program_id(0)
    group = tile // (GROUP * ACROSS)
    height = min(DOWN - group * GROUP, GROUP)
    rows = (group * GROUP + tile % (GROUP * ACROSS) % height) * BM + tl.arange(0, BM)
    columns = (tile % (GROUP * ACROSS) // height) * BN + tl.arange(0, BN)
    a_row = rows.to(tl.int64)[:, None]
    b_row = columns.to(tl.int64)
    BYTES: tl.constexpr = K // PACKED
    BLOCKS: tl.constexpr = K // 32
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        byte = k // PACKED + tl.arange(0, BK // PACKED)
        block = k // 32 + tl.arange(0, BK // 32)
        a_in = (rows < M)[:, None]
        b_in = columns < N
        a = tl.load(
            a_ptr + a_row * BYTES + byte[None, :], mask=a_in & (byte < BYTES)[None, :], other=0.0
        )
        b = tl.load(
            b_ptr + b_row[None, :] * BYTES + byte[:, None],
            mask=b_in[None, :] & (byte < BYTES)[:, None],
            other=0.0,
        )
        # A scale of 1 beyond the edge: 255 would be NaN, and the elements there are zeros.
        a_scale = tl.load(
            a_scale_ptr + a_row * BLOCKS + block[None, :],
            mask=a_in & (block < BLOCKS)[None, :],
            other=127,
        )
        b_scale = tl.load(
            b_scale_ptr + b_row[:, None] * BLOCKS + block[None, :],
            mask=b_in[:, None] & (block < BLOCKS)[None, :],
            other=127,
        )
        acc = tl.dot_scaled(a, a_scale, FORMAT, b, b_scale, FORMAT, acc)
    y = (acc * SCALE).to(y_ptr.dtype.element_ty)
    tl.store(
        y_ptr + a_row * N + columns[None, :], y, mask=(rows < M)[:, None] & (columns < N)[None]
    )


def native_matmul(
    a: View, b: View, *, scale: float, dtype: jnp.dtype, machine: Machine
) -> jax.Array:
    """a @ b^T, `scale` times, from operands as they are stored.

    Args:
      a: codes or elements, (rows, length).
      b: likewise, (columns, length), of a's kind.
      scale: a factor that undoes transform and pre-scales.
      dtype: of the result, bfloat16, float16 or float32.
      machine: that runs it.

    Returns:
      (rows, columns) of `dtype`, accumulated in float32.
    """
    packed = 2 if a.data.dtype == jnp.uint8 else 1
    m, n, k = a.data.shape[0], b.data.shape[0], a.data.shape[1] * packed
    tile = machine.large
    (y,) = _launch.launch(
        _kernel,
        a.data,
        b.data,
        a.scales,
        b.scales,
        out=(jax.ShapeDtypeStruct((m, n), dtype),),
        grid=triton.cdiv(m, tile.m) * triton.cdiv(n, tile.n),
        num_warps=tile.warps,
        num_stages=tile.stages,
        M=m,
        N=n,
        K=k,
        SCALE=float(scale),
        FORMAT="e2m1" if packed == 2 else "e4m3",
        PACKED=packed,
        BM=tile.m,
        BN=tile.n,
        BK=tile.k,
        GROUP=tile.group,
    )
    return y
