"""A profile as a file that other programs read: containers, systemd, shells, NCCL itself.

Pure. Such a file is unconditional: its reader knows no command and no host, and sets everything.
"""

from __future__ import annotations

from nccltune.export.formats import EXPORTS, ExportFormat, format_lines
from nccltune.export.profile_text import export_profile, export_warnings

__all__ = ["EXPORTS", "ExportFormat", "export_profile", "export_warnings", "format_lines"]
