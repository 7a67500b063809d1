"""Training with every large matrix product in MXFP4, planned by outlier patterns (AdaHOP)."""

from adahop_jax._calibrate import LayerInfo as LayerInfo
from adahop_jax._calibrate import calibrate as calibrate
from adahop_jax._calibrate import label as label
from adahop_jax._calibrate import layers as layers
from adahop_jax._calibrate import merge_statistics as merge_statistics
from adahop_jax._calibrate import observe as observe
from adahop_jax._calibrate import plan_from_labels as plan_from_labels
from adahop_jax._explain import Explanation as Explanation
from adahop_jax._explain import explain as explain
from adahop_jax._formats import MXFP4 as MXFP4
from adahop_jax._formats import MXFP6 as MXFP6
from adahop_jax._formats import MXFormat as MXFormat
from adahop_jax._formats import OperandSpec as OperandSpec
from adahop_jax._matmul import hadamard as hadamard
from adahop_jax._matmul import matmul as matmul
from adahop_jax._mxarray import MXArray as MXArray
from adahop_jax._mxarray import quantize as quantize
from adahop_jax._patterns import classify as classify
from adahop_jax._plan import LayerPlan as LayerPlan
from adahop_jax._plan import OutlierSpec as OutlierSpec
from adahop_jax._plan import Pattern as Pattern
from adahop_jax._plan import Patterns as Patterns
from adahop_jax._plan import Plan as Plan
from adahop_jax._plan import PlanError as PlanError
from adahop_jax._plan import ProductPlan as ProductPlan
from adahop_jax.nn import Dense as Dense
