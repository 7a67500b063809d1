"""The method's heart: the patterns of a product's two operands decide how it is computed.

The table is in the orientation of the method's authors, who speak of W as (out, in) and of
X W^T, dY W and dY^T X; it is not symmetric under transposition. Left and right mean operands in
that orientation and stay inside this module: a plan names the tensor. Source: arXiv:2604.02525,
table of strategies, and the configuration that its authors published.
"""

from typing import Literal

from adahop_jax._formats import FORMATS, FormatName, OperandSpec
from adahop_jax._plan import (
    PRODUCTS,
    LayerPlan,
    Level,
    Pattern,
    Patterns,
    Product,
    ProductPlan,
    Tensor,
)

Cell = Literal["iht", "oe_left", "oe_right", "full", "iht_mxfp6"]

R, C, N = Pattern.ROW, Pattern.COLUMN, Pattern.NONE

TABLE: dict[tuple[Pattern, Pattern], Cell] = {
    (R, R): "iht",
    (R, N): "oe_left",
    (R, C): "oe_right",
    (C, R): "iht",
    (C, N): "iht",
    (C, C): "full",
    (N, R): "iht",
    (N, N): "iht",
    (N, C): "oe_right",
}
"""(left pattern, right pattern) -> strategy at level 2."""

LEVELS: dict[Level, dict[tuple[Pattern, Pattern], Cell]] = {
    1: TABLE | {(C, C): "oe_right"},
    2: TABLE,
    3: TABLE | {(C, C): "iht_mxfp6"},
}
"""Levels differ in one cell, which only level 2 leaves wholly in `dtype`. Level 3 is not the
authors'."""

SIX_BITS = OperandSpec(format="mxfp6", hadamard=32)

AUTHORS_OPERANDS: dict[Product, tuple[Tensor, Tensor]] = {
    "fwd": ("x", "w"),
    "dgrad": ("dy", "w"),
    "wgrad": ("dy", "x"),
}


def check_level(level: Level, *, where: str = "") -> None:
    """Raises ValueError, its message after `where`, if there is no such level."""
    if level not in LEVELS:
        raise ValueError(f"{where}level {level!r} is unknown; choose 1, 2 or 3")


def check_format(name: FormatName, *, where: str = "") -> None:
    """Raises ValueError, its message after `where`, if there is no such format."""
    if name not in FORMATS:
        raise ValueError(f"{where}fwd {name!r} is unknown; choose {' or '.join(FORMATS)}")


def key(product: Product, patterns: Patterns) -> tuple[Pattern, Pattern]:
    """The table's key: the patterns of the left and right operand in the authors' orientation."""
    match product:
        case "fwd":
            return patterns.x, patterns.w.transposed
        case "dgrad":
            return patterns.dy, patterns.w
        case "wgrad":
            return patterns.dy.transposed, patterns.x


def product_plan(product: Product, patterns: Patterns, *, level: Level) -> ProductPlan:
    """The plan of one product of a layer whose tensors show `patterns`."""
    cell = LEVELS[level][key(product, patterns)]
    left, right = AUTHORS_OPERANDS[product]
    match cell:
        case "full":
            return ProductPlan.full()
        case "iht":
            return ProductPlan.iht()
        case "oe_left":
            return ProductPlan.iht(outliers=left)
        case "oe_right":
            return ProductPlan.iht(outliers=right)
        case "iht_mxfp6":
            return ProductPlan(lhs=SIX_BITS, rhs=SIX_BITS)


def layer_plan(
    patterns: Patterns, *, level: Level, in_features: int, out_features: int
) -> LayerPlan:
    """The plan of a layer whose tensors show `patterns`.

    Raises:
      ValueError: an unknown level.
    """
    check_level(level)
    products = {name: product_plan(name, patterns, level=level) for name in PRODUCTS}
    return LayerPlan(
        **products, patterns=patterns, in_features=in_features, out_features=out_features
    )
