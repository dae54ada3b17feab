"""One service a store: two on one folder would count the same failures, and both roll back."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

LOCK_NAME = "nccltuned.lock"


@dataclass(slots=True)
class Keeper:
    """Asks for the place of the one that rolls back; it goes with its process, however that ends.

    Attributes:
        folder: the state folder.
    """

    folder: Path
    _descriptor: int = -1

    def is_held(self) -> bool:
        """Tell whether the place is this service's, and take it where it is free.

        Where nothing can be locked there is nobody to fall out with: a folder that cannot be
        written is rolled back by no one.
        """
        path = self.folder / LOCK_NAME
        if self._descriptor >= 0 and not self._is_same(path):
            self.close()
        if self._descriptor >= 0:
            return True
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            descriptor = os.open(path, flags, 0o600)
        except OSError:
            return True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        except OSError:
            pass  # a file system without locks
        self._descriptor = descriptor
        return True

    def close(self) -> None:
        """Let somebody else have it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _is_same(self, path: Path) -> bool:
        """Whether the locked file is still the one of that name."""
        with suppress(OSError):
            return os.path.samestat(path.stat(), os.fstat(self._descriptor))
        return False
