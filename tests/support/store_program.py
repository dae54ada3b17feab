"""One step of the store as a process of its own, for tests that kill it on the way.

    python -m tests.support.store_program activate two

Everything is loaded before the step begins, and ``getpgid(1)`` marks where that is.
"""

from __future__ import annotations

import os
import sys
import tempfile

from nccltune.profile import Profile
from nccltune.store import activate, deactivate, profiles_dir, read_active, rollback, save_candidate

ONE = Profile("one", {"NCCL_PROTO": "allreduce:LL"})
TWO = Profile("two", {"NCCL_PROTO": "allreduce:Simple"})
BETTER = Profile("one", {"NCCL_PROTO": "allreduce:LL128"})


def main(step: str) -> None:
    """Take one step."""
    read_active()
    with tempfile.TemporaryFile():  # loads what makes names
        os.getpgid(1)
    if step == "activate":
        activate("two", reason="manual")
    elif step == "activate-shipped":
        activate("folk-ll-ring", reason="manual")
    elif step == "rollback":
        rollback()
    elif step == "off":
        deactivate()
    else:
        save_candidate(BETTER)
    os.getpgid(1)


if __name__ == "__main__":
    profiles_dir()
    main(sys.argv[1])
