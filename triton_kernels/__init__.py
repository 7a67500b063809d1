"""The operations of `adahop_jax` as Triton kernels, called through jax-triton.

`operations` is the backend; each kernel has a file: `quantize_rows`, `quantize_columns`, `fold`,
`matmul`, `native`. `machines` says which of them a GPU runs, with which tiles.
"""

MARKER = "adahop_jax"
"""Tells this package from others of its name."""
