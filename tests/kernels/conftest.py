"""Fixtures of the contract, which Triton's own cases take too."""

from tests.kernels.test_contract import kernels, rng

__all__ = ["kernels", "rng"]
