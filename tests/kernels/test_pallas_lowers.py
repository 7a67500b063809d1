"""Every Pallas kernel is lowered for a GPU that is not there: layouts, copies and types agree."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

from adahop_jax import OperandSpec
from adahop_jax.reference.operations import Wanted
from pallas_kernels.operations import Backend

HOPPER = AbstractMesh(
    (1,),
    ("device",),
    (AxisType.Auto,),
    abstract_device=AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="cuda"),
)
OPS = Backend(processors=132)
STOCHASTIC = {"rounding": "stochastic", "scale_rule": "ceil"}
SPECS = {
    "plain": OperandSpec(),
    "floor": OperandSpec(hadamard=32, scale_rule="floor"),
    "iht": OperandSpec(hadamard=32),
    "signs": OperandSpec(hadamard=16, signs="random", pre_scale=0.75, **STOCHASTIC),
    "mxfp6": OperandSpec(format="mxfp6", hadamard=32),
}
SEED = jax.ShapeDtypeStruct((2,), jnp.uint32)


def _kernels(function, *shapes):
    """How many of Mosaic's kernels a function is lowered to."""
    with use_abstract_mesh(HOPPER):
        lowered = jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",))
    return lowered.as_text().count("custom_call @mosaic_gpu")


@pytest.mark.parametrize(
    "name, dtype",
    [*((name, "bfloat16") for name in SPECS), ("iht", "float32"), ("plain", "float16")],
)
def test_quantizers(name, dtype):
    def views(x, seed):
        common = {"spec": SPECS[name], "seed": seed, "sign_seed": seed}
        wanted = Wanted(False, 1, norms=True, **common), Wanted(True, 0, norms=True, **common)
        return OPS.views(x, *wanted)

    # One that guesses, one for both views, and one for each that does rows again.
    assert _kernels(views, jax.ShapeDtypeStruct((300, 264), jnp.dtype(dtype)), SEED) == 4


@pytest.mark.parametrize("name", ["iht", "mxfp6"])
def test_loading(name):
    load = functools.partial(OPS.load, spec=SPECS[name])
    width = SPECS[name].mx.packed_length(288)
    shapes = (300, width), (300, 9)
    assert _kernels(load, *(jax.ShapeDtypeStruct(shape, jnp.uint8) for shape in shapes)) == 1


@pytest.mark.parametrize(
    "name, dtype", [("plain", "bfloat16"), ("iht", "float32"), ("mxfp6", "float16")]
)
def test_products_with_columns_replaced(name, dtype):
    def product(x, index, values):
        side, _ = OPS.operand(x, axis=1, spec=SPECS[name])
        columns = index, values
        return OPS.matmul(side, side, scale=1.0, dtype=jnp.dtype(dtype), columns=columns)

    shapes = ((300, 8480), jnp.bfloat16), ((5,), jnp.int32), ((300, 5), jnp.float32)
    assert _kernels(product, *(jax.ShapeDtypeStruct(*shape) for shape in shapes)) == 5


def test_selection():
    select = functools.partial(OPS.largest, k=64)
    assert _kernels(select, jax.ShapeDtypeStruct((14336,), jnp.float32)) == 1


def test_kernels_under_remat_and_scan():
    """Writing in place is no effect that either would refuse."""

    def loss(x):
        (view, _) = OPS.operand(jax.lax.stop_gradient(x), axis=0, spec=SPECS["iht"])
        return jnp.sum(jnp.sin(x)) * jnp.sum(view.values.data.astype(jnp.float32))

    def scanned(x):
        step = jax.checkpoint(lambda total, _: (total + loss(x), None))
        return jax.lax.scan(step, jnp.float32(0), None, length=2)[0]

    assert _kernels(jax.grad(scanned), jax.ShapeDtypeStruct((128, 128), jnp.float32)) >= 2
