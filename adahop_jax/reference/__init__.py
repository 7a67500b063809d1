"""The specification in plain JAX: slow, short, and the truth that every kernel is held against."""
