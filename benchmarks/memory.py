"""What the backward pass keeps, in bytes by layer and tensor; prints tables, writes JSON.

    python -m benchmarks.memory --out memory.json

Read off the closure of `jax.vjp`, which is traced and never run: any size can be counted on any
machine. Parameters are not counted. On a GPU a whole training step is compiled and measured too
(`benchmarks.whole_step`).
"""

import argparse
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

import adahop_jax as ah
from adahop_jax._plan import Level
from adahop_jax._strategy import LEVELS, layer_plan
from benchmarks import report, timing, whole_step
from benchmarks.kept import GIB, MIB, kept, size
from benchmarks.report import Table
from benchmarks.shapes import PLAN, PROJECTIONS, TOKENS

GROUPS = (("query", "key", "value"), ("out",), ("gate", "up"), ("down",))
"""The linears of a block that read the same X."""

X, CODES, SCALES, COLUMNS, INDICES = "X in BF16", "codes", "scales", "columns", "indices"
TENSORS = (X, CODES, SCALES, COLUMNS, INDICES)

BF16, IHT = "bf16", "iht"
FULL_PLAN = ah.LayerPlan.uniform(ah.ProductPlan.full())
IHT_PLAN = ah.LayerPlan.uniform(ah.ProductPlan.iht())

Plans = Callable[[int, str], ah.LayerPlan]
"""(block, linear) -> its plan."""


PUBLISHED = {BF16: 76.00, IHT: 20.60, "level 1": 20.94, "level 2": 28.04}
"""GiB of the saved inputs of Llama-3.1-8B's linears: arXiv:2604.02525, Table 4."""

PUBLISHED_SIZES = {"width": 4096, "blocks": 32, "tokens": 32_768}
"""At these BF16's figure is exact, each linear keeping an input of its own."""

CALIBRATED_SIZES = {"width": 2048, "blocks": 16, "tokens": TOKENS}


