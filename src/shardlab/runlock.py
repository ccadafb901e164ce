"""One run in a folder at a time: a lock that the process of rank 0 holds while it trains. No torch.

The lock is the system's (``flock`` on ``run.lock``), which drops it when the process ends, however
it ends: nothing has to be cleaned up after a crash. Over NFS it is seen from every host. Where a
file system has no locks (some mounts of Lustre), only ``status.json`` says that a run is there.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import shutil
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardlab.errors import UsageError

NAME = "run.lock"
HELD = (errno.EACCES, errno.EAGAIN)
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class RunLock:
    """The lock of at most one folder. ``take`` refuses where another process has it."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.token = secrets.token_hex(8)  # in the file: ranks recognise the folder by it
        self._handle: int | None = None
        # A forked process (a data loader's worker) would keep the lock after this one has ended.
        os.register_at_fork(after_in_child=self._close)

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_error: object) -> None:
        self._close()

    def _close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
        self.folder = self._handle = None

    def take(self, folder: Path) -> None:
        """Raises ``UsageError`` if another run has the folder, ``OSError`` if it is unwritable."""
        if self.folder == folder:
            return
        handle = os.open(folder / NAME, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                by = table_in(folder / NAME)
                os.close(handle)
                if error.errno not in HELD:
                    raise
                raise UsageError(
                    f"{folder} belongs to a run that is still active: process "
                    f"{by.get('pid', '?')} on {by.get('host', '?')}; wait for it, or choose "
                    "another folder with --out"
                ) from None
        self.folder, self._handle = folder, handle
        about = {"pid": os.getpid(), "host": socket.gethostname(), "token": self.token}
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(about).encode(), 0)
        os.fsync(handle)  # over NFS other hosts see it only then

    def discard(self) -> None:
        """Remove the folder: it is new, and its run has been refused."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
        self._close()


def is_held(folder: Path) -> bool | None:
    """Whether another process has the folder's lock; None if there is no lock to ask."""
    try:
        handle = os.open(folder / NAME, os.O_RDWR)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return True if error.errno in HELD else None
    else:
        return False
    finally:
        os.close(handle)


def table_in(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if it cannot be read."""
    with suppress(OSError, ValueError):
        content = json.loads(path.read_text(encoding="utf-8"))
        return content if isinstance(content, dict) else {}
    return {}
