"""Plans: for every layer and each of its three products, how it is computed. Static and hashable.

X is (tokens, in), W the kernel as Flax stores it (in, out), dY (tokens, out):

| product | formula     | lhs, its contracted axis | rhs, its contracted axis | contraction |
| ------- | ----------- | ------------------------ | ------------------------ | ----------- |
| fwd     | Y = X W     | x, 1                     | w, 0                     | in          |
| dgrad   | dX = dY W^T | dy, 1                    | w, 1                     | out         |
| wgrad   | dW = X^T dY | x, 0                     | dy, 0                    | tokens      |
"""

import dataclasses
import enum
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, Self, get_args

from adahop_jax._formats import FormatName, OperandSpec, is_integer

Product = Literal["fwd", "dgrad", "wgrad"]
Level = Literal[1, 2, 3]
Tensor = Literal["x", "w", "dy"]
Norm = Literal["l2", "random"]

PRODUCTS: tuple[Product, ...] = ("fwd", "dgrad", "wgrad")
TENSORS: tuple[Tensor, ...] = ("x", "w", "dy")
OPERANDS: dict[Product, tuple[Tensor, Tensor]] = {
    "fwd": ("x", "w"),
    "dgrad": ("dy", "w"),
    "wgrad": ("x", "dy"),
}
CONTRACT: dict[Product, tuple[int, int]] = {"fwd": (1, 0), "dgrad": (1, 1), "wgrad": (0, 0)}

ROTATED = OperandSpec(hadamard=32)
PLAIN = OperandSpec()


class PlanError(ValueError):
    """A plan that cannot be read, does not fit the model, or asks for what cannot be."""


