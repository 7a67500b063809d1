"""The product of two folded FP8 operands: persistent, fed by TMA, exponents undone at the end.

Both operands have the contracted axis last, as Hopper's FP8 units want them, so that fwd, dgrad and
wgrad are the same product and nothing is transposed in memory.

Hopper's FP8 units add with some 14 bits: every 32 products, what lies 2^-13 below the largest of
the sum so far and the products is cut off. Values of one sign lose most, as the sum grows. A sum is
therefore broken off every `CHUNK` elements and continued in float32: see `docs/numerics.md` for the
errors measured, with and without.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from triton_kernels import _launch
from triton_kernels._blocks import power_of_two
from triton_kernels._view import View
from triton_kernels.machines import Machine, MatmulTile

CHUNK = {"plain": 2048, "rotated": 8192}
"""Elements summed by the FP8 units before the sum is continued in float32."""

# Up to this exponent on either side, results pass through no intermediate out of float32's range.
EASY = tl.constexpr(40)


@triton.jit
def _unfold(acc, row_exponent, column_exponent, easy, SCALE: tl.constexpr):
    """acc [BM, BN] * SCALE * 2^(row_exponent + column_exponent)."""
    if easy:
        acc = acc * (power_of_two(row_exponent) * SCALE)[:, None]
        acc = acc * power_of_two(column_exponent)[None, :]
    else:
        e = row_exponent[:, None] + column_exponent[None, :]
        acc = acc * SCALE * power_of_two(e >> 1) * power_of_two(e - (e >> 1))
    return acc


@triton.jit
def _store(
    acc,
    y_ptr,
    desc,
    ref_a,
    b_ref_ptr,
    r0,
    c0,
    M: tl.constexpr,
    N: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    PARTS: tl.constexpr,
    SCALE: tl.constexpr,
    TMA: tl.constexpr,
):
    """Stores a tile in PARTS pieces side by side, each with its exponents undone."""
    if PARTS > 1:
        left, right = tl.split(acc.reshape(BM, 2, BN // 2).permute(0, 2, 1))
        half: tl.constexpr = BN // 2
        _store(left, y_ptr, desc, ref_a, b_ref_ptr, r0, c0, M, N, BM, half, PARTS // 2, SCALE, TMA)
        c1 = c0 + half
        _store(right, y_ptr, desc, ref_a, b_ref_ptr, r0, c1, M, N, BM, half, PARTS // 2, SCALE, TMA)
    else:
        columns = c0 + tl.arange(0, BN)
        ref_b = tl.load(b_ref_ptr + columns, mask=columns < N, other=127).to(tl.int32) - 127
        hardest = tl.maximum(tl.max(tl.abs(ref_a), 0), tl.max(tl.abs(ref_b), 0))
        y = _unfold(acc, ref_a, ref_b, hardest <= EASY, SCALE).to(y_ptr.dtype.element_ty)
        if TMA:
            desc.store([r0, c0], y)
        else:
            rows = r0 + tl.arange(0, BM)
            ptr = y_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :]
            tl.store(ptr, y, mask=(rows < M)[:, None] & (columns < N)[None, :])


@triton.jit
def _kernel(
    a_ptr,
    b_ptr,
    a_ref_ptr,
    b_ref_ptr,
    y_ptr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    SCALE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    STEPS: tl.constexpr,
    PARTS: tl.constexpr,
    TMA: tl.constexpr,
):
    """A program: every PROGRAMS-th tile; the sum is continued in float32 after STEPS steps."""
    a = tl.make_tensor_descriptor(a_ptr, [M, K], [K, 1], [BM, BK])
    b = tl.make_tensor_descriptor(b_ptr, [N, K], [K, 1], [BN, BK])
    y = a
    if TMA:
        y = tl.make_tensor_descriptor(y_ptr, [M, N], [N, 1], [BM, BN // PARTS])
    DOWN: tl.constexpr = (M + BM - 1) // BM
    ACROSS: tl.constexpr = (N + BN - 1) // BN
    ALL: tl.constexpr = (K + BK - 1) // BK
    for tile in tl.range(tl.program_id(0), DOWN * ACROSS, PROGRAMS, flatten=ALL <= STEPS):
        group = tile // (GROUP * ACROSS)
        height = min(DOWN - group * GROUP, GROUP)
        r0 = (group * GROUP + tile % (GROUP * ACROSS) % height) * BM
        c0 = (tile % (GROUP * ACROSS) // height) * BN
        total = tl.zeros((BM, BN), tl.float32)
        if ALL <= STEPS:
            for k in range(ALL):
                total = tl.dot(a.load([r0, k * BK]), b.load([c0, k * BK]).T, total)
        else:
            for start in range(0, ALL, STEPS):
                acc = tl.zeros((BM, BN), tl.float32)
                for k in range(start, min(start + STEPS, ALL)):
                    acc = tl.dot(a.load([r0, k * BK]), b.load([c0, k * BK]).T, acc)
                total += acc
        rows = r0 + tl.arange(0, BM)
        ref_a = tl.load(a_ref_ptr + rows, mask=rows < M, other=127).to(tl.int32) - 127
        _store(total, y_ptr, y, ref_a, b_ref_ptr, r0, c0, M, N, BM, BN, PARTS, SCALE, TMA)


def matmul(
    a: View,
    b: View,
    *,
    scale: float,
    rotated: bool,
    dtype: jnp.dtype,
    machine: Machine,
    processors: int,
) -> jax.Array:
    """a @ b^T, `scale` times, from folded operands.

    Reads every operand once for each of the other's tiles that a pass over the processors holds;
    writes the result once.

    Args:
      a: folded, (rows, length).
      b: folded, (columns, length).
      scale: a factor that undoes transform and pre-scales.
      rotated: whether the operands went through a Hadamard transform, after which long sums of one
        sign no longer occur but in one of its coefficients.
      dtype: of the result, bfloat16, float16 or float32.
      machine: that runs it.
      processors: of the GPU.

    Returns:
      (rows, columns) of `dtype`, accumulated in float32 up to the FP8 units' own sums.
    """
    (m, k), n = a.data.shape, b.data.shape[0]
    tile = pick(machine, m=m, n=n, processors=processors)
    tiles = triton.cdiv(m, tile.m) * triton.cdiv(n, tile.n)
    itemsize = jnp.dtype(dtype).itemsize
    (y,) = _launch.launch(
        _kernel,
        a.data,
        b.data,
        a.refs,
        b.refs,
        out=(jax.ShapeDtypeStruct((m, n), dtype),),
        grid=min(tiles, processors),
        num_warps=tile.warps,
        num_stages=tile.stages,
        M=m,
        N=n,
        K=k,
        SCALE=float(scale),
        BM=tile.m,
        BN=tile.n,
        BK=tile.k,
        GROUP=tile.group,
        PROGRAMS=min(tiles, processors),
        STEPS=CHUNK["rotated" if rotated else "plain"] // tile.k,
        PARTS=itemsize if tile.n == 256 else max(1, itemsize // 2),
        TMA=n * itemsize % 16 == 0,
    )
    return y


def pick(machine: Machine, *, m: int, n: int, processors: int) -> MatmulTile:
    """The tile of the shape's class: large where it gives every processor something to do."""
    tiles = triton.cdiv(m, machine.large.m) * triton.cdiv(n, machine.large.n)
    return machine.large if tiles >= processors else machine.small
