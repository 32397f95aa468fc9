"""The shared buffer: seen by other processes, removed however its owner ends, refused when there is no room."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nemo_rl_moe.errors import UserError
from nemo_rl_moe.refit.shared_memory import SHARED_MEMORY_DIR, AttachedBuffers, SharedBuffer, remove_leftovers


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess:
    """Runs code in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120, check=False
    )


def test_another_process_writes_7_at_byte_1000_and_this_one_reads_it() -> None:
    with SharedBuffer.create(4096) as buffer:
        assert buffer.tensor.sum() == 0
        code = (
            "import sys; from nemo_rl_moe.refit.shared_memory import SharedBuffer\n"
            "SharedBuffer.attach(sys.argv[1], 4096).tensor[1000] = 7"
        )
        assert run_python(code, str(buffer.path)).returncode == 0
        assert buffer.tensor[1000] == 7
        assert buffer.path.exists()
    assert not buffer.path.exists()


def test_the_file_is_private_and_its_name_has_128_random_bits() -> None:
    with SharedBuffer.create(64) as first, SharedBuffer.create(64) as second:
        assert first.path.stat().st_mode & 0o777 == 0o600
        assert first.path.parent == SHARED_MEMORY_DIR
        assert first.path.name != second.path.name
        assert len(first.path.name.rpartition("-")[2]) == 32


@pytest.mark.parametrize("end", ["pass", "raise SystemExit(3)", "raise RuntimeError('boom')"])
def test_an_owner_that_ends_without_close_removes_its_file(end: str) -> None:
    code = (
        f"from nemo_rl_moe.refit.shared_memory import SharedBuffer\nb = SharedBuffer.create(64); print(b.path)\n{end}"
    )
    path = Path(run_python(code).stdout.strip())
    assert path.parent == SHARED_MEMORY_DIR
    assert not path.exists()


def test_the_file_of_a_killed_owner_is_removed_later_and_one_in_use_is_not(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from nemo_rl_moe.refit.shared_memory import SharedBuffer\n"
        "print(SharedBuffer.create(64, Path(sys.argv[1])).path, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = run_python(code, str(tmp_path))
    assert ended.returncode == -signal.SIGKILL
    leftover = Path(ended.stdout.strip())
    assert leftover.exists()
    with SharedBuffer.create(64, tmp_path) as used:
        assert leftover.exists(), "a file younger than a minute may belong to an owner that has not locked it yet"
        for path in (leftover, used.path):
            os.utime(path, (0, 0))
        assert remove_leftovers(tmp_path) == [leftover]
        assert used.path.exists()


def test_a_buffer_larger_than_the_free_space_is_an_error_with_both_sizes_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"MiB free, the weights need 1073741824 MiB"):
        SharedBuffer.create(1 << 50, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_is_an_error_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere: not a folder"):
        SharedBuffer.create(64, tmp_path / "nowhere")


def test_attaching_a_missing_file_or_another_size_is_refused() -> None:
    with SharedBuffer.create(128) as buffer, pytest.raises(ValueError, match="has 128 bytes, expected 64"):
        SharedBuffer.attach(buffer.path, 64)
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        SharedBuffer.attach(buffer.path, 128)


def test_a_mapping_is_kept_between_uses_and_replaced_with_the_path() -> None:
    attached = AttachedBuffers()
    with SharedBuffer.create(128) as first, SharedBuffer.create(256) as second:
        mapped = attached.get(first.path, 128)
        assert attached.get(str(first.path), 128).data_ptr() == mapped.data_ptr()
        second.tensor.fill_(3)
        assert torch.equal(attached.get(second.path, 256), second.tensor)
        attached.close()


def test_views_of_a_closed_buffer_stay_readable() -> None:
    buffer = SharedBuffer.create(64)
    view = buffer.tensor[:8].fill_(5)
    buffer.close()
    buffer.close()
    assert view.tolist() == [5] * 8
    assert buffer.tensor.numel() == 0
