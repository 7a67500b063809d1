"""Square layers from small to large: where MXFP4 starts to pay."""

import dataclasses
from typing import Any

import jax

import adahop_jax as ah
from benchmarks import timing
from benchmarks.layers import dense, step, tensors
from benchmarks.report import Table
from benchmarks.shapes import SWEEP
from benchmarks.timing import Job

OURS, BF16 = "ours", "bf16"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A square layer's step under uniform iht; seconds.

    Attributes:
      tokens, d: its shape.
      ours, bf16: busy time.
      ours_span, bf16_span: with the gaps between kernels, the profiler's own cost among them.
    """

    tokens: int
    d: int
    ours: float
    bf16: float
    ours_span: float
    bf16_span: float


def run(*, runs: int) -> list[Row]:
    """Measures every shape."""
    plan = ah.Plan.uniform("iht")
    jobs = [
        Job(name=name, function=step(layer), args=jax.eval_shape(lambda t=t, d=d: tensors(t, d, d)))
        for t, d in SWEEP
        for name, layer in ((OURS, dense(d, plan=plan)), (BF16, dense(d)))
    ]
    compiled = iter(timing.compile_all(jobs))
    rows = []
    for tokens, d in SWEEP:
        args = tensors(tokens, d, d)
        functions: dict[str, Any] = {name: next(compiled) for name in (OURS, BF16)}
        times = timing.measure(
            {name: lambda f=f, args=args: f(*args) for name, f in functions.items()}, runs=runs
        )
        rows.append(
            Row(
                tokens=tokens,
                d=d,
                ours=times[OURS].busy,
                bf16=times[BF16].busy,
                ours_span=times[OURS].span,
                bf16_span=times[BF16].span,
            )
        )
    return rows


def table(rows: list[Row]) -> Table:
    """How many times BF16's speed, by tokens and d."""
    return Table(
        title="Small shapes: fwd + dgrad + wgrad of d x d, uniform iht",
        head=("tokens", "d", "ours us", "BF16 us", "x BF16", "x BF16, with gaps"),
        rows=tuple(
            (
                f"{row.tokens:,}",
                str(row.d),
                f"{row.ours * 1e6:.0f}",
                f"{row.bf16 * 1e6:.0f}",
                f"{row.bf16 / row.ours:.2f}",
                f"{row.bf16_span / row.ours_span:.2f}",
            )
            for row in rows
        ),
    )
