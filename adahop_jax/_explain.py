"""What a plan does, layer by layer: which strategy, why, and how much stays in `dtype`."""

import dataclasses
from collections.abc import Iterable

from adahop_jax import _strategy
from adahop_jax._calibrate import LayerInfo
from adahop_jax._dispatch import resolve
from adahop_jax._plan import OPERANDS, PRODUCTS, Plan, Product, ProductPlan


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One product of one layer.

    Attributes:
      path: of the layer.
      product: "fwd", "dgrad" or "wgrad".
      strategy: what runs, e.g. "iht+oe(w)".
      why: the table's key, left-right in the authors' orientation; empty for a plan made by hand.
      k: rows or columns extracted.
      backend: what runs the quantized part; empty for a product in full.
      multiply_adds: of the whole product, in all copies of a stacked layer.
      share_in_dtype: of the multiply-adds, how many stay in `dtype`.
      speedup: expected time in BF16 over expected time as planned, quantization included; below 1,
        the product is too small for its plan to pay. None for a product in full, or where the
        backend knows no rates.
    """

    path: str
    product: Product
    strategy: str
    why: str
    k: int
    backend: str
    multiply_adds: int
    share_in_dtype: float
    speedup: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A table of `Row`s; printing it shows it."""

    rows: tuple[Row, ...]

    @property
    def share_in_dtype(self) -> float:
        """Share of all multiply-adds that stay in `dtype`."""
        total = sum(row.multiply_adds for row in self.rows)
        kept = sum(row.multiply_adds * row.share_in_dtype for row in self.rows)
        return kept / total if total else 0.0

    def __str__(self) -> str:
        head = ("layer", "product", "strategy", "why", "k", "runs on", "in dtype", "vs bf16")
        body = [
            (
                row.path,
                row.product,
                row.strategy,
                row.why or "-",
                str(row.k or "-"),
                row.backend or "dtype",
                f"{row.share_in_dtype:.1%}",
                "-" if row.speedup is None else f"{row.speedup:.2f}x",
            )
            for row in self.rows
        ]
        widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in (head, *body)
        ]
        lines.append(f"multiply-adds in dtype: {self.share_in_dtype:.2%}")
        slower = sum(row.speedup is not None and row.speedup < 1 for row in self.rows)
        if slower:
            lines.append(
                f"{slower} of {len(self.rows)} products are expected to be faster in BF16: too "
                "small to pay for quantizing; leave them full"
            )
        return "\n".join(lines)


def explain(plan: Plan, layers: Iterable[LayerInfo], *, backend: str | None = None) -> Explanation:
    """What runs in every product of every layer, and why.

    Args:
      plan: the plan.
      layers: of the model, from `adahop_jax.layers`.
      backend: as given to `Dense`.

    Raises:
      PlanError: the plan and the layers do not fit each other.
    """
    layers = tuple(layers)
    plan.check(layer.path for layer in layers)
    return Explanation(
        rows=tuple(_row(plan, layer, product, backend) for layer in layers for product in PRODUCTS)
    )


def _row(plan: Plan, layer: LayerInfo, product: Product, backend: str | None) -> Row:
    layer_plan = plan[layer.path]
    product_plan = layer_plan[product]
    why = ""
    if layer_plan.patterns is not None:
        why = "-".join(_strategy.key(product, layer_plan.patterns))
    k, size = _extracted(product, product_plan, layer)
    backend_name, speedup = "", None
    if not product_plan.is_full:
        backend_name, operations = resolve(backend)
        rows, columns, length = _shape(product, layer)
        speedup = operations.speedup(
            rows=rows,
            columns=columns,
            length=length,
            stored=product_plan.specs[0].mx if product == "wgrad" else None,
            extracted=_side(product, product_plan),
        )
    return Row(
        path=layer.path,
        product=product,
        strategy=product_plan.strategy,
        why=why,
        k=k,
        backend=backend_name,
        multiply_adds=layer.copies * layer.tokens * layer.in_features * layer.out_features,
        share_in_dtype=1.0 if product_plan.is_full else k / max(size, 1),
        speedup=speedup,
    )


def _extracted(product: Product, plan: ProductPlan, layer: LayerInfo) -> tuple[int, int]:
    """How many rows or columns are extracted, and of how many."""
    if plan.outliers is None:
        return 0, 1
    size = _shape(product, layer)[0 if _side(product, plan) == "lhs" else 1]
    return plan.outliers.count(size), size


def _side(product: Product, plan: ProductPlan) -> str | None:
    """Which operand is extracted, "lhs" or "rhs", if one is."""
    if plan.outliers is None:
        return None
    return ("lhs", "rhs")[OPERANDS[product].index(plan.outliers.tensor)]


def _shape(product: Product, layer: LayerInfo) -> tuple[int, int, int]:
    """Rows, columns and contracted length of a product."""
    match product:
        case "fwd":
            return layer.tokens, layer.out_features, layer.in_features
        case "dgrad":
            return layer.tokens, layer.in_features, layer.out_features
        case "wgrad":
            return layer.in_features, layer.out_features, layer.tokens
