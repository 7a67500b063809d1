"""Fused transform and quantization, along the last axis, the first, or both: MX blocks in a row.

A view has the contracted axis last. Its tiles are loaded as they lie in x; along the first axis
they are transposed as they are read from shared memory. Each thread has one row of a view's tile,
and takes its blocks one after the other: `_blocks` says what happens to them. Where both views are
asked for, each tile of x is loaded once for both.

A folded view divides its rows by reference exponents, which no thread can know that has not seen
all of a row. They are guessed, from a few values: FP8 spans so many binades that the guess nearly
always serves. Beside the data, the extremes of all scales are written down. A second kernel looks
through them: rows that did not fit, or hold values near the ends of float32's range, are done
again, carefully, and with the exponents that are known by then.

Lowered by Mosaic GPU: TMA loads and stores tiles, and layouts say which thread has what, so that
nothing moves between threads unasked. Tiles are whole: what is not is padded beforehand.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from adahop_jax._formats import SCALE_BIAS, SCALE_NAN, OperandSpec
from adahop_jax._view import BLOCK, FOLDS, Request, View, block_signs
from adahop_jax.reference import bits as b
from adahop_jax.reference.operations import rotate as rotate_beforehand
from adahop_jax.reference.operations import squared_norms
from pallas_kernels import _warpgroup as wg
from pallas_kernels._blocks import (
    block_scales,
    encode_elements,
    packed,
    rotate,
    round_elements,
    uniform,
)
from pallas_kernels._launch import launch

TILE = wg.THREADS
"""Rows and columns of x that a program works on."""
BLOCKS = TILE // BLOCK
"""In a row of a tile."""
CHUNK = 2
"""Blocks of a row that are stored at a time."""
SAMPLES = 8
"""Values of a row that its reference exponent is guessed from."""
TRUSTED = -60, 60
"""Scale exponents between which nothing needs care."""
UNSEEN = 127, -127
"""Least and largest scale exponent of a row of zeros."""
AT_ONCE = 32
"""Tiles whose extremes are looked at together."""
SHARES = 4
"""Programs among which a row of tiles is divided that may have to be done again."""


class Extremes(NamedTuple):
    """Least and largest scale exponents of a view's rows, one of each for every tile in a row.

    Attributes:
      least, largest: int32 (tiles, rows), over blocks that are neither zeros nor faults.
    """

    least: jax.Array
    largest: jax.Array


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """What the kernels know of a view while they are compiled.

    Attributes:
      axis: of x that is contracted.
      folded: whether FP8 is written, not codes.
      spec: how blocks are quantized.
      norms: whether squared norms of the rows are written too.
      careful: see `_blocks`.
    """

    axis: int
    folded: bool
    spec: OperandSpec
    norms: bool
    careful: bool

    @property
    def dtype(self) -> Any:
        """Of the data."""
        return FOLDS[self.spec.format].dtype if self.folded else jnp.uint8

    def width(self, length: int) -> int:
        """Bytes of data in so much of a row."""
        return length if self.folded else self.spec.mx.packed_length(length)

    def place(self, rows: Any, steps: Any) -> tuple[Any, Any]:
        """The index into x of a view's rows and steps along them."""
        return (rows, steps) if self.axis else (steps, rows)


class Inputs(NamedTuple):
    """What a view is made from, besides x; None where it is not needed.

    Attributes:
      refs: int32 (rows,), reference exponents that were guessed beforehand.
      signs: float32 (32,).
      seed: uint32 (2,).
    """

    refs: Any
    signs: Any
    seed: Any


class Results(NamedTuple):
    """What is written of a view, of whole tiles; None where it is not.

    Attributes:
      data: FP8 (rows, length), or uint8 (rows, bytes).
      refs: uint8 (rows,), reference exponents + 127, if folded.
      scales: int32 (rows, tiles), the E8M0 bytes of a tile's blocks, unless folded.
      extremes: of scales.
      norms: float32 (rows,), squared; before they are settled (tiles, rows), of parts of rows.
    """

    data: Any
    refs: Any
    scales: Any
    extremes: Any
    norms: Any


