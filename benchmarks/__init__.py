"""How fast the kernels are: `python -m benchmarks.run` on a GPU prints tables and writes JSON."""
