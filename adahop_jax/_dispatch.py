"""Which implementation runs an operation: chosen by name, or the first that can run here.

triton+pallas  Triton's kernels, and Pallas' for what these were measured to be faster at
triton         Triton's kernels, on the best path that this GPU has: native, fp8 or bf16
triton:fp8     on that path; likewise triton:native and triton:bf16
pallas         Pallas' kernels alone, on Hopper; needs nothing but JAX
reference      plain JAX, anywhere
"""

import functools
import importlib
import logging
from typing import Any

import jax

from adahop_jax._devices import default_device

_logger = logging.getLogger("adahop_jax")

BACKENDS = (
    "triton+pallas",
    "triton",
    "triton:native",
    "triton:fp8",
    "triton:bf16",
    "pallas",
    "reference",
)
"""Names of backends, in order of preference."""


def resolve(backend: str | None) -> tuple[str, Any]:
    """The backend that a layer uses, decided while tracing.

    Args:
      backend: a name in `BACKENDS`, or None for the first that can run here.

    Returns:
      The backend's name, with the path that it takes, and its operations: those of
      `adahop_jax.reference.operations`.

    Raises:
      NotImplementedError: the named backend does not exist or cannot run here; a name is never
        replaced by another.
    """
    if backend is not None and backend not in BACKENDS:
        known = ", ".join(repr(name) for name in BACKENDS)
        raise NotImplementedError(
            f"backend {backend!r} is unknown; choose one of {known}, or None for the best here"
        )
    device = default_device()
    refused = ""
    for candidate in BACKENDS if backend is None else (backend,):
        name, operations, refusal = _load(candidate, device)
        if not refusal:
            is_slow = name == "reference" and device.platform == "gpu"
            _log_once(name, str(device), refused if is_slow else "")
            return name, operations
        refused = refusal
    raise NotImplementedError(f"backend {backend!r} cannot run on {device}: {refused}")


@functools.cache
def _load(backend: str, device: jax.Device) -> tuple[str, Any, str]:
    """A backend's full name, its operations, and why it cannot run on a device, if it cannot."""
    if backend == "reference":
        return backend, importlib.import_module("adahop_jax.reference.operations"), ""
    if device.platform != "gpu":
        return backend, None, f"it needs a GPU, and JAX's default device is a {device.platform}"
    for package in ("triton_kernels", "pallas_kernels"):
        kernels = importlib.import_module(package)
        if getattr(kernels, "MARKER", None) != "adahop_jax":
            found = getattr(kernels, "__file__", None)
            return backend, None, f"`{package}` is another package: {found}; uninstall it"
    if backend == "pallas":
        found = getattr(device, "compute_capability", "unknown")
        if found != "9.0":
            return backend, None, f"its architecture is {found}, and Pallas' kernels are for 9.0"
        pallas = importlib.import_module("pallas_kernels.operations")
        return f"{backend}:fp8", pallas.Backend(device.core_count), ""
    try:
        machines = importlib.import_module("triton_kernels.machines")
        operations = importlib.import_module("triton_kernels.operations")
    except ImportError as error:
        return backend, None, f"{error}; install triton and jax-triton"
    kind, _, asked = backend.partition(":")
    path, refusal = machines.path_for(device, asked or None)
    if refusal:
        return backend, None, refusal
    machine, large = machines.machine_of(device), None
    if kind == "triton+pallas":
        if not machine.pallas:
            return backend, None, f"Pallas was not measured on architecture {machine.name}"
        large = importlib.import_module("pallas_kernels.matmul")
    return f"{kind}:{path}", operations.Backend(machine, path, device.core_count, large), ""


@functools.cache
def _log_once(name: str, device: str, refusal: str) -> None:
    _logger.info("MX products run on the %r backend, %s", name, device)
    if refusal:
        _logger.warning("MX products on %s run in plain JAX, slowly: %s", device, refusal)
