"""The device that JAX computes on unless told otherwise."""

import jax


def default_device() -> jax.Device:
    """The device that `jax.default_device` names, or else the first there is."""
    chosen = jax.config.jax_default_device
    if chosen is None:
        return jax.devices()[0]
    return jax.devices(chosen)[0] if isinstance(chosen, str) else chosen
