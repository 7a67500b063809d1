"""The shapes that benchmarks and GPU tests share: one registry."""

import dataclasses
from pathlib import Path

PLAN = Path(__file__).parent / "plan.json"
"""What level-1 calibration gave for the linears of `PROJECTIONS`; `make_plan` makes it."""

TOKENS = 16_384
"""Of a step of the layer benchmark."""

SQUARE = 8192
"""Side of the single product, and of the tensor that each kernel is timed on."""

MICRO_BATCHES = 4
"""Micro-batches that share one quantized W, where it is said so."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """A projection of a Llama block: the linears that have its shape.

    Attributes:
      width: of the model.
      linears: their names in a block.
      in_features, out_features: of the kernel.
    """

    width: int
    linears: tuple[str, ...]
    in_features: int
    out_features: int

    @property
    def name(self) -> str:
        """Its dims."""
        return f"{self.in_features}x{self.out_features}"

    def path(self, linear: str) -> str:
        """The path of one of its linears in `plan.json`."""
        return f"d{self.width}/{linear}"


def _llama(width: int, key_value: int, hidden: int) -> tuple[Projection, ...]:
    sizes = {
        ("query", "out"): (width, width),
        ("key", "value"): (width, key_value),
        ("gate", "up"): (width, hidden),
        ("down",): (hidden, width),
    }
    return tuple(
        Projection(width=width, linears=linears, in_features=i, out_features=o)
        for linears, (i, o) in sizes.items()
    )


PROJECTIONS = (
    *_llama(width=4096, key_value=1024, hidden=14_336),
    *_llama(width=2048, key_value=512, hidden=8192),
)

SWEEP = tuple((tokens, d) for d in (512, 1024, 2048, 4096) for tokens in (512, 2048, 8192, 16_384))
"""(tokens, d) of square layers, to find where MXFP4 starts to pay."""

GATE = (768, 512, 1024)
"""(tokens, in, out) at which results are compared before anything is timed."""

AWKWARD = ((32, 32), (95, 4128), (130, 161), (257, 1024), (2880, 129))
"""(rows, columns) at which the kernels' edges lie: no whole tiles, odd strides, several passes."""
