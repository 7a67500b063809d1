"""One product of two BF16 tensors, quantization and rotation included, and what it is held against.

Also where the rates come from that every floor is made of.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

import adahop_jax as ah
from adahop_jax._view import View
from benchmarks import floor, timing
from benchmarks.report import Table
from benchmarks.shapes import SQUARE
from benchmarks.timing import Job, Time
from triton_kernels.machines import MatmulTile, machine_of
from triton_kernels.native import native_matmul

SPEC = ah.OperandSpec(hadamard=32)
SCALE = 1 / 32

OURS = "ours, both operands from BF16"
ONE_GIVEN = "ours, W quantized beforehand"
GIVEN = "ours, both quantized beforehand"
BF16 = "XLA, BF16"
FP8 = "XLA, FP8 (E4M3, both K-major)"
DOT_SCALED = "tl.dot_scaled, packed MXFP4"
COPY = "device copy of both quantizers' bytes"
FLOOR = "floor: XLA's FP8 product and that copy"

# For `tl.dot_scaled`, which dequantizes to BF16 on Hopper.
STOCK_TILE = MatmulTile(m=128, n=128, k=128, warps=8, stages=3, group=8)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Times of one product.

    Attributes:
      m, n, k: its dims.
      times: by name.
      rates: that follow from them.
      floor: seconds.
    """

    m: int
    n: int
    k: int
    times: dict[str, Time]
    rates: floor.Rates
    floor: float


def run(ops: Any, *, runs: int) -> Result:
    """Measures the product of two square tensors."""
    x, w = (jax.random.normal(jax.random.key(i), (SQUARE, SQUARE), jnp.bfloat16) for i in range(2))
    times = timing.measure_jobs(jobs(ops, x, w), runs=runs)
    return result(SQUARE, SQUARE, SQUARE, times)


def result(m: int, n: int, k: int, times: dict[str, Time]) -> Result:
    """What follows from the times."""
    operations = 2 * m * n * k
    copied = _copied(m, n, k)
    return Result(
        m=m,
        n=n,
        k=k,
        times=times,
        rates=floor.Rates(
            copy=copied / times[COPY].busy,
            fp8=operations / times[FP8].busy,
            bf16=operations / times[BF16].busy,
        ),
        floor=times[FP8].busy + times[COPY].busy,
    )


def jobs(ops: Any, x: jax.Array, w: jax.Array) -> list[Job]:
    """x (m, k) times w (k, n) in every way."""

    def left(x: jax.Array) -> Any:
        return ops.operand(x, axis=1, spec=SPEC)[0]

    def right(w: jax.Array) -> Any:
        return ops.operand(w, axis=0, spec=SPEC)[0]

    def multiply(a: Any, b: Any) -> jax.Array:
        return ops.matmul(a, b, scale=SCALE, dtype=jnp.dtype(jnp.bfloat16))

    def stored(x: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
        return jax.jit(lambda x: ops.residual(x, axis=axis, spec=SPEC)[:2])(x)

    a, b = jax.jit(left)(x), jax.jit(right)(w)
    x8 = x.astype(jnp.float8_e4m3fn)
    w8 = w.T.astype(jnp.float8_e4m3fn)
    return [
        Job(name=OURS, function=lambda x, w: multiply(left(x), right(w)), args=(x, w)),
        Job(name=BF16, function=jnp.dot, args=(x, w)),
        Job(name=ONE_GIVEN, function=lambda x, b: multiply(left(x), b), args=(x, b)),
        Job(name=GIVEN, function=multiply, args=(a, b)),
        Job(name=FP8, function=_fp8_product, args=(x8, w8)),
        timing.copy_job(COPY, _copied(x.shape[0], w.shape[1], x.shape[1])),
        Job(name=DOT_SCALED, function=_dot_scaled, args=(*stored(x, 1), *stored(w, 0))),
    ]


def table(found: Result) -> Table:
    """Seconds, rate, and how many times XLA's BF16 product's speed."""
    operations = 2 * found.m * found.n * found.k
    seconds = {name: time.busy for name, time in found.times.items()} | {FLOOR: found.floor}
    rows = []
    for name, time in seconds.items():
        rate = found.rates.copy / 1e12 if name == COPY else operations / time / 1e12
        rows.append(
            (
                name,
                f"{time * 1e3:.3f}",
                f"{rate:.2f} TB/s" if name == COPY else f"{rate:.0f} TFLOP/s",
                "" if name == COPY else f"{seconds[BF16] / time:.2f}",
                f"{found.floor / time:.1%}" if name == OURS else "",
            )
        )
    return Table(
        title=f"Product of {found.m} x {found.k} and {found.k} x {found.n}, BF16 out",
        head=("what", "ms", "rate", "x BF16", "of the floor"),
        rows=tuple(rows),
    )


def _copied(m: int, n: int, k: int) -> float:
    """Bytes that both quantizers read and write."""
    return sum(floor.quantizer("", size, "folded").bytes for size in (m * k, n * k))


def _fp8_product(a: jax.Array, b: jax.Array) -> jax.Array:
    dims = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.bfloat16)


def _dot_scaled(*stored: jax.Array) -> jax.Array:
    a, b = View(*stored[:2], None, None), View(*stored[2:], None, None)
    machine = machine_of(jax.devices()[0])
    assert machine is not None
    return native_matmul(
        a,
        b,
        scale=SCALE,
        dtype=jnp.dtype(jnp.bfloat16),
        machine=dataclasses.replace(machine, large=STOCK_TILE),
    )
