"""Whole layers: fwd, dgrad and wgrad of Llama's projections, everything included.

`ah.Dense` under a calibrated plan and under uniform iht, against `nn.Dense` in BF16.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

import adahop_jax as ah
from benchmarks import floor, timing
from benchmarks.kernels import quantizing
from benchmarks.report import Table
from benchmarks.shapes import MICRO_BATCHES, PROJECTIONS, TOKENS, Projection
from benchmarks.timing import Job, Time

BF16, IHT, PLANNED = "bf16", "iht", "level 1"
W_PRODUCTS = {"fwd": 0, "dgrad": 1}
"""The products that quantize W, and the axis of W that each contracts."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A plan for a shape.

    Attributes:
      name: `PLANNED` or `IHT`.
      linears: of the shape, that have this plan.
      plan: of the layer.
    """

    name: str
    linears: tuple[str, ...]
    plan: ah.LayerPlan

    @property
    def label(self) -> str:
        """Its name among the jobs of a shape."""
        return f"{self.name} {', '.join(self.linears)}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One shape under one plan. Times in seconds.

    Attributes:
      width, shape, recipe, linears: which.
      strategies: of fwd, dgrad and wgrad.
      ours, bf16, floor: of a step.
      ours_shared_w, floor_shared_w: likewise, W's quantizers counted once for all micro-batches.
      times: of the step, with its kernels.
      works: what the floor is made of.
    """

    width: int
    shape: str
    recipe: str
    linears: tuple[str, ...]
    strategies: tuple[str, ...]
    ours: float
    bf16: float
    floor: float
    ours_shared_w: float
    floor_shared_w: float
    times: Time
    works: tuple[floor.Work, ...]


def run(ops: Any, plan: ah.Plan, rates: floor.Rates, *, runs: int) -> list[Row]:
    """Measures every projection under every plan."""
    jobs = [jobs_of(ops, projection, recipes(projection, plan)) for projection in PROJECTIONS]
    compiled = iter(timing.compile_all([job for of_shape in jobs for job in of_shape]))
    rows: list[Row] = []
    for projection, of_shape in zip(PROJECTIONS, jobs, strict=True):
        functions = {job.name: next(compiled) for job in of_shape}
        times = timing.measure(_calls(projection, functions), runs=runs)
        rows += (row(projection, r, times, rates) for r in recipes(projection, plan))
    return rows


def recipes(projection: Projection, plan: ah.Plan) -> list[Recipe]:
    """The different plans of a shape's linears, and uniform iht."""
    linears: dict[ah.LayerPlan, list[str]] = {}
    for linear in projection.linears:
        planned = plan[projection.path(linear)]
        products = ah.LayerPlan(fwd=planned.fwd, dgrad=planned.dgrad, wgrad=planned.wgrad)
        linears.setdefault(products, []).append(linear)
    found = [Recipe(name=PLANNED, linears=tuple(n), plan=p) for p, n in linears.items()]
    iht = ah.LayerPlan.uniform(ah.ProductPlan.iht())
    return [*found, Recipe(name=IHT, linears=projection.linears, plan=iht)]


def jobs_of(ops: Any, projection: Projection, of_shape: Iterable[Recipe]) -> list[Job]:
    """Steps of a shape, and W's quantizers by themselves; of shapes without data."""
    features = projection.out_features
    args = _shapes(projection)
    of_shape = list(of_shape)
    jobs = [Job(name=BF16, function=step(dense(features)), args=args)]
    for recipe in of_shape:
        layer = dense(features, plan=ah.Plan(default=recipe.plan))
        jobs.append(Job(name=recipe.label, function=step(layer), args=args))
    kernel = args[0]["params"]["kernel"]
    for name, axis, spec, norms in sorted(
        {k for r in of_shape for k in _w_kernels(r.plan)}, key=str
    ):
        call = quantizing(ops.operand, axis=axis, spec=spec, norms=norms)
        seed = jax.ShapeDtypeStruct((2,), jnp.uint32)
        jobs.append(Job(name=name, function=call, args=(kernel, seed)))
    return jobs


def row(projection: Projection, recipe: Recipe, times: dict[str, Time], rates: floor.Rates) -> Row:
    """What follows from the times of a shape."""
    works = floor.layer(
        recipe.plan,
        tokens=TOKENS,
        in_features=projection.in_features,
        out_features=projection.out_features,
    )
    saved = 1 - 1 / MICRO_BATCHES
    w_time = sum(times[name].busy for name, *_ in _w_kernels(recipe.plan))
    w_floor = floor.total((work for work in works if work.name.endswith("quantize w")), rates)
    ours, least = times[recipe.label].busy, floor.total(works, rates)
    return Row(
        width=projection.width,
        shape=projection.name,
        recipe=recipe.name,
        linears=recipe.linears,
        strategies=tuple(recipe.plan[name].strategy for name in ("fwd", "dgrad", "wgrad")),
        ours=ours,
        bf16=times[BF16].busy,
        floor=least,
        ours_shared_w=ours - saved * w_time,
        floor_shared_w=least - saved * w_floor,
        times=times[recipe.label],
        works=works,
    )


