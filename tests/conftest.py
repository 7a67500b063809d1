"""What every test runs under: two CPU devices, no silent promotion of dtypes or ranks.

The modules in `ON_BOTH` run twice, on the CPU and on a GPU, where products go through the kernels.
"""

import contextlib
from collections.abc import Iterator

import jax
import pytest

# Before the first use of a device: it cannot be changed afterwards.
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_numpy_rank_promotion", "raise")

ON_BOTH = {
    *("test_dense", "test_dense_group", "test_dense_random"),
    *("test_dense_structure", "test_dense_transforms", "test_residuals"),
    *("test_product", "test_mxarray", "test_plan", "test_calibrate", "test_explain"),
    *("test_patterns", "test_errors", "test_random_outliers"),
}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "cpu_only(reason): of a module that runs on GPUs too, what cannot"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.module.__name__.rpartition(".")[2] in ON_BOTH:
        platforms = ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)]
        if metafunc.definition.get_closest_marker("cpu_only"):
            platforms.pop()
        metafunc.parametrize("platform", platforms, indirect=True, scope="module")


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


@pytest.fixture(scope="module", autouse=True)
def platform(request: pytest.FixtureRequest) -> Iterator[str | None]:
    """The platform of JAX's default device; fixtures that compute in a wider scope ask for it.

    None in modules that run once: they leave it as it is.
    """
    name = getattr(request, "param", None)
    with contextlib.ExitStack() as stack:
        if name is not None:
            stack.enter_context(jax.default_device(jax.devices(name)[0]))
        if name == "gpu":
            # Products in float32 are TF32 there by default, too coarse to compare anything with.
            stack.enter_context(jax.default_matmul_precision("highest"))
        yield name


@pytest.fixture(autouse=True)
def dtype_promotion(request: pytest.FixtureRequest) -> Iterator[None]:
    """Strict, which optax.adam (float ** int32) and Flax's norms in bfloat16 do not survive."""
    marked = request.node.get_closest_marker("standard_promotion")
    with jax.numpy_dtype_promotion("standard" if marked else "strict"):
        yield


@pytest.fixture
def key() -> jax.Array:
    return jax.random.key(0)
