"""The recipes behind `--quant`: how the products of the decoder's blocks run, by name.

A recipe is a plan, uniform or made by calibration; or, where no plan can say it, a `custom_vjp` of
its own (`own_product`). What it computes and where it is from stands in its file. `bf16`, `mxfp4`
(OCP MX v1.0, AdaHOP's scale rule) and `iht` are plans of one word, baselines of AdaHOP;
`adahop` is what calibration plans (arXiv:2604.02525).
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping

import flax.linen as nn

import adahop_jax as ah
from train.recipes import halo, nvfp4, quartet, tseng
from train.recipes.control import control_plan
from train.recipes.own_product import OwnProduct


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One recipe; exactly one of `plan`, `of_calibrated` and `dot_general_cls` is set.

    Attributes:
      summary: what it is, in a line.
      plan: of every layer.
      of_calibrated: from the calibrated plan and the run's seed to the plan.
      dot_general_cls: makes the product of every layer (see `own_product`), which is emulated.
      adjustable: whether `--fwd` and `--dy-rounding` may change formats and rounding.
    """

    summary: str
    plan: ah.Plan | None = None
    of_calibrated: Callable[[ah.Plan, int], ah.Plan] | None = None
    dot_general_cls: Callable[[], OwnProduct] | None = None
    adjustable: bool = False

    @property
    def is_calibrated(self) -> bool:
        """Whether a run starts with steps in full that decide its plan."""
        return self.of_calibrated is not None

    @property
    def is_emulated(self) -> bool:
        """Whether its products are plain JAX that quantizes and dequantizes, and no kernel's."""
        return self.dot_general_cls is not None

    def applied[Model: nn.Module](self, model: Model, plan: ah.Plan | None) -> Model:
        """A model whose layers run by this recipe, its parameters being the same.

        Args:
          model: with attributes `plan` and `dot_general_cls`, which it hands to every layer.
          plan: in force; None if the recipe is emulated.
        """
        if (plan is None) != self.is_emulated:
            raise ValueError("a recipe with a product of its own has no plan, and every other has")
        return model.clone(plan=plan or ah.Plan.full(), dot_general_cls=self.dot_general_cls)


def _own(product: Callable, seeds: int) -> Callable[[], OwnProduct]:
    return functools.partial(OwnProduct, product=product, seeds=seeds)


RECIPES: Mapping[str, Recipe] = {
    "bf16": Recipe(summary="every product in the model's dtype", plan=ah.Plan.full()),
    "mxfp4": Recipe(
        summary="MXFP4, to nearest, nothing rotated",
        plan=ah.Plan.uniform("mxfp4"),
        adjustable=True,
    ),
    "iht": Recipe(
        summary="MXFP4 after the inner Hadamard transform of 32, everywhere",
        plan=ah.Plan.uniform("iht"),
        adjustable=True,
    ),
    "adahop": Recipe(
        summary="IHT and outlier extraction by calibrated patterns (arXiv:2604.02525)",
        of_calibrated=lambda plan, seed: plan,
        adjustable=True,
    ),
    "control": Recipe(
        summary="adahop's plan with as much in BF16, at random",
        of_calibrated=control_plan,
        adjustable=True,
    ),
    "tseng": Recipe(
        summary="MXFP4 backward only: random signs, 3/4, stochastic rounding (arXiv:2502.20586)",
        plan=tseng.PLAN,
    ),
    "halo": Recipe(
        summary="outer Hadamard transform on the gradients' path (arXiv:2501.02625), emulated",
        dot_general_cls=_own(halo.product, 0),
    ),
    "quartet": Recipe(
        summary="QuEST forward, clip mask, unbiased backward (arXiv:2505.14669), emulated",
        dot_general_cls=_own(quartet.product, quartet.SEEDS),
    ),
    "nvfp4": Recipe(
        summary="blocks of 16 with E4M3 scales (arXiv:2509.25149), emulated",
        dot_general_cls=_own(nvfp4.product, nvfp4.SEEDS),
    ),
}
"""By what `--quant` calls them."""