class Scratch(NamedTuple):
    """What a block has to itself.

    Attributes:
      x: a tile.
      data: for each view, what is written of it, by chunks.
      arrived: a barrier for x.
    """

    x: Any
    data: tuple[Any, ...]
    arrived: Any


def _quantize_kernel(
    inputs: tuple[Any, tuple[Inputs, ...]],
    results: tuple[Results, ...],
    scratch: Scratch,
    *,
    cuts: tuple[Cut, ...],
) -> None:
    """A block: one tile of x, for every view."""
    x, given = inputs
    corner = lax.axis_index("down"), lax.axis_index("across")
    views = [
        (cut, corner[1 - cut.axis], corner[cut.axis], *of_view)
        for cut, *of_view in zip(cuts, given, results, scratch.data, strict=True)
    ]
    _load(x, scratch, *corner)
    refs = [_ref(x, tile, of_view, cut) for cut, tile, _, of_view, *_ in views]
    plgpu.barrier_wait(scratch.arrived)
    for ref, (cut, tile, nth, of_view, written, data) in zip(refs, views, strict=True):
        _quantize(scratch.x, of_view, ref, written, data, tile, nth, cut)
        if ref is not None:
            rows, octets = pl.ds(tile * TILE, TILE), (ref + SCALE_BIAS).astype(jnp.uint8)

            @pl.when(nth == 0)
            def _store(refs: Any = written.refs.at[rows], octets: jax.Array = octets) -> None:
                refs[...] = octets

    plgpu.wait_smem_to_gmem(0)


def _ref(x: Any, tile: Any, given: Inputs, cut: Cut) -> jax.Array | None:
    """A row of tiles' reference exponents for now, int32 (THREADS,); None where codes are asked."""
    if not cut.folded:
        return None
    if given.refs is None:
        return _guess(x, tile, cut)
    return wg.load_each(given.refs.at[pl.ds(tile * TILE, TILE)])


def _guess_kernel(x: Any, refs: Any, scratch: tuple[()], *, cut: Cut) -> None:
    """A block: reference exponents of a row of a view's tiles, once for all tiles."""
    tile = lax.axis_index("tile")
    refs.at[pl.ds(tile * TILE, TILE)][...] = _guess(x, tile, cut)


