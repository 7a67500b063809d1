"""Tseng et al.: both products of the backward pass in MXFP4, unbiased; the forward one in full.

Source: "Training LLMs with MXFP4", arXiv:2502.20586, algorithms 2 and 3, and the authors' code
(amazon-science/mxfp4-llm, mode 3). There the forward product is in BF16 or FP8; here in `dtype`.

For dgrad and wgrad alike, along the contracted dim, with signs drawn anew for each product:

    dX = Q(dY S H) Q(W^T S H)^T      dW = Q(X^T S H) Q(dY^T S H)^T
    Q(v) = 4/3 SR(3/4 v / s) s       s = 2^(floor(log2 max|v|) - 2) for every block of 32

S H is the Hadamard matrix of 64 (two blocks) after random signs; SR rounds stochastically to E2M1.
max|v| / s is below 8, so 3/4 of it stays below 6, the largest element: nothing clips, and the mean
of Q(v) is v.

As a plan: the pre-scale goes first, so that blocks hold v' = 3/4 v. The floor rule on v is then the
`ceil` rule on v', the least scale at which v' does not clip: both double the scale where v' passes
1.5 times a power of two, that is 6 / 4. Where max|v| is a power of two itself, `floor` takes twice
the scale that is needed and `ceil` does not; the mean is the same. The product undoes 64 and 16/9.
"""

import adahop_jax as ah

OPERAND = ah.OperandSpec(
    hadamard=64, signs="random", pre_scale=0.75, rounding="stochastic", scale_rule="ceil"
)
_BACKWARD = ah.ProductPlan(lhs=OPERAND, rhs=OPERAND)
PLAN = ah.Plan(default=ah.LayerPlan(fwd=ah.ProductPlan.full(), dgrad=_BACKWARD, wgrad=_BACKWARD))
