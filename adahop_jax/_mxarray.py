"""`MXArray`: packed codes and block scales, with the axis that their blocks run along."""

import dataclasses

import jax
import jax.numpy as jnp

from adahop_jax._dispatch import resolve
from adahop_jax._formats import FORMATS, MXFP4, MXFormat, OperandSpec, Rounding, ScaleRule
from adahop_jax._random import seed_of
from adahop_jax._shapes import negative_axis, restore, two_d
from adahop_jax.reference.quantize import unpack


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MXArray:
    """An array in an MX format; a pytree of two uint8 arrays.

    Invariants:
      - blocks run along `axis`, counted from the end, so that leading dims may be added by `vmap`
        or `scan`;
      - `codes` holds `format.packed_length(length)` bytes along `axis`, a bit stream with the low
        bits first; `scales` holds `format.blocks(length)` E8M0 bytes along `axis`;
      - elements past `length` are padding.

    Attributes:
      codes: uint8, packed.
      scales: uint8, the scale is 2^(byte - 127); 255 marks a block that held a NaN or infinity.
      format: the descriptor.
      axis: negative.
      length: size of `axis` before padding.
    """

    codes: jax.Array
    scales: jax.Array
    format: MXFormat = dataclasses.field(metadata={"static": True})
    axis: int = dataclasses.field(metadata={"static": True})
    length: int = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(self.codes.shape)
        shape[self.axis] = self.length
        return tuple(shape)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.size + self.scales.size

    def unpack(self) -> jax.Array:
        """One code in each uint8, padding included."""
        flat, axis = two_d(self.codes, self.axis)
        return restore(unpack(flat, axis=axis, fmt=self.format), self.codes.shape, self.axis)

    def dequantize(
        self, dtype: jnp.dtype | type = jnp.float32, *, backend: str | None = None
    ) -> jax.Array:
        """The values that the codes and scales stand for, in `shape`.

        Args:
          dtype: of the result; float32 holds every value exactly, bfloat16 every finite one.
          backend: as for `quantize`.

        Returns:
          An array of `dtype`; NaN where a block's scale byte is 255.
        """
        codes, axis = two_d(self.codes, self.axis)
        scales, _ = two_d(self.scales, self.axis)
        values = resolve(backend)[1].dequantize(codes, scales, axis=axis, fmt=self.format)
        values = restore(values, self.codes.shape, self.axis)
        values = jax.lax.slice_in_dim(values, 0, self.length, axis=values.ndim + self.axis)
        return values.astype(dtype)


def quantize(
    x: jax.Array,
    *,
    axis: int = -1,
    format: MXFormat = MXFP4,
    scale_rule: ScaleRule | None = None,
    rounding: Rounding = "nearest",
    key: jax.Array | None = None,
    backend: str | None = None,
) -> MXArray:
    """Rounds `x` to blocks of an MX format along `axis`.

    Each run of 32 values shares a scale 2^e; codes are x / 2^e rounded to the format's elements,
    which for MXFP4 are 0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives.

    Args:
      x: float32, bfloat16 or float16 of any rank above 0.
      axis: the axis that the product contracts; zero-padded inside to whole blocks.
      format: `MXFP4` or `MXFP6`.
      scale_rule: "even" (the default when rounding to nearest): exponent of the largest magnitude
        after adding half a unit of the element's last mantissa place, so that MXFP4 rounds up from
        1.75; "floor": as in OCP MX v1.0; "ceil" (the default when rounding stochastically): the
        least scale at which nothing clips.
      rounding: "nearest", ties to even, or "stochastic".
      key: a JAX random key; required by stochastic rounding, whose bits depend on the key and an
        element's index alone: (row, column) in the view of x that has the leading dims as rows if
        the blocks run along its last axis, else `axis` as rows and the other dims as columns.
      backend: a backend's name, or None for the best here.

    Returns:
      An `MXArray` of x's shape.

    Raises:
      TypeError: x is not of a supported dtype.
      ValueError: axis out of range, an unknown rule, stochastic rounding without a key or with a
        rule that clips.
      NotImplementedError: the named backend does not exist or cannot run here.

    Numerics: subnormal inputs count as zeros; a zero block has scale byte 0; a NaN or infinity
      makes its whole block NaN (scale byte 255); a finite input never becomes infinite, the scale
      being capped where the largest element would overflow float32.
    """
    x = jnp.asarray(x)
    check_dtype("quantize", x.dtype)
    axis = negative_axis("quantize", x, axis)
    if format not in FORMATS.values():
        raise ValueError(
            f"quantize: format {format!r} is unknown; wanted adahop_jax.MXFP4 or adahop_jax.MXFP6"
        )
    if scale_rule is None:
        scale_rule = "ceil" if rounding == "stochastic" else "even"
    spec = OperandSpec(format=format.name, scale_rule=scale_rule, rounding=rounding)
    seed = None
    if rounding == "stochastic":
        if key is None:
            raise ValueError("quantize: rounding='stochastic' needs a random key; pass key=")
        seed = seed_of(key)
    flat, flat_axis = two_d(x, axis)
    codes, scales = resolve(backend)[1].quantize(flat, axis=flat_axis, spec=spec, seed=seed)
    return MXArray(
        codes=restore(codes, x.shape, axis),
        scales=restore(scales, x.shape, axis),
        format=format,
        axis=axis,
        length=x.shape[axis],
    )


def check_dtype(where: str, dtype: jnp.dtype) -> None:
    """Raises TypeError where `dtype` is none that the operations take."""
    if dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise TypeError(
            f"{where}: dtype {dtype} is not supported; cast to float32, bfloat16 or float16"
        )
