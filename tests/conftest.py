"""What every test runs under: two CPU devices, no silent promotion of dtypes or ranks."""

from collections.abc import Iterator

import jax
import pytest

# Before the first use of a device: it cannot be changed afterwards.
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _sees_gpu():
        reason = "needs an NVIDIA GPU; run `pytest -m gpu` where JAX sees one"
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


def _sees_gpu() -> bool:
    try:
        return bool(jax.devices("gpu"))
    except RuntimeError:  # what JAX raises for a platform it does not have
        return False


@pytest.fixture(autouse=True)
def dtype_promotion(request: pytest.FixtureRequest) -> Iterator[None]:
    """Strict, which optax.adam (float ** int32) and Flax's norms in bfloat16 do not survive."""
    marked = request.node.get_closest_marker("standard_promotion")
    with jax.numpy_dtype_promotion("standard" if marked else "strict"):
        yield


@pytest.fixture
def key() -> jax.Array:
    return jax.random.key(0)
