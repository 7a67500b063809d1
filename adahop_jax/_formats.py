"""Microscaling (MX) formats as data, and how an operand of a product is brought into one.

An MX array holds blocks of `block_size` elements that share one E8M0 scale 2^(byte - 127); byte 255
marks a block that held a NaN or an infinity. Source: OCP Microscaling Formats (MX) v1.0.
"""

import dataclasses
import math
from collections.abc import Collection
from typing import Literal, get_args

ScaleRule = Literal["even", "floor", "ceil"]
Rounding = Literal["nearest", "stochastic"]
FormatName = Literal["mxfp4", "mxfp6"]

SCALE_BIAS = 127
SCALE_NAN = 255
F32_MANTISSA_BITS = 23
F32_MAX_EXPONENT = 127


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MXFormat:
    """A block format: small floats without infinities or NaN, and one power-of-two scale a block.

    Attributes:
      name: how plans and files call it.
      exponent_bits: width of an element's exponent field.
      mantissa_bits: width of an element's stored mantissa.
      exponent_bias: an element with exponent field E > 0 is 2^(E - bias) * 1.mantissa.
      block_size: elements that share a scale.
    """

    name: FormatName
    exponent_bits: int
    mantissa_bits: int
    exponent_bias: int
    block_size: int = 32

    @property
    def element_bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def stored_bits(self) -> float:
        """Of an element with its share of a block's scale, as packed codes and scales take them."""
        return self.element_bits + 8 / self.block_size

    @property
    def magnitude_bits(self) -> int:
        """Bits of a code below its sign bit."""
        return self.exponent_bits + self.mantissa_bits

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal element."""
        return 1 - self.exponent_bias

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest element."""
        return (1 << self.exponent_bits) - 1 - self.exponent_bias

    @property
    def max_code(self) -> int:
        """Code of the largest positive element."""
        return (1 << self.magnitude_bits) - 1

    @property
    def max_value(self) -> float:
        return 2.0**self.max_exponent * (2.0 - 2.0**-self.mantissa_bits)

    @property
    def max_scale_exponent(self) -> int:
        """The largest scale exponent at which the largest element is still a finite float32."""
        return F32_MAX_EXPONENT - self.max_exponent

    @property
    def pack_group(self) -> int:
        """The fewest codes that fill whole bytes."""
        return 8 // math.gcd(8, self.element_bits)

    @property
    def pack_bytes(self) -> int:
        """Bytes that `pack_group` codes fill."""
        return self.pack_group * self.element_bits // 8

    def packed_length(self, length: int) -> int:
        """Bytes along the block axis for `length` elements, which are padded to whole blocks."""
        return self.blocks(length) * self.block_size // self.pack_group * self.pack_bytes

    def blocks(self, length: int) -> int:
        """Blocks, and so scale bytes, along the block axis for `length` elements."""
        return -(-length // self.block_size)


MXFP4 = MXFormat(name="mxfp4", exponent_bits=2, mantissa_bits=1, exponent_bias=1)
"""E2M1: 0, .5, 1, 1.5, 2, 3, 4, 6."""

MXFP6 = MXFormat(name="mxfp6", exponent_bits=2, mantissa_bits=3, exponent_bias=1)
"""E2M3: the same range up to 7.5, with steps a quarter as wide."""

FORMATS: dict[FormatName, MXFormat] = {"mxfp4": MXFP4, "mxfp6": MXFP6}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OperandSpec:
    """How one operand of a product is quantized along the dim that the product contracts.

    The operand is multiplied by `pre_scale`, its blocks of `hadamard` elements are multiplied by
    the +-1 Sylvester matrix (after random signs, if asked for), and the result is rounded to
    `format`. The product undoes what both operands share.

    Attributes:
      format: a name in `FORMATS`.
      scale_rule: how a block's scale follows from its largest magnitude; "ceil" with stochastic
        rounding, so that nothing clips and the mean is right.
      rounding: to nearest, ties to even, or stochastic.
      pre_scale: factor before quantization, divided out of the product.
      hadamard: size of the Hadamard blocks, a power of two; 0 rotates nothing.
      signs: "random" flips signs before the transform, the same way for both operands.

    Raises:
      ValueError: a value outside these, or a combination that cannot be.
    """

    format: FormatName = "mxfp4"
    scale_rule: ScaleRule = "even"
    rounding: Rounding = "nearest"
    pre_scale: float = 1.0
    hadamard: int = 0
    signs: Literal["none", "random"] = "none"

    def __post_init__(self) -> None:
        _one_of("format", self.format, FORMATS)
        _one_of("scale_rule", self.scale_rule, get_args(ScaleRule))
        _one_of("rounding", self.rounding, get_args(Rounding))
        _one_of("signs", self.signs, ("none", "random"))
        if self.rounding == "stochastic" and self.scale_rule != "ceil":
            raise ValueError(
                f"scale_rule {self.scale_rule!r} clips, which biases stochastic rounding; "
                "use scale_rule='ceil' with rounding='stochastic'"
            )
        real = isinstance(self.pre_scale, int | float) and not isinstance(self.pre_scale, bool)
        if not (real and 2.0**-64 <= self.pre_scale <= 2.0**64):
            raise ValueError(f"pre_scale must be between 2^-64 and 2^64, got {self.pre_scale!r}")
        size = self.hadamard
        if not is_integer(size) or (size and (not 2 <= size <= 1024 or size & (size - 1))):
            raise ValueError(f"hadamard must be 0 or a power of two up to 1024, got {size!r}")
        if self.signs == "random" and not size:
            raise ValueError("signs='random' needs a transform; set hadamard, e.g. to 32")

    @property
    def mx(self) -> MXFormat:
        """The descriptor that `format` names."""
        return FORMATS[self.format]

    def padded_length(self, length: int) -> int:
        """Elements along the contracted dim after padding to whole blocks of both kinds."""
        whole = max(self.mx.block_size, self.hadamard)
        return -(-length // whole) * whole


def is_integer(value: object) -> bool:
    """Whether a value is a Python int and no bool, which Python counts among them."""
    return isinstance(value, int) and not isinstance(value, bool)


def _one_of(field: str, value: object, allowed: Collection[object]) -> None:
    if value not in list(allowed):
        names = ", ".join(repr(name) for name in allowed)
        raise ValueError(f"{field} {value!r} is unknown; choose one of {names}")