class Member(NamedTuple):
    """A linear of a group that reads one X."""

    name: str
    features: int
    plan: ah.LayerPlan


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one linear keeps by itself, or a group together.

    Attributes:
      recipe, block, linears: which.
      wgrad: strategies of their wgrads.
      bytes: by tensor.
    """

    recipe: str
    block: int
    linears: tuple[str, ...]
    wgrad: tuple[str, ...]
    bytes: Mapping[str, int]

    @property
    def total(self) -> int:
        """In bytes."""
        return sum(self.bytes.values())


class _Layers(nn.Module):
    members: tuple[Member, ...]

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, ...]:
        dense = functools.partial(
            ah.Dense, use_bias=False, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16
        )
        layers = (
            dense(m.features, plan=ah.Plan(default=m.plan), name=m.name) for m in self.members
        )
        return ah.dense_group(x, *layers)


@functools.cache
def counted(tokens: int, in_features: int, members: tuple[Member, ...]) -> dict[str, int]:
    """Bytes that linears which read one X keep together, by tensor."""
    x = jax.ShapeDtypeStruct((tokens, in_features), jnp.bfloat16)
    model = _Layers(members)
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    found = dict.fromkeys(TENSORS, 0)
    for aval in kept(model.apply, variables, x):
        found[_tensor(aval, tokens, in_features)] += size(aval)
    return found


def _tensor(aval: Any, tokens: int, in_features: int) -> str:
    if aval.dtype == jnp.uint8:
        return SCALES if aval.shape[-1] == -(-tokens // 32) else CODES
    if aval.dtype == jnp.int32:
        return INDICES
    return X if math.prod(aval.shape) == tokens * in_features else COLUMNS


def rows(
    recipe: str, plans: Plans, *, width: int, blocks: int, tokens: int, shared: bool
) -> list[Row]:
    """What the linears of a stack keep, each by itself or those of one X together."""
    shapes = kernels(width)
    found = []
    for block, group in itertools.product(range(blocks), GROUPS):
        for linears in (group,) if shared else tuple((linear,) for linear in group):
            of_group = {linear: plans(block, linear) for linear in linears}
            members = tuple(Member(n, shapes[n][1], plan) for n, plan in of_group.items())
            found.append(
                Row(
                    recipe=recipe,
                    block=block,
                    linears=linears,
                    wgrad=tuple(plan.wgrad.strategy for plan in of_group.values()),
                    bytes=counted(tokens, shapes[linears[0]][0], members),
                )
            )
    return found


def kernels(width: int) -> dict[str, tuple[int, int]]:
    """(in_features, out_features) of the linears of a block."""
    return {
        linear: (projection.in_features, projection.out_features)
        for projection in PROJECTIONS
        if projection.width == width
        for linear in projection.linears
    }


def published_patterns(block: int, linear: str) -> ah.Patterns:
    """Patterns that give wgrad the published setting's share of extraction.

    Its memory says that 87 of 224 linears extract in wgrad (there dY^T X, keyed by dY transposed
    and X), and that 40 of these are column-column, with input 4096. What is extracted on the right
    is X's columns, so X is column-wise in all 87, and dY row-wise in the 40. Which linears they
    are was not published and alters only what is shared: here those whose dY is row-wise in
    plan.json, value and out, in 20 blocks, with query and key, which read value's X, and 7 more.
    """
    columns = {"query": 20, "key": 20, "value": 20, "out": 20, "gate": 3, "up": 3, "down": 1}
    is_column, is_row = block < columns[linear], linear in ("value", "out") and block < 20
    return ah.Patterns(
        x=ah.Pattern.COLUMN if is_column else ah.Pattern.NONE,
        w=ah.Pattern.NONE,
        dy=ah.Pattern.ROW if is_row else ah.Pattern.NONE,
    )


def published_plans() -> dict[str, Plans]:
    """Every recipe of the published table."""

    shapes = kernels(PUBLISHED_SIZES["width"])

    def of_level(level: Level) -> Plans:
        def plan(block: int, linear: str) -> ah.LayerPlan:
            in_features, out_features = shapes[linear]
            return layer_plan(
                published_patterns(block, linear),
                level=level,
                in_features=in_features,
                out_features=out_features,
            )

        return plan

    return {**_uniform(), **{f"level {level}": of_level(level) for level in LEVELS}}


def calibrated_plans(plan: ah.Plan, width: int) -> dict[str, Plans]:
    """BF16, IHT, and a plan that calibration gave for a block, in every block."""
    return {**_uniform(), f"level {plan.level}": lambda block, linear: plan[f"d{width}/{linear}"]}


def _uniform() -> dict[str, Plans]:
    return {BF16: lambda block, linear: FULL_PLAN, IHT: lambda block, linear: IHT_PLAN}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """What a stack's linears keep under every recipe, each by itself and sharing X."""

    width: int
    blocks: int
    tokens: int
    alone: dict[str, list[Row]]
    shared: dict[str, list[Row]]


def stack(plans: Mapping[str, Plans], *, width: int, blocks: int, tokens: int) -> Stack:
    """Counts a stack."""
    alone, shared = (
        {
            name: rows(name, of, width=width, blocks=blocks, tokens=tokens, shared=shares)
            for name, of in plans.items()
        }
        for shares in (False, True)
    )
    return Stack(width=width, blocks=blocks, tokens=tokens, alone=alone, shared=shared)


def total(found: Iterable[Row]) -> int:
    """In bytes."""
    return sum(row.total for row in found)


def stack_table(title: str, found: Stack, published: Mapping[str, float], note: str) -> Table:
    """A line for every recipe: by itself and shared, and which tensors make it up."""
    lines = []
    for name in found.alone:
        alone, shared = total(found.alone[name]), total(found.shared[name])
        by_tensor = (sum(row.bytes[t] for row in found.alone[name]) for t in TENSORS)
        extracts = sum("oe(x)" in row.wgrad[0] for row in found.alone[name])
        in_full = sum(row.wgrad[0] == "full" for row in found.alone[name])
        lines.append(
            (
                name,
                f"{extracts} extract X, {in_full} in BF16",
                f"{published[name]:.2f}" if name in published else "-",
                f"{alone / GIB:.2f}",
                f"{total(found.alone[BF16]) / alone:.2f}",
                *(f"{b / GIB:.3f}" if b else "-" for b in by_tensor),
                f"{shared / GIB:.2f}",
                f"{total(found.shared[BF16]) / shared:.2f}",
            )
        )
    return Table(
        title=title,
        head=("recipe", "wgrads", "published GiB", "ours GiB", "x BF16", *TENSORS)
        + ("X shared, GiB", "x BF16, X shared"),
        rows=tuple(lines),
        note=note,
    )


