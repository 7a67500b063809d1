"""`Dense`: `flax.linen.Dense` with a plan; and `dense_group`, several that read the same X."""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from adahop_jax._dense import Layer, add_bias, dense, layer_seeds
from adahop_jax._dispatch import resolve
from adahop_jax._mxarray import check_dtype
from adahop_jax._observe import PROBE, LayerStatistics, observed_dot
from adahop_jax._plan import LayerPlan, Plan, PlanError, Product, ProductPlan
from adahop_jax._product import Seeds
from adahop_jax._sharding import compiler_placed, sharding_of, vary_alike, varying_axes

RNG_STREAM = "quantize"


class Dense(nn.Dense):
    """A linear layer whose three products run as a plan says.

    Every argument of `flax.linen.Dense`, and its parameters: `kernel` (in_features, features) and
    `bias` (features,). Products that the plan leaves in full are `nn.Dense`'s own, gradients
    included, bit for bit; the others accumulate in float32 and round once to `dtype`, and the
    kernel's gradient is not rounded to `dtype`. `dot_general`, `dot_general_cls` and `precision`
    apply to products in full and to the side products of outlier extraction (`precision`).

    Inputs may have any leading dims, also empty, and dims of any size. The backward pass keeps them
    packed; layers that read the same input keep it once as a `dense_group`.

    Attributes:
      plan: looked up by the module's path, e.g. "block_3/attn/query". A plan that rounds
        stochastically needs the RNG stream "quantize": `apply(..., rngs={"quantize": key})`.
      backend: the name of a backend, or None for the best here.

    Raises:
      PlanError: the plan has no entry for this layer, or one made for another kernel's shape.
      ValueError: the plan rounds stochastically and there is no RNG stream "quantize"; features
        below 1; a scalar input.
      TypeError: plan is no `Plan`; a quantized product in a dtype other than float32, bfloat16 and
        float16, under forward-mode or higher-order differentiation.
      NotImplementedError: the named backend does not exist or cannot run here.
    """

    plan: Plan = Plan.full()
    backend: str | None = None

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Applies the layer along the last dim.

        Args:
          inputs: (..., in_features).

        Returns:
          (..., features) of `dtype`, or of the promoted dtype where `dtype` is None.
        """
        return _results([self.prepare(inputs)])[0]

    @nn.compact
    def prepare(self, inputs: jax.Array) -> "Call":
        """All of a call but its products: parameters, plan and seeds. For `dense_group`."""
        self._check(inputs)
        in_features = jnp.shape(inputs)[-1]
        kernel = self.param(
            "kernel", self.kernel_init, (in_features, self.features), self.param_dtype
        )
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype)
        promoted: Any = self.promote_dtype(inputs, kernel, bias, dtype=self.dtype)
        x, w, b = promoted
        plan = self._layer_plan(in_features)
        if self.is_initializing():
            plan = LayerPlan.uniform(ProductPlan.full())
        probe: LayerStatistics | None = self.get_variable("params", PROBE)
        in_full = probe is not None or plan.is_full
        key = None
        if not in_full:
            check_dtype(f"Dense {self._where}", x.dtype)
            key = self._key() if plan.is_random else None
        if self.promote_dtype is nn.dtypes.promote_dtype:
            # What is only cast goes in as it is, to be cast inside: gradients come out in its own
            # dtype, the kernel's unrounded, and no copy of it in `dtype` is kept for dgrad.
            x = inputs if jnp.issubdtype(jnp.result_type(inputs), jnp.inexact) else x
            w, b = kernel, b if in_full else bias
        return Call(
            x=x,
            w=w,
            bias=b,
            promoted=promoted[:2],
            probe=probe,
            in_full=in_full,
            layer=Layer(plan, self._dot, self.precision),
            seeds=layer_seeds(plan, key),
            backend=self.backend,
        )

    @property
    def _where(self) -> str:
        return repr("/".join(self.path))

    def _key(self) -> jax.Array:
        if not self.has_rng(RNG_STREAM):
            raise ValueError(
                f"Dense {self._where}: its plan draws random bits, and there is no RNG stream "
                f"{RNG_STREAM!r}; pass rngs={{{RNG_STREAM!r}: key}} to apply"
            )
        return self.make_rng(RNG_STREAM)

    def _check(self, inputs: jax.Array) -> None:
        """Raises for arguments that no layer can have."""
        if not isinstance(self.plan, Plan):
            raise TypeError(
                f"Dense {self._where}: plan is a {type(self.plan).__name__}; wanted an "
                "adahop_jax.Plan, e.g. Plan.uniform('iht')"
            )
        if jnp.ndim(inputs) == 0:
            raise ValueError(
                f"Dense {self._where}: the input is a scalar; wanted (..., in_features)"
            )
        if not isinstance(self.features, int | np.integer) or self.features < 1:
            raise ValueError(
                f"Dense {self._where}: features is {self.features!r}; wanted a positive integer"
            )
        if self.backend is not None:
            resolve(self.backend)

    def _layer_plan(self, in_features: int) -> LayerPlan:
        try:
            plan = self.plan["/".join(self.path)]
        except PlanError as error:
            raise PlanError(f"Dense {self._where}: {error}") from error
        for name, found, wanted in (
            ("in_features", in_features, plan.in_features),
            ("features", self.features, plan.out_features),
        ):
            if wanted is not None and found != wanted:
                raise PlanError(
                    f"Dense {self._where}: {name} is {found}, and its plan was made for {wanted}; "
                    "calibrate this model, or load its own plan"
                )
        return plan

    @property
    def _dot(self) -> "_Dot":
        dot_general = self.dot_general_cls() if self.dot_general_cls else self.dot_general
        return _Dot(dot_general or lax.dot_general, self.precision)


class Call(NamedTuple):
    """A call of a `Dense`, but for its products.

    Attributes:
      x, w: as `dense` takes them.
      bias: to be added, or None.
      promoted: x and w in the dtype of products in full.
      probe: of calibration, or None.
      in_full: whether this is a call of `nn.Dense`, by plan or for the probe.
      layer: plan, the product in full, and the side products' precision.
      seeds: of every product.
      backend: the name of a backend, or None for the best here.
    """

    x: jax.Array
    w: jax.Array
    bias: jax.Array | None
    promoted: tuple[jax.Array, jax.Array]
    probe: LayerStatistics | None
    in_full: bool
    layer: Layer
    seeds: dict[Product, Seeds]
    backend: str | None

    @property
    def reads(self) -> tuple[Any, ...]:
        """Calls for which this is equal read one tensor, in one dtype, on one backend."""
        x, w = self.promoted
        return self.probe is None, id(self.x), x.dtype, self.backend, varying_axes(w)


def dense_group(inputs: jax.Array, *layers: Dense) -> tuple[jax.Array, ...]:
    """Applies layers that read the same input, which is quantized and kept once for all of them.

        q, k, v = ah.dense_group(
            x, ah.Dense(d, name="query"), ah.Dense(d, name="key"), ah.Dense(d, name="value")
        )

    Parameters, paths, plans, random bits, results and gradients are those of the layers called one
    after the other. Products of different layers share a quantized view of the input where their
    plans ask for the same one; where they do not, each has its own. So has a layer whose `dtype`,
    `backend` or custom `promote_dtype` differs from those of the layers beside it.

    Args:
      inputs: (..., in_features).
      *layers: made where the group is called, or in the module's `setup`.

    Returns:
      For each layer (..., features), as it returns them by itself.

    Raises:
      TypeError: a layer is no `Dense`, or has a `__call__` of its own, as `nn.vmap(Dense)` has.
      ValueError: there are no layers.
      And what `Dense` raises, naming the layer.
    """
    if not layers:
        raise ValueError("dense_group: no layers; pass the layers that read the input, e.g. Dense")
    for i, layer in enumerate(layers):
        if not isinstance(layer, Dense):
            raise TypeError(
                f"dense_group: layer {i} is a {type(layer).__name__} of {type(layer).__module__}; "
                "wanted an adahop_jax.Dense, not yet called"
            )
        if type(layer).__call__ is not Dense.__call__:
            raise TypeError(
                f"dense_group: layer {i}, {type(layer).__name__} {layer.name!r}, has a __call__ of "
                "its own, which a group would pass over; call it by itself, or transform the "
                "module that calls the group"
            )
    return _results([layer.prepare(inputs) for layer in layers])


def _results(calls: list[Call]) -> tuple[jax.Array, ...]:
    groups = itertools.groupby(calls, lambda call: call.reads)
    return tuple(y for _, group in groups for y in _ys(list(group)))


def _ys(calls: list[Call]) -> Iterator[jax.Array]:
    """The results of calls whose `reads` are equal."""
    if all(call.in_full for call in calls):
        products = tuple(_in_full(call) for call in calls)
    else:
        products = _as_planned(calls)
    for call, y in zip(calls, products, strict=True):
        if call.bias is None:
            yield y
        elif call.in_full:
            yield y + jnp.reshape(call.bias, (1,) * (y.ndim - 1) + (-1,))
        else:
            yield add_bias(*vary_alike(y, call.bias))


def _in_full(call: Call) -> jax.Array:
    if call.probe is not None:
        return observed_dot(*call.promoted, call.probe, call.layer.dot)
    return call.layer.dot(*call.promoted)


def _as_planned(calls: list[Call]) -> tuple[jax.Array, ...]:
    layers = tuple(call.layer for call in calls)
    dtype, backend = calls[0].promoted[0].dtype, calls[0].backend

    def products(x: jax.Array, ws: Any, seeds: Any) -> tuple[jax.Array, ...]:
        x, *ws = vary_alike(x, *ws)
        return dense(x, tuple(ws), seeds, layers, dtype, backend)

    out = tuple(sharding_of(call.layer.dot, *call.promoted) for call in calls)
    return compiler_placed(products, out=out)(
        calls[0].x, tuple(call.w for call in calls), tuple(call.seeds for call in calls)
    )


class _Dot:
    """`nn.Dense`'s product; equal by what it computes, so that tracing it again hits the cache."""

    def __init__(self, dot_general: Any, precision: lax.PrecisionLike) -> None:
        self._static = (dot_general, precision)

    def __call__(self, x: jax.Array, w: jax.Array) -> jax.Array:
        dot_general, precision = self._static
        return dot_general(x, w, (((x.ndim - 1,), (0,)), ((), ())), precision=precision)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Dot) and self._static == other._static

    def __hash__(self) -> int:
        return hash(self._static)
