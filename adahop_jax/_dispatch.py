"""Which implementation runs an operation: chosen by name, or the first that can run here."""

import functools
import importlib
import logging
from types import ModuleType

_logger = logging.getLogger("adahop_jax")

BACKENDS = {"reference": "adahop_jax.reference.operations"}
"""Name -> module with the six operations, in order of preference."""


def resolve(backend: str | None) -> tuple[str, ModuleType]:
    """The backend that a layer uses, decided while tracing.

    Args:
      backend: a name in `BACKENDS`, or None for the first that can run here.

    Returns:
      The backend's name and its module.

    Raises:
      NotImplementedError: the named backend does not exist; a name is never replaced by another.
    """
    if backend is None:
        backend = next(iter(BACKENDS))
    elif backend not in BACKENDS:
        known = ", ".join(repr(name) for name in BACKENDS)
        raise NotImplementedError(
            f"backend {backend!r} is unknown; choose one of {known}, or None for the best here"
        )
    _log_once(backend)
    return backend, importlib.import_module(BACKENDS[backend])


@functools.cache
def _log_once(backend: str) -> None:
    _logger.info("MX products run on the %r backend", backend)
