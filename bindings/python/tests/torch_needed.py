"""For modules whose tests use torch. Without torch pytest skips them; it fails where
``SIDELANE_NEED_TORCH`` is set.
"""

import importlib.util
import os

import pytest

if importlib.util.find_spec("torch") is None:
    assert "SIDELANE_NEED_TORCH" not in os.environ, "torch is not installed"
    pytest.skip("torch is not installed", allow_module_level=True)
