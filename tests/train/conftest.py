"""What tests of whole runs share."""

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache


@pytest.fixture(scope="module")
def compile_cache(tmp_path_factory):
    """Lets the runs of a module share what they compile."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("xla")))
    yield
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
