"""The control of outlier extraction: IHT with as much in BF16 as AdaHOP has, but at random.

What AdaHOP gains over IHT may come from where it extracts, or from computing a share of the
multiply-adds in BF16 at all. The control has the same share, product by product and shape by shape,
and looks at no outlier to place it:

- where the calibrated plan extracts the k largest rows or columns of a tensor, the control takes
  any k of the same tensor, drawn anew in every step from the product's seeds;
- of a product that the plan leaves in BF16 (level 2), all rows are taken, so that there is nothing
  to draw. It moves instead: among the layers whose kernels have the same shape, as many as before
  run that product in BF16, drawn once by the run's seed. A layer that has to give its place takes
  what the other one ran. Where all layers of a shape run it in BF16, all still do.

A run of the control calibrates as one of AdaHOP with the same seed does, and so mirrors its plan;
`--plan` names that of another run.
"""

import collections
import dataclasses
from typing import Any

import numpy as np

import adahop_jax as ah
from adahop_jax._plan import PRODUCTS, Product


def control_plan(plan: ah.Plan, seed: int) -> ah.Plan:
    """The control of a calibrated plan, with the same share of multiply-adds in `dtype`.

    Args:
      plan: from calibration.
      seed: that draws which layers run a product in full.
    """
    return _full_products_moved(plan, np.random.default_rng(seed)).map_products(_at_random)


def _at_random(name: Product, plan: ah.ProductPlan) -> ah.ProductPlan:
    if plan.outliers is None:
        return plan
    return dataclasses.replace(plan, outliers=dataclasses.replace(plan.outliers, norm="random"))


def _full_products_moved(plan: ah.Plan, rng: np.random.Generator) -> ah.Plan:
    layers = dict(plan)
    alike = collections.defaultdict(list)
    for path, layer in plan:
        alike[layer.in_features, layer.out_features].append(path)
    for product in PRODUCTS:
        for paths in alike.values():
            before = [path for path in paths if layers[path][product].is_full]
            drawn = rng.choice(len(paths), size=len(before), replace=False)
            after = [paths[i] for i in sorted(drawn)]
            for old, new in zip(
                [path for path in before if path not in after],
                [path for path in after if path not in before],
                strict=True,
            ):
                given, taken = layers[old][product], layers[new][product]
                layers[old] = _with(layers[old], product, taken)
                layers[new] = _with(layers[new], product, given)
    return dataclasses.replace(plan, layers=tuple(layers.items()))


def _with(layer: ah.LayerPlan, product: Product, plan: ah.ProductPlan) -> ah.LayerPlan:
    changed: dict[str, Any] = {product: plan}
    return dataclasses.replace(layer, **changed)
