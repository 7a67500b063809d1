"""Which path each GPU takes and with which tiles: one table, nothing tuned at run time.

A path is how a product of two MX operands is computed:

  native   packed codes and scales straight into the matrix units (`tl.dot_scaled`)
  fp8      block scales folded into FP8 operands, exact within a window of binades, one reference
           exponent a row, undone in the epilogue: Hopper's FP8 units are twice as fast as its
           BF16 ones
  bf16     operands dequantized to BF16, exact, and XLA's own product

Tiles were measured on the machine that the row names; rows without a measurement say so.
"""

import dataclasses
from typing import Literal

import jax

from triton_kernels.estimate import Rates

Path = Literal["native", "fp8", "bf16"]
PATHS: tuple[Path, ...] = ("native", "fp8", "bf16")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MatmulTile:
    """A tile of the product: rows, columns and depth of a step, and how it is run.

    Attributes:
      m, n, k: the tile.
      warps, stages: Triton's num_warps and num_stages.
      group: tiles of rows that are walked before the next column of tiles, for the cache.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    group: int = 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A kind of GPU.

    Attributes:
      name: its architecture, as JAX gives a device's `compute_capability`: "9.0", "gfx950".
      runs: other architectures that the row serves.
      path: the best path there.
      paths: all that run there.
      target: (backend, arch, warp size) for Triton's compiler.
      large, small: the product's tile where there are enough of them for all processors, and where
        there are not.
      measured: on which GPU tiles and rates were measured; empty if they were not.
      rates: what it was measured to do; None if it was not.
      rotates: whether its tensor cores were measured to rotate faster than a butterfly.
      pallas: the longest sums at which the large products of `pallas_kernels` were measured to be
        faster; 0 if none were.
    """

    name: str
    runs: tuple[str, ...] = ()
    path: Path
    paths: tuple[Path, ...]
    target: tuple[str, int | str, int]
    large: MatmulTile
    small: MatmulTile
    measured: str = ""
    rates: Rates | None = None
    rotates: bool = False
    pallas: int = 0

    @property
    def tma(self) -> bool:
        """Whether it loads tiles by descriptors."""
        return self.target[0] == "cuda" and int(self.target[1]) >= 90

    @property
    def fp8(self) -> bool:
        """Whether it converts to both kinds of FP8."""
        return self.target[1] not in (80, "gfx942")

    @property
    def ptx(self) -> bool:
        """Whether kernels may use NVIDIA's instructions."""
        return self.target[0] == "cuda"


_HOPPER = MatmulTile(m=128, n=256, k=128, warps=8, stages=3)
_HOPPER_SMALL = MatmulTile(m=128, n=128, k=128, warps=8, stages=4)
_MMA = MatmulTile(m=128, n=128, k=64, warps=8, stages=3, group=8)
_BLACKWELL = MatmulTile(m=128, n=128, k=128, warps=4, stages=3, group=8)
_CDNA = MatmulTile(m=128, n=128, k=128, warps=4, stages=2, group=8)

MACHINES = {
    machine.name: machine
    for machine in (
        Machine(
            name="9.0",
            path="fp8",
            paths=("fp8", "bf16"),
            target=("cuda", 90, 32),
            large=_HOPPER,
            small=_HOPPER_SMALL,
            measured="NVIDIA H200",
            rotates=True,
            pallas=4096,
            rates=Rates(
                bf16=810e12, fp8=1520e12, quantize=3.0e12, fold=3.8e12, read=3.5e12, kernel=2e-6
            ),
        ),
        Machine(
            name="10.0",
            runs=("10.3",),
            path="native",
            paths=("native", "bf16"),
            target=("cuda", 100, 32),
            large=_BLACKWELL,
            small=_BLACKWELL,
        ),
        Machine(
            name="8.9",
            path="fp8",
            paths=("fp8", "bf16"),
            target=("cuda", 89, 32),
            large=_MMA,
            small=_MMA,
        ),
        # It loads by descriptors, and those made on the device would need scratch memory.
        Machine(
            name="12.0",
            path="fp8",
            paths=("fp8", "bf16"),
            target=("cuda", 120, 32),
            large=_MMA,
            small=_MMA,
        ),
        # Triton 3.7 knows no FP8 instruction of 12.1.
        Machine(
            name="8.0",
            runs=("8.6", "8.7", "12.1"),
            path="bf16",
            paths=("bf16",),
            target=("cuda", 80, 32),
            large=_MMA,
            small=_MMA,
        ),
        Machine(
            name="gfx950",
            path="native",
            paths=("native", "bf16"),
            target=("hip", "gfx950", 64),
            large=_CDNA,
            small=_CDNA,
        ),
        Machine(
            name="gfx942",
            runs=("gfx90a",),
            path="bf16",
            paths=("bf16",),
            target=("hip", "gfx942", 64),
            large=_CDNA,
            small=_CDNA,
        ),
    )
}


def machine_of(device: jax.Device) -> Machine | None:
    """The row that serves a GPU; None if none does."""
    # ROCm appends features, as in gfx950:sramecc+.
    name = str(getattr(device, "compute_capability", "")).partition(":")[0]
    return next((m for m in MACHINES.values() if name == m.name or name in m.runs), None)


def path_for(device: jax.Device, path: str | None) -> tuple[str, str]:
    """The path that a GPU takes, and why it cannot take the one asked for, if it cannot.

    Args:
      device: a GPU.
      path: its name, or None for the best there.

    Returns:
      The path and a refusal, one of them empty.
    """
    machine = machine_of(device)
    if machine is None:
        found = getattr(device, "compute_capability", "unknown")
        served = ", ".join(name for m in MACHINES.values() for name in (m.name, *m.runs))
        return "", f"its architecture is {found}, and the kernels serve {served}"
    if path is None:
        return machine.path, ""
    if path not in machine.paths:
        return "", f"architecture {machine.name} has no path {path!r}, only {machine.paths}"
    return path, ""
