"""The floor of what is timed: bytes and operations of every kernel, at rates measured in the run.

A kernel takes at least as long as a device copy of the bytes that it has to read and write, and as
long as its operations take at the full rate of their unit. Every kernel reads each of its operands
once and writes its results once. A tensor is quantized in one read for the products that take it in
the same pass: X for fwd and wgrad, dY for dgrad and wgrad; W enters one in each pass.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Literal

import adahop_jax as ah
from adahop_jax._formats import FORMATS
from adahop_jax._plan import CONTRACT, OPERANDS, PRODUCTS, Product, ProductPlan, Tensor

Unit = Literal["fp8", "bf16"]

WRITTEN = {"folded": 1.0} | {name: fmt.stored_bits / 8 for name, fmt in FORMATS.items()}
"""Bytes that a quantizer writes for an element: FP8, or codes of a format with their scales."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What the machine was seen to reach.

    Attributes:
      copy: bytes a second, read and written together.
      fp8, bf16: operations a second, a multiply-add being two.
    """

    copy: float
    fp8: float
    bf16: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a kernel has to do.

    Attributes:
      name: of the kernel.
      bytes: read and written.
      operations: of the matrix units.
      unit: which of them.
    """

    name: str
    bytes: float
    operations: float = 0.0
    unit: Unit = "fp8"

    def seconds(self, rates: Rates) -> float:
        """The least time that it takes."""
        return max(self.bytes / rates.copy, self.operations / getattr(rates, self.unit))


def total(works: Iterable[Work], rates: Rates) -> float:
    """The least time that kernels take one after the other."""
    return sum(work.seconds(rates) for work in works)


def quantizer(name: str, elements: int, *written: str) -> Work:
    """Reads BF16 and writes what `WRITTEN` names, for one view or several."""
    return Work(name=name, bytes=elements * (2 + sum(WRITTEN[view] for view in written)))


def fold(name: str, elements: int, fmt: str) -> Work:
    """Reads codes and scales of a format, writes FP8."""
    return Work(name=name, bytes=elements * (WRITTEN[fmt] + 1))


def product(name: str, m: int, n: int, k: int, *, unit: Unit = "fp8", out_bytes: int = 2) -> Work:
    """(m, k) times (k, n)."""
    size = 1 if unit == "fp8" else 2
    moved = size * (m * k + n * k) + out_bytes * m * n
    return Work(name=name, bytes=moved, operations=2 * m * n * k, unit=unit)


def layer(
    plan: ah.LayerPlan, *, tokens: int, in_features: int, out_features: int
) -> tuple[Work, ...]:
    """A step of a layer in BF16 under `plan`: fwd, X as it is kept, dgrad and wgrad."""
    sizes = {"tokens": tokens, "in": in_features, "out": out_features}
    works: list[Work] = []
    for tensor, names in READS:
        quantized = [name for name in names if not plan[name].is_full]
        if quantized:
            views = (
                plan[name].specs[0].format if (tensor, name) == STORED else "folded"
                for name in quantized
            )
            elements = math.prod(sizes[dim] for dim in DIMS[tensor])
            label = f"{', '.join(quantized)}: quantize {tensor}"
            works.append(quantizer(label, elements, *views))
    for name in PRODUCTS:
        works += _planned(name, plan[name], sizes)
    return tuple(works)


READS: tuple[tuple[Tensor, tuple[Product, ...]], ...] = (
    ("x", ("fwd", "wgrad")),
    ("w", ("fwd",)),
    ("w", ("dgrad",)),
    ("dy", ("dgrad", "wgrad")),
)
STORED = "x", "wgrad"
DIMS: dict[Tensor, tuple[str, str]] = {
    "x": ("tokens", "in"),
    "w": ("in", "out"),
    "dy": ("tokens", "out"),
}


def _planned(name: Product, plan: ProductPlan, sizes: dict[str, int]) -> list[Work]:
    tensors, axes = OPERANDS[name], CONTRACT[name]
    length = sizes[DIMS[tensors[0]][axes[0]]]
    m, n = (sizes[DIMS[t][1 - axis]] for t, axis in zip(tensors, axes, strict=True))
    if plan.is_full:
        return [product(name, m, n, length, unit="bf16")]
    works = [product(f"{name}: product", m, n, length)]
    if name == "wgrad":
        works.append(fold("wgrad: fold x", m * length, plan.specs[0].format))
    if plan.outliers is not None:
        works.append(_side(name, plan, m, n, length))
    return works


def _side(name: Product, plan: ProductPlan, m: int, n: int, length: int) -> Work:
    """The side product: k rows or columns times the whole other operand, once more from memory.

    They are chosen by norms over whole rows, so it cannot share the other operand's first read.
    """
    assert plan.outliers is not None
    left = plan.outliers.tensor == OPERANDS[name][0]
    k, other = plan.outliers.count(m if left else n), n if left else m
    # In wgrad, dY's columns meet X as it is kept.
    size = WRITTEN[plan.specs[0].format] if name == "wgrad" and not left else 2
    moved = other * length * size + 2 * k * length + 2 * k * other
    return Work(
        name=f"{name}: side product of {plan.outliers.tensor}",
        bytes=moved,
        operations=2 * k * other * length,
        unit="bf16",
    )