def summed(rows: Iterable[Row], width: int, recipe: str) -> dict[str, float]:
    """Times summed over the shapes of a width; a shape's is the mean over its linears."""
    chosen = [row for row in rows if (row.width, row.recipe) == (width, recipe)]
    linears = {shape: 0 for shape in (row.shape for row in chosen)}
    for found in chosen:
        linears[found.shape] += len(found.linears)
    fields = ("ours", "bf16", "floor", "ours_shared_w", "floor_shared_w")
    return {
        field: sum(getattr(r, field) * len(r.linears) / linears[r.shape] for r in chosen)
        for field in fields
    }


def table(rows: list[Row]) -> Table:
    """Per shape, and summed over the shapes of each width."""
    lines = []
    for width in dict.fromkeys(row.width for row in rows):
        for found in (row for row in rows if row.width == width):
            values = {field: getattr(found, field) for field in ("ours", "bf16", "floor")}
            values |= {f: getattr(found, f) for f in ("ours_shared_w", "floor_shared_w")}
            what = f"{found.recipe}: {' / '.join(found.strategies)}"
            lines.append((f"{found.shape} {', '.join(found.linears)}", what, *_cells(values)))
        for recipe in (PLANNED, IHT):
            lines.append(
                (f"**d {width}, four shapes**", recipe, *_cells(summed(rows, width, recipe)))
            )
    return Table(
        title=f"Layers: fwd + dgrad + wgrad, {TOKENS:,} tokens, BF16 parameters",
        head=("shape", "plan", "ours us", "BF16 us", "x BF16", "floor us", "of the floor")
        + (f"x BF16, W once in {MICRO_BATCHES}", "of its floor"),
        rows=tuple(lines),
        note="Floor: each kernel's operands read once and its result written once at the copy's "
        "rate, or its operations at the rate of XLA's FP8 product, whichever takes longer; side "
        "products at the BF16 product's. W once in "
        f"{MICRO_BATCHES}: composed, the times of W's quantizers by themselves counted at "
        f"1/{MICRO_BATCHES}. A sum counts a shape's linears at their mean.",
    )


def dense(features: int, *, plan: ah.Plan | None = None, backend: str | None = None) -> nn.Dense:
    """A layer wholly in BF16, without bias: with a plan ours, without one `nn.Dense`."""
    common: Any = {"use_bias": False, "dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
    if plan is None:
        return nn.Dense(features, **common)
    return ah.Dense(features, plan=plan, backend=backend, **common)


def step(layer: nn.Dense) -> Callable[..., Any]:
    """fwd, dgrad and wgrad: (variables, x, dy) -> y and both gradients."""

    def run(variables: Any, x: jax.Array, dy: jax.Array) -> tuple[jax.Array, Any]:
        y, pullback = jax.vjp(layer.apply, variables, x)
        return y, pullback(dy)

    return run


def tensors(tokens: int, in_features: int, out_features: int) -> tuple[Any, jax.Array, jax.Array]:
    """Random variables, x and dy of a layer, as `step` takes them."""
    keys = jax.random.split(jax.random.key(in_features + out_features), 3)
    sizes = (in_features, out_features), (tokens, in_features), (tokens, out_features)
    w, x, dy = (jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, sizes, strict=True))
    return {"params": {"kernel": w}}, x, dy


def _shapes(projection: Projection) -> tuple[Any, Any, Any]:
    return jax.eval_shape(lambda: tensors(TOKENS, projection.in_features, projection.out_features))


def _calls(
    projection: Projection, functions: dict[str, Callable[..., Any]]
) -> dict[str, Callable[[], Any]]:
    args = tensors(TOKENS, projection.in_features, projection.out_features)
    kernel, seed = args[0]["params"]["kernel"], jnp.asarray([1, 2], jnp.uint32)

    def call(name: str) -> Callable[[], Any]:
        of_w = name.startswith(W_KERNEL)
        return lambda: functions[name](*((kernel, seed) if of_w else args))

    return {name: call(name) for name in functions}


W_KERNEL = "quantize w"


def _w_kernels(plan: ah.LayerPlan) -> Iterator[tuple[str, int, ah.OperandSpec, bool]]:
    """Name, axis, spec and whether norms are asked for, of each quantizer of W."""
    for product, axis in W_PRODUCTS.items():
        planned = plan[product]
        if not planned.is_full:
            norms = planned.outliers is not None and planned.outliers.tensor == "w"
            spec = planned.specs[1]
            yield f"{W_KERNEL} {axis} {spec} {norms}", axis, spec, norms


def _cells(values: dict[str, float]) -> tuple[str, ...]:
    ours, bf16, least = values["ours"], values["bf16"], values["floor"]
    return (
        f"{ours * 1e6:.0f}",
        f"{bf16 * 1e6:.0f}",
        f"{bf16 / ours:.2f}",
        f"{least * 1e6:.0f}",
        f"{least / ours:.1%}",
        f"{bf16 / values['ours_shared_w']:.2f}",
        f"{values['floor_shared_w'] / values['ours_shared_w']:.1%}",
    )