class Pattern(enum.StrEnum):
    """Where a tensor's outliers lie: in few rows, in few columns, or neither."""

    NONE = "none"
    ROW = "row"
    COLUMN = "column"

    @property
    def transposed(self) -> "Pattern":
        """The pattern of the tensor's transpose."""
        flip = {Pattern.ROW: Pattern.COLUMN, Pattern.COLUMN: Pattern.ROW}
        return flip.get(self, self)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Patterns:
    """Patterns of a layer's tensors: X as (tokens, in), W as (out, in), dY as (tokens, out)."""

    x: Pattern
    w: Pattern
    dy: Pattern


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OutlierSpec:
    """Outlier extraction (OE): k rows or columns of a tensor, computed in `dtype`.

    Attributes:
      tensor: "x", "w" or "dy"; always along the axis that the product does not contract.
      k: how many; None is min(64, size // 64), at least 1. Capped at the axis' size.
      norm: by what they are ranked; "l2", ties to the lower index. "random" takes any k, drawn
        anew at every call from the stream "quantize": the control, which extracts as much.
    """

    tensor: Tensor
    k: int | None = None
    norm: Norm = "l2"

    def __post_init__(self) -> None:
        if self.tensor not in TENSORS:
            raise ValueError(f"tensor {self.tensor!r} is unknown; choose one of {list(TENSORS)}")
        if self.k is not None and not (is_integer(self.k) and self.k >= 1):
            raise ValueError(f"k must be a positive integer or None, got {self.k!r}")
        if self.norm not in get_args(Norm):
            raise ValueError(f"norm {self.norm!r} is unknown; choose one of {get_args(Norm)}")

    def count(self, size: int) -> int:
        """How many of `size` rows or columns are extracted."""
        return min(size, max(1, min(64, size // 64)) if self.k is None else self.k)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProductPlan:
    """How one product is computed: in `dtype` where both operands are None, else in MX blocks.

    Attributes:
      lhs, rhs: how the operands are quantized; the order is that of the module's table.
      outliers: what is extracted, if anything.
    """

    lhs: OperandSpec | None = None
    rhs: OperandSpec | None = None
    outliers: OutlierSpec | None = None

    def __post_init__(self) -> None:
        if self.lhs is None or self.rhs is None:
            if self.lhs is not self.rhs:
                raise ValueError("lhs and rhs must both be quantized or both be None")
            if self.outliers is not None:
                raise ValueError("a product in full has no outliers to extract; drop `outliers`")
        elif (self.lhs.hadamard, self.lhs.signs) != (self.rhs.hadamard, self.rhs.signs):
            raise ValueError(
                "lhs and rhs must share hadamard and signs, or the transform does not cancel; got "
                f"{self.lhs.hadamard}, {self.lhs.signs} and {self.rhs.hadamard}, {self.rhs.signs}"
            )
        elif self.lhs.mx.block_size != self.rhs.mx.block_size:
            raise ValueError("lhs and rhs must have blocks of one size")

    @classmethod
    def full(cls) -> Self:
        """The product in the layer's `dtype`."""
        return cls()

    @classmethod
    def mxfp4(cls) -> Self:
        """Both operands in MXFP4, nothing rotated."""
        return cls(lhs=PLAIN, rhs=PLAIN)

    @classmethod
    def iht(cls, *, outliers: Tensor | None = None, k: int | None = None) -> Self:
        """Inner Hadamard transform of both operands, with or without extraction of a tensor."""
        oe = None if outliers is None else OutlierSpec(tensor=outliers, k=k)
        return cls(lhs=ROTATED, rhs=ROTATED, outliers=oe)

    @classmethod
    def named(cls, strategy: str) -> Self:
        """The product plan of a strategy's name: "full", "mxfp4" or "iht"."""
        makers = {"full": cls.full, "mxfp4": cls.mxfp4, "iht": cls.iht}
        if strategy not in makers:
            raise ValueError(f"strategy {strategy!r} is unknown; choose one of {list(makers)}")
        return makers[strategy]()

    @property
    def is_full(self) -> bool:
        return self.lhs is None

    @property
    def specs(self) -> tuple[OperandSpec, OperandSpec]:
        """Both operands' specs; a product in full has none and raises ValueError."""
        if self.lhs is None or self.rhs is None:
            raise ValueError("a product in full quantizes nothing")
        return self.lhs, self.rhs

    @property
    def strategy(self) -> str:
        """A short name: full, mxfp4, iht, iht+oe(w), ...; the formats where they are not MXFP4.

        What is extracted at random reads iht+random(w).
        """
        if self.lhs is None or self.rhs is None:
            return "full"
        formats = "/".join(dict.fromkeys((self.lhs.format, self.rhs.format)))
        name = "iht" if self.lhs.hadamard else formats
        if self.lhs.hadamard and formats != "mxfp4":
            name += f" {formats}"
        if self.outliers is None:
            return name
        how = {"l2": "oe", "random": "random"}[self.outliers.norm]
        return f"{name}+{how}({self.outliers.tensor})"

    @property
    def is_random(self) -> bool:
        """Whether computing it draws random bits."""
        specs = [spec for spec in (self.lhs, self.rhs) if spec is not None]
        drawn = self.outliers is not None and self.outliers.norm == "random"
        return drawn or any(s.rounding == "stochastic" or s.signs == "random" for s in specs)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """The three products of a layer, and what calibration saw of it.

    Attributes:
      fwd, dgrad, wgrad: the products.
      patterns: what the plan was made from; None for a plan made by hand.
      in_features, out_features: the kernel that it was made for; None fits any.
    """

    fwd: ProductPlan
    dgrad: ProductPlan
    wgrad: ProductPlan
    patterns: Patterns | None = None
    in_features: int | None = None
    out_features: int | None = None

    def __post_init__(self) -> None:
        for product in PRODUCTS:
            _instance(product, self[product], ProductPlan)
            oe = self[product].outliers
            if oe is not None and oe.tensor not in OPERANDS[product]:
                raise ValueError(
                    f"{product}: extracts {oe.tensor!r}, which is no operand of it; "
                    f"choose one of {list(OPERANDS[product])}"
                )

    @classmethod
    def uniform(cls, product: ProductPlan) -> Self:
        """One product plan for all three products."""
        return cls(fwd=product, dgrad=product, wgrad=product)

    def __getitem__(self, product: Product) -> ProductPlan:
        return getattr(self, product)

    @property
    def is_full(self) -> bool:
        return all(self[product].is_full for product in PRODUCTS)

    @property
    def is_random(self) -> bool:
        return any(self[product].is_random for product in PRODUCTS)


def _instance[T](where: str, value: T, kind: type) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"{where} is a {type(value).__name__}; wanted a {kind.__name__}")
    return value


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A `LayerPlan` for every layer of a model, by the layer's module path.

    Attributes:
      layers: (path, plan) pairs, paths as "block_3/attn/query".
      default: the plan of layers that `layers` does not name; None makes them an error.
      level: the strategy table's level that the plan was made by; None for a plan made by hand.
    """

    layers: tuple[tuple[str, LayerPlan], ...] = ()
    default: LayerPlan | None = None
    level: Level | None = None

    def __post_init__(self) -> None:
        if self.default is not None:
            _instance("plan: default", self.default, LayerPlan)
        for path, layer in _instance("plan: layers", self.layers, tuple):
            _instance(f"plan: {path}", layer, LayerPlan)
        paths = self.paths
        twice = sorted({path for path in paths if paths.count(path) > 1})
        if twice:
            raise PlanError(f"plan: layers named twice: {', '.join(twice)}")

    @classmethod
    def full(cls) -> Self:
        """Every product in the layers' `dtype`: `nn.Dense`, bit for bit."""
        return cls.uniform("full")

    @classmethod
    def uniform(cls, strategy: str | ProductPlan) -> Self:
        """One strategy everywhere, whatever the model: "full", "mxfp4", "iht" or a product plan."""
        if isinstance(strategy, str):
            strategy = ProductPlan.named(strategy)
        return cls(default=LayerPlan.uniform(strategy))

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(path for path, _ in self.layers)

    def __getitem__(self, path: str) -> LayerPlan:
        """The plan of the layer at `path`.

        Raises:
          PlanError: the plan neither names the layer nor has a default.
        """
        found = dict(self.layers).get(path, self.default)
        if found is None:
            raise PlanError(
                f"plan: no entry for layer {path!r}; the plan has {len(self.layers)} layers, e.g. "
                f"{', '.join(self.paths[:3]) or 'none'}; calibrate this model, or load its own plan"
            )
        return found

    def __iter__(self) -> Iterator[tuple[str, LayerPlan]]:
        return iter(self.layers)

    def check(self, paths: Iterable[str]) -> None:
        """Compares the plan with a model's layers.

        Args:
          paths: of all the model's layers, e.g. from `adahop_jax.layers`.

        Raises:
          PlanError: naming layers that the plan lacks and entries that no layer uses.
        """
        wanted = list(paths)
        missing = [p for p in wanted if p not in self.paths and self.default is None]
        unused = [p for p in self.paths if p not in wanted]
        if missing or unused:
            raise PlanError(
                "plan: made for another model: "
                + "; ".join(
                    f"{what}: {', '.join(names)}"
                    for what, names in (
                        ("layers without an entry", missing),
                        ("entries that no layer uses", unused),
                    )
                    if names
                )
                + "; calibrate this model, or load its own plan"
            )

    def map_products(self, change: Callable[[Product, ProductPlan], ProductPlan]) -> Self:
        """This plan with every product's plan changed, those of the default too.

        Args:
          change: (product's name, its plan) -> another plan for it.
        """

        def layer(plan: LayerPlan) -> LayerPlan:
            changed: dict[str, Any] = {name: change(name, plan[name]) for name in PRODUCTS}
            return dataclasses.replace(plan, **changed)

        return dataclasses.replace(
            self,
            layers=tuple((path, layer(plan)) for path, plan in self.layers),
            default=None if self.default is None else layer(self.default),
        )

    def with_stochastic_dy(self) -> Self:
        """This plan with dY rounded stochastically in every quantized product."""

        def change(name: Product, plan: ProductPlan) -> ProductPlan:
            if plan.is_full or "dy" not in OPERANDS[name]:
                return plan
            side = ("lhs", "rhs")[OPERANDS[name].index("dy")]
            spec = dataclasses.replace(
                getattr(plan, side), rounding="stochastic", scale_rule="ceil"
            )
            return dataclasses.replace(plan, **{side: spec})

        return self.map_products(change)

    def with_format(self, format: FormatName, *, products: tuple[Product, ...] = ("fwd",)) -> Self:
        """This plan with both operands of its quantized products in another format.

        Args:
          format: a name in `FORMATS`, e.g. "mxfp6".
          products: of which products; those in full stay so.

        Raises:
          ValueError: an unknown format or product.
        """
        unknown = [name for name in products if name not in PRODUCTS]
        if unknown:
            raise ValueError(f"products {unknown} are unknown; choose from {list(PRODUCTS)}")

        def change(name: Product, plan: ProductPlan) -> ProductPlan:
            if plan.lhs is None or plan.rhs is None or name not in products:
                return plan
            lhs, rhs = (dataclasses.replace(spec, format=format) for spec in (plan.lhs, plan.rhs))
            return dataclasses.replace(plan, lhs=lhs, rhs=rhs)

        return self.map_products(change)

    def to_json(self) -> str:
        """The plan as JSON text: versioned, fields that hold their default left out."""
        from adahop_jax import _plan_json

        return _plan_json.to_json(self)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """The plan that `to_json` wrote; raises `PlanError` as `load` does."""
        from adahop_jax import _plan_json

        return _plan_json.from_json(text)

    def save(self, file: str | os.PathLike) -> None:
        """Writes the plan as JSON, whole or not at all; see `Plan.load`.

        Raises:
          PlanError: the file cannot be written.
        """
        from adahop_jax import _plan_json

        _plan_json.save(self, file)

    @classmethod
    def load(cls, file: str | os.PathLike) -> "Plan":
        """Reads a plan that `save` wrote.

        Raises:
          PlanError: the file cannot be read, is no plan, is of another version, or holds a value
            that cannot be; the message says where.
        """
        from adahop_jax import _plan_json

        return _plan_json.load(file)
