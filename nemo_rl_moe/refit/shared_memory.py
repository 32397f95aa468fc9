"""One block of host memory that several processes of a host map: a file in /dev/shm.

The file is a plain one with an unpredictable name and mode 0600. Its owner holds a lock on it for as long as it lives,
so that the next owner can tell the leftovers of a killed process from a buffer in use and remove them. The mapping
stays open between refits, so the page faults of a fresh mapping (about as dear as the copy itself) are paid once.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import mmap
import os
import secrets
import shutil
import time
import weakref
from pathlib import Path
from types import TracebackType

import numpy as np
import torch

from nemo_rl_moe.errors import UserError

SHARED_MEMORY_DIR = Path("/dev/shm")
_PREFIX = "nemo_rl_moe-weights-"
# Long enough that a file whose owner is between creating and locking it is never taken for a leftover.
_LEFTOVER_AGE_S = 60.0


class SharedBuffer:
    """A mapped file. Use `create` in the process that owns it and `attach` in the others.

    Attributes:
        path: file to attach to.
        nbytes: size in bytes.
        tensor: uint8 [nbytes], the memory itself.
    """

    def __init__(self, path: Path, nbytes: int, owner: bool) -> None:
        self.path = path
        self.nbytes = nbytes
        self._owner_pid = os.getpid() if owner else None
        with open(path, "r+b") as file:
            if owner:
                fcntl.flock(file, fcntl.LOCK_EX)
            # The map keeps a duplicate of the descriptor and with it the lock.
            self._map = mmap.mmap(file.fileno(), nbytes)
        self.tensor = torch.from_numpy(np.frombuffer(self._map, dtype=np.uint8))
        if owner:
            # A weak reference: the exit hook must not be what keeps a closed buffer's memory.
            atexit.register(_close_at_exit, weakref.ref(self))

    @staticmethod
    def create(nbytes: int, directory: Path = SHARED_MEMORY_DIR) -> SharedBuffer:
        """A new file of the size, zeroed; this process removes it in `close` or at its exit.

        Raises:
            UserError: the directory is missing or has too little room.
        """
        if nbytes <= 0:
            raise ValueError(f"shared buffer of {nbytes} bytes")
        if not directory.is_dir():
            raise UserError(f"{directory}: not a folder; weights are handed over through shared memory there")
        remove_leftovers(directory)
        path = directory / f"{_PREFIX}{secrets.token_hex(16)}"
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            free = shutil.disk_usage(directory).free
            if free < nbytes:
                raise UserError(
                    f"{directory}: {free >> 20} MiB free, the weights need {-(-nbytes // (1 << 20))} MiB; "
                    "enlarge it (in a container: --shm-size) or free some"
                )
            # Reserves the pages now: a sparse file would end the process with SIGBUS when memory runs out later.
            os.posix_fallocate(descriptor, 0, nbytes)
            return SharedBuffer(path, nbytes, owner=True)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise UserError(f"{path}: cannot reserve {nbytes} bytes of shared memory: {error}") from error
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)

    @staticmethod
    def attach(path: str | Path, nbytes: int) -> SharedBuffer:
        """Maps a file that another process created.

        Raises:
            ValueError: the file is missing or is not of the size.
        """
        path = Path(path)
        try:
            size = path.stat().st_size
        except OSError as error:
            raise ValueError(f"{path}: shared weight buffer cannot be read: {error.strerror}") from error
        if size != nbytes:
            raise ValueError(f"{path}: shared weight buffer has {size} bytes, expected {nbytes}")
        return SharedBuffer(path, nbytes, owner=False)

    def close(self) -> None:
        """Unmaps the memory and, in the owner, removes the file. May be called twice."""
        # A forked child inherits the object; only the creating process may remove the file.
        if self._owner_pid == os.getpid():
            self.path.unlink(missing_ok=True)
            self._owner_pid = None
        self.tensor = torch.empty(0, dtype=torch.uint8)
        # Views that the caller still holds keep the map alive; it goes with the last of them.
        with contextlib.suppress(BufferError):
            self._map.close()

    def __enter__(self) -> SharedBuffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AttachedBuffers:
    """The one buffer that a process has mapped, kept between refits and replaced when the path changes."""

    def __init__(self) -> None:
        self._buffer: SharedBuffer | None = None

    def get(self, path: str | Path, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] of the file, from the open mapping where there is one.

        Raises:
            ValueError: the file is missing or is not of the size.
        """
        current = self._buffer
        if current is None or current.path != Path(path) or current.nbytes != nbytes:
            self.close()
            self._buffer = SharedBuffer.attach(path, nbytes)
        assert self._buffer is not None
        return self._buffer.tensor

    def close(self) -> None:
        """Unmaps it."""
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None


def remove_leftovers(directory: Path = SHARED_MEMORY_DIR) -> list[Path]:
    """Removes this user's buffers whose owner was killed. Returns their paths."""
    removed = []
    for path in directory.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            if time.time() - os.fstat(file.fileno()).st_mtime < _LEFTOVER_AGE_S:
                continue
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
            removed.append(path)
    return removed


def _close_at_exit(reference: weakref.ref[SharedBuffer]) -> None:
    buffer = reference()
    if buffer is not None:
        buffer.close()
