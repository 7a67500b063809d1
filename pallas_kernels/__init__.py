"""Kernels in Pallas, JAX's own kernel language, by its Mosaic GPU lowering."""

MARKER = "adahop_jax"
"""Tells this package from others of its name."""
