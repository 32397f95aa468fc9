"""Tests that need GPUs are listed with what each needs them for, wherever there are too few."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips `gpu("reason", devices=n)` tests on a machine with fewer than n CUDA devices (n is 1 unless given)."""
    marked = [(item, marker) for item in items if (marker := item.get_closest_marker("gpu")) is not None]
    if not marked:
        return
    import torch

    found = torch.cuda.device_count()
    for item, marker in marked:
        if not marker.args or not str(marker.args[0]).strip():
            raise pytest.UsageError(f"{item.nodeid}: the gpu marker needs a reason: what a CPU cannot show")
        needed = marker.kwargs.get("devices", 1)
        if found < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA device(s), found {found}: {marker.args[0]}"))
