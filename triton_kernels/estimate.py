"""What a planned product is expected to take against the same product in BF16.

A sum of bytes and operations over measured rates: good to some ten percent, enough to see where
quantizing does not pay. Nothing is decided by it.
"""

import dataclasses

from adahop_jax._formats import MXFormat


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a GPU was measured to do.

    Attributes:
      bf16, fp8: operations a second of its large products.
      quantize, fold: bytes a second that the kernels move, read and written.
      read: bytes a second of a side product, which is as fast as its large operand is read.
      kernel: seconds that a kernel takes to start and to drain.
    """

    bf16: float
    fp8: float
    quantize: float
    fold: float
    read: float
    kernel: float


def speedup(
    rates: Rates,
    *,
    rows: int,
    columns: int,
    length: int,
    stored: MXFormat | None,
    extracted: str | None,
) -> float:
    """Time in BF16 over time as planned, quantization included.

    Args:
      rates: of the GPU.
      rows, columns: of the result.
      length: of the contracted axis.
      stored: the format that the left operand was packed in by the forward pass, to be loaded here;
        None if it is quantized for this product alone.
      extracted: "lhs" or "rhs" if rows or columns are extracted, or None.
    """
    operations = 2 * rows * columns * length
    bf16 = rates.kernel + operations / rates.bf16
    left, right = rows * length, columns * length
    # Of X and dY, one read serves two products. What is stored is written as codes and scales, and
    # read again to become FP8.
    if stored is not None:
        packed = stored.stored_bits / 8
        quantized = (1 + packed) * left + 2 * right
        planned = operations / rates.fp8 + (1 + packed) * left / rates.fold
    else:
        quantized = 2 * left + 3 * right
        planned = operations / rates.fp8
    planned += quantized / rates.quantize
    kernels = 6
    if extracted is not None:
        # The side product reads the other operand; then selection, gathering and overwriting.
        planned += 2 * (right if extracted == "lhs" else left) / rates.read
        kernels += 7
    return bf16 / (planned + kernels * rates.kernel)
