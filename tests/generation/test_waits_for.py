"""Places where the host waits for a GPU, by warnings of torch's synchronisation debug mode."""

import warnings
from typing import Any

import pytest
import torch

from ligermodels.generation.graph import waits_for


@pytest.mark.parametrize("fails", [False, True])
def test_other_warnings_are_shown(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those before an error."""
    modes: list[Any] = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    places: list[str] = []
    with pytest.warns(UserWarning) as shown:
        try:
            with waits_for(torch.device("cuda")) as places:
                warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
                warnings.warn("of a hook", stacklevel=1)
                if fails:
                    raise RuntimeError("out of memory")
        except RuntimeError:
            assert fails
    (place,), (warning,) = places, shown
    assert place.startswith(f"{__file__}:") and str(warning.message) == "of a hook" and modes == ["warn", 0]