def _settle_kernel(
    inputs: tuple[Any, Inputs, Results], results: Results, scratch: Scratch, *, cut: Cut
) -> None:
    """A block: a share of a row of a view's tiles, if any of its rows has to be done again."""
    x, given, before = inputs
    tile, share = lax.axis_index("tile"), lax.axis_index("share")
    tiles = x.shape[cut.axis] // TILE
    rows = pl.ds(tile * TILE, TILE)

    def look(i: Any, seen: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        least, largest, norm = seen
        for j in range(AT_ONCE):
            nth = i * AT_ONCE + j
            known = jnp.minimum(nth, tiles - 1), rows
            least = jnp.minimum(least, wg.load_each(before.extremes.least.at[known]))
            largest = jnp.maximum(largest, wg.load_each(before.extremes.largest.at[known]))
            if before.norms is not None:
                part = wg.load_each(before.norms.at[known])
                left = lax.broadcast_in_dim(tiles - nth, norm.shape, [])
                norm = norm + jnp.where(left > 0, part, 0.0)
        return least, largest, norm

    start = wg.each(UNSEEN[0]), wg.each(UNSEEN[1]), wg.each(0.0)
    least, largest, norm = lax.fori_loop(0, pl.cdiv(tiles, AT_ONCE), look, start)
    fits = (least >= TRUSTED[0]) & (largest <= TRUSTED[1])
    ref = None
    if cut.folded:
        fold = FOLDS[cut.spec.format]
        ref = wg.load_each(before.refs.at[rows]).astype(jnp.int32) - SCALE_BIAS
        fits &= (least >= ref + fold.low) & (largest <= ref + fold.top)
        ref = jnp.where(fits, ref, jnp.maximum(largest - fold.top, -SCALE_BIAS))

    @pl.when(share == 0)
    def _store() -> None:
        if ref is not None:
            results.refs.at[rows][...] = (ref + SCALE_BIAS).astype(jnp.uint8)
        if before.norms is not None:
            results.norms.at[rows][...] = norm

    @pl.when(jnp.max(jnp.where(fits, 0, 1)) > 0)
    def _again() -> None:
        def redo(i: Any, _: None) -> None:
            nth = i * SHARES + share
            corner = (tile, nth) if cut.axis else (nth, tile)
            _load(x, scratch, *corner)
            plgpu.barrier_wait(scratch.arrived)
            _quantize(scratch.x, given, ref, results, scratch.data[0], tile, nth, cut)
            plgpu.wait_smem_to_gmem(0)

        lax.fori_loop(0, lax.div(tiles - share + SHARES - 1, SHARES), redo, None)


def _load(x: Any, scratch: Scratch, down: Any, across: Any) -> None:
    """Starts to load a tile."""
    place = pl.ds(down * TILE, TILE), pl.ds(across * TILE, TILE)
    plgpu.copy_gmem_to_smem(x.at[place], scratch.x, scratch.arrived)


def _guess(x: Any, tile: Any, cut: Cut) -> jax.Array:
    """Reference exponents, int32 (THREADS,), from a few values of each of a view's rows.

    Padding lies at an end, and sequences begin at even parts of the tokens: the values lie between.
    A row of which only zeros are seen is taken for the largest of the tile's.
    """
    length, fold, spec = x.shape[cut.axis], FOLDS[cut.spec.format], cut.spec
    first, stride = 3 * length // (8 * SAMPLES), length // SAMPLES
    largest = wg.each(0)
    for i in range(SAMPLES):
        some = wg.load_each(x.at[cut.place(pl.ds(tile * TILE, TILE), first + i * stride)])
        largest = jnp.maximum(largest, b.to_bits(some) & b.MAGNITUDE)
    of_all = jnp.max(jnp.where(largest < b.INFINITY, largest, 0))
    largest = jnp.where(largest == 0, of_all, largest)
    # A rotated block's largest value is some four times its values' usual size.
    growth = round(math.log2(spec.pre_scale)) + (2 if spec.hadamard else 0)
    expected = b.exponent(largest) - spec.mx.max_exponent + growth
    return jnp.minimum(jnp.maximum(expected, TRUSTED[0] - fold.low), TRUSTED[1] - fold.top)


def _quantize(
    x: Any,
    given: Inputs,
    ref: jax.Array | None,
    written: Results,
    stored: Any,
    tile: Any,
    nth: Any,
    cut: Cut,
) -> None:
    """Quantizes and stores the `nth` tile in the `tile`-th row of a view's tiles."""
    rows = pl.ds(tile * TILE, TILE)
    signs = None if given.signs is None else wg.load_all(given.signs)

    def chunk(i: Any, seen: tuple[Any, ...]) -> tuple[Any, ...]:
        least, largest, norm, octets = seen
        steps = pl.ds(i * (CHUNK * BLOCK), CHUNK * BLOCK)
        values = (wg.load_rows if cut.axis else wg.load_columns)(
            x.at[cut.place(slice(None), steps)]
        )
        data = []
        for j in range(CHUNK):
            place = i * CHUNK + j
            block = values[:, j * BLOCK : (j + 1) * BLOCK].astype(jnp.float32)
            norm = norm + jnp.sum(block * block, axis=1) if cut.norms else norm
            noise = _noise(given, tile * TILE, nth * TILE + place * BLOCK, cut)
            y = rotate(block, cut.spec, signs, careful=cut.careful, signed_zeros=not cut.folded)
            scale, top = block_scales(y, cut.spec)
            # Zeros and faults fit everywhere.
            counts = (top > 0) & (top < b.INFINITY)
            least = jnp.minimum(least, jnp.where(counts, scale, UNSEEN[0]))
            largest = jnp.maximum(largest, jnp.where(counts, scale, UNSEEN[1]))
            if ref is not None:
                r = round_elements(y, scale, top, ref, noise, cut.spec, careful=cut.careful)
                data.append(wg.in_vectors(r).astype(cut.dtype))
            else:
                code = encode_elements(y, scale, top, noise, cut.spec, careful=cut.careful)
                data.append(wg.in_vectors(packed(code, cut.spec.mx)))
                octet = jnp.where(top < b.INFINITY, scale + SCALE_BIAS, SCALE_NAN)
                octets = octets | (octet << (8 * place))
        stored.at[i][...] = wg.beside(data)
        plgpu.commit_smem()
        width = cut.width(CHUNK * BLOCK)
        place = pl.ds((nth * (BLOCKS // CHUNK) + i) * width, width)
        plgpu.copy_smem_to_gmem(stored.at[i], written.data.at[rows, place])
        return least, largest, norm, octets

    start = wg.each(UNSEEN[0]), wg.each(UNSEEN[1]), wg.each(0.0), wg.each(0)
    least, largest, norm, octets = lax.fori_loop(0, BLOCKS // CHUNK, chunk, start)
    if not cut.folded:
        written.scales.at[rows, nth][...] = octets
    if not cut.careful:
        written.extremes.least.at[nth, rows][...] = least
        written.extremes.largest.at[nth, rows][...] = largest
    if cut.norms:
        written.norms.at[nth, rows][...] = norm


def _noise(given: Inputs, row: Any, step: Any, cut: Cut) -> jax.Array | None:
    """Noise for a block in each of a view's rows from `row` on; None where it is not wanted.

    It belongs to places in x, where four neighbours in a row share a draw. Along the first axis
    these are four threads', each of which draws anew.
    """
    if given.seed is None:
        return None
    if cut.axis:
        thread, i = wg.iota(BLOCK // 4, 0), wg.iota(BLOCK // 4, 1)
        return wg.interleaved(uniform(row + thread, step // 4 + i, given.seed))
    thread, i = wg.iota(BLOCK, 0), wg.iota(BLOCK, 1)
    first, second, third, fourth = uniform(step + i, (row + thread) // 4, given.seed)
    half = jnp.where(thread % 2 == 0, first, second), jnp.where(thread % 2 == 0, third, fourth)
    return jnp.where(thread % 4 < 2, *half)


def quantize(x: jax.Array, *wanted: tuple[int, Request]) -> list[View]:
    """Rotates and quantizes along one axis, or along both in one read.

    Reads 2 bytes an element of BF16; for every view it writes 1 as FP8, or 1/2 as packed MXFP4 and
    1/32 of scales, and 1/16 of extremes.

    Args:
      x: (rows, columns) float32, bfloat16 or float16, not empty.
      wanted: the views: the axis that is contracted and how the view is asked for, folded or as
        codes; two of different axes, or one.

    Returns:
      The views.

    Raises:
      ValueError: a seed is missing.
    """
    if any(request.spec.hadamard > BLOCK for _, request in wanted):
        if len(wanted) > 1:
            return [view for w in wanted for view in quantize(x, w)]
        return [_large(x, *wanted[0])]
    shape = x.shape
    x = wg.whole(x)
    cuts, given = zip(*(_asked(x, axis, request) for axis, request in wanted), strict=True)
    results = launch(
        functools.partial(_quantize_kernel, cuts=cuts),
        (x, given),
        tuple(_memory(x.shape, cut) for cut in cuts),
        grid=(x.shape[0] // TILE, x.shape[1] // TILE),
        grid_names=("down", "across"),
        scratch=_scratch(x, *cuts),
    )
    return [
        _view(_settled(x, cut, *of_view), cut, shape)
        for cut, *of_view in zip(cuts, given, results, strict=True)
    ]


def _large(x: jax.Array, axis: int, request: Request) -> View:
    """A view whose transform is larger than a block, and is done beforehand in plain JAX."""
    spec = request.spec
    y = rotate_beforehand(x, axis=axis, spec=spec, sign_seed=request.sign_seed)
    left = dataclasses.replace(spec, hadamard=0, signs="none", pre_scale=1.0)
    (view,) = quantize(y, (axis, request._replace(spec=left, norms=False)))
    return view._replace(norms=squared_norms(x, axis=axis)) if request.norms else view


def _asked(x: jax.Array, axis: int, request: Request) -> tuple[Cut, Inputs]:
    """What the kernel does for a view, and what it needs besides x."""
    kind, spec, seed, sign_seed, norms = request
    if spec.rounding == "stochastic" and seed is None:
        raise ValueError("stochastic rounding needs a seed; pass a uint32[2]")
    signs = block_signs(spec, sign_seed, count=BLOCK) if spec.signs == "random" else None
    cut = Cut(axis=axis, folded=kind == "folded", spec=spec, norms=norms, careful=False)
    refs = None
    if cut.folded and axis:
        # A row's values lie far apart, too far to load them for every tile.
        refs = launch(
            functools.partial(_guess_kernel, cut=cut),
            x,
            jax.ShapeDtypeStruct(x.shape[:1], jnp.int32),
            grid=(x.shape[0] // TILE,),
            grid_names=("tile",),
            scratch=(),
        )
    return cut, Inputs(refs, signs, seed if spec.rounding == "stochastic" else None)


def _memory(shape: tuple[int, ...], cut: Cut) -> Results:
    """Shapes and dtypes of what is written, for x of whole tiles."""
    rows, tiles = shape[1 - cut.axis], shape[cut.axis] // TILE
    each = jax.ShapeDtypeStruct((tiles, rows), jnp.int32)
    return Results(
        data=jax.ShapeDtypeStruct((rows, tiles * cut.width(TILE)), cut.dtype),
        refs=jax.ShapeDtypeStruct((rows,), jnp.uint8) if cut.folded else None,
        scales=None if cut.folded else jax.ShapeDtypeStruct((rows, tiles), jnp.int32),
        extremes=Extremes(each, each),
        norms=jax.ShapeDtypeStruct(each.shape, jnp.float32) if cut.norms else None,
    )


def _scratch(x: jax.Array, *cuts: Cut) -> Scratch:
    chunks, steps = BLOCKS // CHUNK, CHUNK * BLOCK
    return Scratch(
        wg.shared((TILE, TILE), x.dtype),
        tuple(wg.shared((chunks, TILE, cut.width(steps)), cut.dtype) for cut in cuts),
        plgpu.Barrier(),
    )


def _settled(x: jax.Array, cut: Cut, given: Inputs, results: Results) -> Results:
    """A view in which rows that did not fit are done again."""
    careful = dataclasses.replace(cut, careful=True, norms=False)
    refs, norms = _memory(x.shape, cut).refs, None
    if cut.norms:
        norms = jax.ShapeDtypeStruct(results.norms.shape[1:], jnp.float32)
    return launch(
        functools.partial(_settle_kernel, cut=careful),
        (x, given, results._replace(data=None, scales=None)),
        results._replace(refs=refs, extremes=None, norms=norms),
        grid=(x.shape[1 - cut.axis] // TILE, SHARES),
        grid_names=("tile", "share"),
        scratch=_scratch(x, careful),
    )


def _view(results: Results, cut: Cut, shape: tuple[int, ...]) -> View:
    """What callers see of it, who passed x of that shape."""
    rows, length = shape[1 - cut.axis], cut.spec.padded_length(shape[cut.axis])
    scales = None
    if not cut.folded:
        octets = lax.bitcast_convert_type(results.scales, jnp.uint8)
        scales = octets.reshape(octets.shape[0], -1)[:rows, : cut.spec.mx.blocks(length)]
    return View(
        results.data[:rows, : cut.width(length)],
        scales,
        results.refs[:rows] if cut.folded else None,
        results.norms[:rows] if cut.norms else None,
    )
