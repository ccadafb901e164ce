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
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardlab.errors import UsageError
from shardlab.files import text_of

NAME = "run.lock"
HELD = (errno.EACCES, errno.EAGAIN)
WRITTEN_S = 2.0  # after which a holder that has not said who it is stays unknown
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class RunLock:
    """The lock of at most one folder. ``take`` refuses where another process has it.

    Without ``keeps`` the file goes with the lock.
    """

    def __init__(self, keeps: bool = True) -> None:
        self.folder: Path | None = None
        self.keeps = keeps
        self.token = secrets.token_hex(8)  # in the file: ranks recognise the folder by it
        self._handle: int | None = None
        # A forked process (a data loader's worker) would keep the lock after this one has ended.
        os.register_at_fork(after_in_child=self._close)

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_error: object) -> None:
        if self.folder is not None and not self.keeps:
            (self.folder / NAME).unlink(missing_ok=True)
        self._close()

    def _close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
        self.folder = self._handle = None

    def take(self, folder: Path) -> None:
        """Raises ``UsageError`` if another run has the folder, ``OSError`` if it is unwritable."""
        if self.folder == folder:
            return
        handle = os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                os.close(handle)
                if error.errno not in HELD:
                    raise
                by = _holder(folder / NAME)
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


def _holder(file: Path) -> dict[str, Any]:
    """Who has the lock: its holder writes it a moment after it has taken the lock."""
    limit = time.monotonic() + WRITTEN_S
    while not (found := table_in(file)) and time.monotonic() < limit:
        time.sleep(0.01)
    return found


def is_held(folder: Path) -> bool | None:
    """Whether another process has the folder's lock; None if there is no lock to ask."""
    try:
        handle = os.open(folder / NAME, os.O_RDWR | os.O_NOFOLLOW)
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
    with suppress(OSError, ValueError, RecursionError):
        content = json.loads(text_of(path))
        return content if isinstance(content, dict) else {}
    return {}
