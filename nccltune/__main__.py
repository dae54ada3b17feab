"""``python -m nccltune``."""

from __future__ import annotations

import sys

from nccltune.entry import main

if __name__ == "__main__":
    sys.exit(main())