def block_table(found: Stack, recipe: str) -> Table:
    """A line for every linear of a block."""
    lines = [
        (
            row.linears[0],
            row.wgrad[0],
            *(f"{row.bytes[t] / MIB:.3f}" if row.bytes[t] else "-" for t in TENSORS),
            f"{row.total / MIB:.2f}",
            f"{bf16.total / row.total:.2f}",
        )
        for row, bf16 in zip(found.alone[recipe], found.alone[BF16], strict=True)
        if row.block == 0
    ]
    return Table(
        title=f"One block of it under {recipe}, MiB, each linear by itself",
        head=("linear", "wgrad", *TENSORS, "in all", "x BF16"),
        rows=tuple(lines),
    )


def main() -> None:
    """Counts, prints and writes; on a GPU compiles and measures too."""
    parser = argparse.ArgumentParser(description="Count what the backward pass keeps.")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--plan", type=Path, default=PLAN)
    parser.add_argument("--commit", help="of the sources, where they lie in no git checkout")
    options = parser.parse_args()
    plan = ah.Plan.load(options.plan)
    about = report.circumstances(options.commit)
    results: dict[str, Any] = {}

    def write(name: str, found: Any, *tables: Table) -> None:
        print(*tables, sep="\n", flush=True)
        results[name] = found
        options.out.write_text(report.to_json(about, results), encoding="utf-8")

    published = stack(published_plans(), **PUBLISHED_SIZES)
    write("published", published, published_table(published))
    calibrated = stack(calibrated_plans(plan, CALIBRATED_SIZES["width"]), **CALIBRATED_SIZES)
    write("calibrated", calibrated, *calibrated_tables(calibrated, plan, options.plan))
    held = [whole_step.held(recipe) for recipe in whole_step.recipes(plan)]
    write("held", held, whole_step.held_table(held))
    if jax.default_backend() != "gpu":
        print("Whole steps are compiled and measured on a GPU only, and JAX sees none here.")
        return
    recipes_of = functools.partial(whole_step.recipes, plan, attention="cudnn")
    steps = whole_step.measured(recipes_of())
    write("steps", steps, whole_step.steps_table(steps))
    of_largest = recipes_of(whole_step.LARGEST, whole_step.LARGEST_SIZES)
    largest = timing.concurrently(whole_step.largest_model, of_largest)
    write("largest", largest, whole_step.largest_table(largest))


def published_table(found: Stack) -> Table:
    """The published setting."""
    return stack_table(
        "Saved inputs of the linears of Llama-3.1-8B, {blocks} blocks, {tokens:,} tokens".format(
            **PUBLISHED_SIZES
        ),
        found,
        PUBLISHED,
        "Published: arXiv:2604.02525, Table 4, each linear by itself. A linear that extracts X in "
        "wgrad keeps 64 columns in BF16; where dY is extracted nothing is kept for it. Which "
        "linears extract is modelled (`published_patterns`).",
    )


def calibrated_tables(found: Stack, plan: ah.Plan, file: Path) -> tuple[Table, Table]:
    """A smaller stack, and one block of it."""
    title = "Saved inputs of the linears of d {width}, {blocks} blocks, {tokens:,} tokens"
    note = f"Level {plan.level}: {file.name}, what calibration gave for a block of SmolLM2-135M."
    return (
        stack_table(title.format(**CALIBRATED_SIZES), found, {}, note),
        block_table(found, f"level {plan.level}"),
    )


if __name__ == "__main__":
    main()
