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

from adahop_jax._view import CHUNK, View
from adahop_jax.reference.bits import rounded
from triton_kernels import _launch
from triton_kernels._blocks import power_of_two
from triton_kernels.machines import Machine, MatmulTile

LEAST_SHARE = 2048
"""Elements of the contracted axis that are worth a program of their own."""

# FP8 units' sums lie between 2^-32 and 2^45: times 2^EASY they stay in float32's range.
EASY = tl.constexpr(80)


@triton.jit
def _unfold(acc, row_exponent, column_exponent, SCALE: tl.constexpr):
    """acc [BM, BN] * SCALE * 2^(row_exponent + column_exponent).

    Exponents are undone up to `EASY` first, and what is left of them, mostly nothing, after: so
    nothing on the way leaves float32's range that the result does not leave. A branch instead
    would make the compiler wait for every matrix instruction.
    """
    row_easy = tl.minimum(tl.maximum(row_exponent, -EASY), EASY)
    column_easy = tl.minimum(tl.maximum(column_exponent, -EASY), EASY)
    acc = acc * (power_of_two(row_easy) * SCALE)[:, None] * power_of_two(column_easy)[None, :]
    acc = acc * power_of_two(row_exponent - row_easy)[:, None]
    return acc * power_of_two(column_exponent - column_easy)[None, :]


@triton.jit
def _store(
    tile,
    y,
    row,
    column,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCKED: tl.constexpr,
):
    """Stores a tile in PARTS pieces side by side, which takes less shared memory than at once.

    `y` is a descriptor if BLOCKED, else a pointer.
    """
    if PARTS > 1:
        left, right = tl.split(tile.reshape(BM, 2, BN // 2).permute(0, 2, 1))
        half: tl.constexpr = BN // 2
        _store(left, y, row, column, ROWS, COLUMNS, BM, half, PARTS // 2, BLOCKED)
        _store(right, y, row, column + half, ROWS, COLUMNS, BM, half, PARTS // 2, BLOCKED)
    elif BLOCKED:
        y.store([row, column], tile.to(y.dtype))
    else:
        rows = row + tl.arange(0, BM)
        columns = column + tl.arange(0, BN)
        mask = (rows < ROWS)[:, None] & (columns < COLUMNS)[None, :]
        ptr = y + rows.to(tl.int64)[:, None] * COLUMNS + columns[None, :]
        tl.store(ptr, tile.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _kernel(
    a,
    b,
    a_ref_ptr,
    b_ref_ptr,
    y,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    SCALE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    SPLITS: tl.constexpr,
    STEPS: tl.constexpr,
    PARTS: tl.constexpr,
    TMA: tl.constexpr,
    BLOCKED: tl.constexpr,
):
    """A program: every PROGRAMS-th tile of SPLITS products, each over its share of K.

    The sum is continued in float32 after STEPS steps. Results are stacked along the rows.
    """
    if not TMA:
        a = tl.make_tensor_descriptor(a, [M, K], [K, 1], [BM, BK])
        b = tl.make_tensor_descriptor(b, [N, K], [K, 1], [BN, BK])
    DOWN: tl.constexpr = (M + BM - 1) // BM
    ACROSS: tl.constexpr = (N + BN - 1) // BN
    SHARE: tl.constexpr = ((K + BK - 1) // BK + SPLITS - 1) // SPLITS
    TILES: tl.constexpr = DOWN * ACROSS
    for t in tl.range(tl.program_id(0), TILES * SPLITS, PROGRAMS, flatten=SHARE <= STEPS):
        first = t // TILES * SHARE
        tile = t % TILES
        group = tile // (GROUP * ACROSS)
        height = min(DOWN - group * GROUP, GROUP)
        r0 = (group * GROUP + tile % (GROUP * ACROSS) % height) * BM
        c0 = (tile % (GROUP * ACROSS) // height) * BN
        total = tl.zeros((BM, BN), tl.float32)
        # Beyond K, the descriptors load zeros.
        if SHARE <= STEPS:
            for k in range(SHARE):
                k0 = (first + k) * BK
                total = tl.dot(a.load([r0, k0]), b.load([c0, k0]).T, total)
        else:
            for start in range(0, SHARE, STEPS):
                acc = tl.zeros((BM, BN), tl.float32)
                for k in range(start, min(start + STEPS, SHARE)):
                    k0 = (first + k) * BK
                    acc = tl.dot(a.load([r0, k0]), b.load([c0, k0]).T, acc)
                total += acc
        rows = r0 + tl.arange(0, BM)
        ref_a = tl.load(a_ref_ptr + rows, mask=rows < M, other=127).to(tl.int32) - 127
        columns = c0 + tl.arange(0, BN)
        ref_b = tl.load(b_ref_ptr + columns, mask=columns < N, other=127).to(tl.int32) - 127
        result = _unfold(total, ref_a, ref_b, SCALE)
        if SPLITS == 1:
            _store(result, y, r0, c0, M, N, BM, BN, PARTS, BLOCKED)
        elif BLOCKED:
            _store(result, y, t // TILES * M + r0, c0, M, N, BM, BN, PARTS, BLOCKED)
        else:
            share = y + t // TILES * (M * N)
            _store(result, share, r0, c0, M, N, BM, BN, PARTS, BLOCKED)


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
    tile, splits = pick(machine, m=m, n=n, k=k, processors=processors)
    tiles = triton.cdiv(m, tile.m) * triton.cdiv(n, tile.n) * splits
    # What splits add up to is rounded once.
    out_dtype = jnp.dtype(jnp.float32 if splits > 1 else dtype)
    parts = max(1, tile.n * out_dtype.itemsize // 256)
    # Descriptors want rows of a multiple of 16 bytes, and shares that do not overlap.
    blocked = machine.tma and n * out_dtype.itemsize % 16 == 0 and (splits == 1 or m % tile.m == 0)
    (y,) = _launch.launch(
        _kernel,
        a.data,
        b.data,
        a.refs,
        b.refs,
        out=(jax.ShapeDtypeStruct((splits * m, n), out_dtype),),
        grid=min(tiles, processors),
        num_warps=tile.warps,
        num_stages=tile.stages,
        tiles={0: (tile.m, tile.k), 1: (tile.n, tile.k)} if machine.tma else None,
        written={0: (tile.m, tile.n // parts)} if blocked else None,
        M=m,
        N=n,
        K=k,
        SCALE=float(scale),
        BM=tile.m,
        BN=tile.n,
        BK=tile.k,
        GROUP=tile.group,
        PROGRAMS=min(tiles, processors),
        SPLITS=splits,
        STEPS=CHUNK["rotated" if rotated else "plain"] // tile.k,
        PARTS=parts,
        TMA=machine.tma,
        BLOCKED=blocked,
    )
    if splits > 1:
        y = rounded(jnp.sum(y.reshape(splits, m, n), axis=0), jnp.dtype(dtype))
    return y


def is_large(machine: Machine, *, m: int, n: int, processors: int) -> bool:
    """Whether large tiles give nearly every processor something to do."""
    large = machine.large
    return triton.cdiv(m, large.m) * triton.cdiv(n, large.n) >= 0.75 * processors


def pick(machine: Machine, *, m: int, n: int, k: int, processors: int) -> tuple[MatmulTile, int]:
    """The tile of the shape's class, and into how many shares the contracted axis is split.

    A small tile may have several programs.
    """
    if is_large(machine, m=m, n=n, processors=processors):
        return machine.large, 1
    small = machine.small
    tiles = triton.cdiv(m, small.m) * triton.cdiv(n, small.n)
    return small, max(1, min(processors // tiles, k // LEAST_SHARE))
