"""Each kernel alone, against a device copy of the bytes that it has to move."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import adahop_jax as ah
from adahop_jax.reference.operations import Wanted
from benchmarks import floor, timing
from benchmarks.report import Table
from benchmarks.shapes import SQUARE
from benchmarks.timing import Job

SPECS = {
    "rotated": ah.OperandSpec(hadamard=32),
    "plain": ah.OperandSpec(),
    "stochastic": ah.OperandSpec(hadamard=32, rounding="stochastic", scale_rule="ceil"),
}
AXES = {"rows": 1, "columns": 0}
WRITTEN = {"folded": "folded", "codes": "mxfp4"}
"""What a view holds, as `floor.WRITTEN` names it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One kernel.

    Attributes:
      name: what it does.
      bytes: that it reads and writes.
      seconds, copy_seconds: its time, and that of a copy of as many bytes.
    """

    name: str
    bytes: float
    seconds: float
    copy_seconds: float


def run(ops: Any, *, runs: int) -> list[Row]:
    """Measures every kernel on a square BF16 tensor."""
    x = jax.random.normal(jax.random.key(0), (SQUARE, SQUARE), jnp.bfloat16)
    found = jobs(ops, x)
    sizes = sorted({size for _, size in found})
    copies = [timing.copy_job(_copy(size), size) for size in sizes]
    times = timing.measure_jobs([*(job for job, _ in found), *copies], runs=runs)
    return [
        Row(
            name=job.name,
            bytes=size,
            seconds=times[job.name].busy,
            copy_seconds=times[_copy(size)].busy,
        )
        for job, size in found
    ]


def _both(ops: Any, rows: Wanted, columns: Wanted, x: jax.Array) -> Any:
    return ops.views(x, rows, columns)


def jobs(ops: Any, x: jax.Array) -> list[tuple[Job, float]]:
    """Every kernel on x, with the bytes that it moves."""
    found = []
    for direction, axis in AXES.items():
        for written, operation in (("folded", ops.operand), ("codes", ops.residual)):
            size = floor.quantizer("", x.size, WRITTEN[written]).bytes
            for variant in ("rotated", "plain", "stochastic", "rotated, norms"):
                call = quantizing(
                    operation,
                    axis=axis,
                    spec=SPECS[variant.partition(",")[0]],
                    norms=variant.endswith("norms"),
                )
                name = f"{direction} -> {written}, {variant}"
                found.append((Job(name=name, function=call, args=(x, seed())), size))
    spec = SPECS["rotated"]
    for written in ("folded", "codes"):
        for norms in (False, True):
            rows, columns = Wanted(False, 1, spec), Wanted(written == "codes", 0, spec, norms=norms)
            name = f"rows -> folded, columns -> {written}, rotated{', norms' * norms}"
            call = functools.partial(_both, ops, rows, columns)
            size = floor.quantizer("", x.size, "folded", WRITTEN[written]).bytes
            found.append((Job(name=name, function=call, args=(x,)), size))
    stored = jax.jit(lambda x: ops.residual(x, axis=1, spec=spec)[:2])(x)
    load = functools.partial(ops.load, spec=spec)
    found.append(
        (
            Job(name="codes -> folded", function=load, args=stored),
            floor.fold("", x.size, spec.format).bytes,
        )
    )
    return found


def quantizing(
    operation: Callable[..., Any], *, axis: int, spec: ah.OperandSpec, norms: bool
) -> Callable[[jax.Array, jax.Array], Any]:
    """(x, seed) -> what a backend's `operand` or `residual` gives."""
    stochastic = spec.rounding == "stochastic"

    def call(x: jax.Array, seed: jax.Array) -> Any:
        return operation(x, axis=axis, spec=spec, seed=seed if stochastic else None, norms=norms)

    return call


def seed() -> jax.Array:
    """Of stochastic rounding."""
    return jnp.asarray([123, 456_789], jnp.uint32)


def table(rows: list[Row], *, of: str = "Triton") -> Table:
    """Bytes, rate, and the share of a copy's."""
    return Table(
        title=f"{of} kernels on a BF16 tensor of {SQUARE} x {SQUARE}",
        head=("kernel", "MB", "us", "TB/s", "copy TB/s", "of the copy"),
        rows=tuple(
            (
                row.name,
                f"{row.bytes / 1e6:.0f}",
                f"{row.seconds * 1e6:.1f}",
                f"{row.bytes / row.seconds / 1e12:.2f}",
                f"{row.bytes / row.copy_seconds / 1e12:.2f}",
                f"{row.copy_seconds / row.seconds:.1%}",
            )
            for row in rows
        ),
    )


def _copy(size: float) -> str:
    return f"copy of {size:.0f} bytes"
