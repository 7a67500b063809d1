"""`Dense`: `flax.linen.Dense` with a plan."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from adahop_jax._dense import add_bias, dense, layer_seeds
from adahop_jax._dispatch import resolve
from adahop_jax._mxarray import check_dtype
from adahop_jax._observe import PROBE, observed_dot
from adahop_jax._plan import LayerPlan, Plan, PlanError, Product
from adahop_jax._product import Seeds
from adahop_jax._sharding import compiler_placed, sharding_of, vary_alike

RNG_STREAM = "quantize"


class Dense(nn.Dense):
    """A linear layer whose three products run as a plan says.

    Every argument of `flax.linen.Dense`, and its parameters: `kernel` (in_features, features) and
    `bias` (features,). Products that the plan leaves in full are `nn.Dense`'s own, gradients
    included, bit for bit; the others accumulate in float32 and round once to `dtype`, and the
    kernel's gradient is not rounded to `dtype`. `dot_general`, `dot_general_cls` and `precision`
    apply to products in full and to the side products of outlier extraction (`precision`).

    Inputs may have any leading dims, also empty, and dims of any size.

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

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Applies the layer along the last dim.

        Args:
          inputs: (..., in_features).

        Returns:
          (..., features) of `dtype`, or of the promoted dtype where `dtype` is None.
        """
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

        observed = self.has_variable("params", PROBE)
        if observed or plan.is_full or self.is_initializing():
            if observed:
                y = observed_dot(x, w, self.get_variable("params", PROBE), self._dot)
            else:
                y = self._dot(x, w)
            return y if b is None else y + jnp.reshape(b, (1,) * (y.ndim - 1) + (-1,))

        dtype = x.dtype
        check_dtype(f"Dense {self._where}", dtype)
        key = None
        if plan.is_random:
            if not self.has_rng(RNG_STREAM):
                raise ValueError(
                    f"Dense {self._where}: its plan draws random bits, and there is no RNG stream "
                    f"{RNG_STREAM!r}; pass rngs={{{RNG_STREAM!r}: key}} to apply"
                )
            key = self.make_rng(RNG_STREAM)
        if self.promote_dtype is nn.dtypes.promote_dtype:
            # What is only cast goes in as it is, to be cast inside: gradients come out in its own
            # dtype, the kernel's unrounded, and no copy of it in `dtype` is kept for dgrad.
            x = inputs if jnp.issubdtype(jnp.result_type(inputs), jnp.inexact) else x
            w, b = kernel, bias

        def layer(x: jax.Array, w: jax.Array, seeds: dict[Product, Seeds]) -> jax.Array:
            x, w = vary_alike(x, w)
            return dense(x, w, seeds, plan, dtype, self._dot, self.precision, self.backend)

        y = compiler_placed(layer, out=sharding_of(self._dot, *promoted[:2]))(
            x, w, layer_seeds(plan, key)
        )
        return y if b is None else add_bias(*vary_alike(y, b))

    @property
    def _where(self) -> str:
        return repr("/".join(self.path))

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
