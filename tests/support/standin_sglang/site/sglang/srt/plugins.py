"""Plugins as SGLang 0.5.15 loads them: entry points, once a process, faults logged and dropped."""

from __future__ import annotations

import logging
import os
from importlib.metadata import entry_points

from sglang.version import is_at_least

GENERAL_PLUGINS_GROUP = "sglang.srt.plugins"
logger = logging.getLogger(__name__)
_loaded: list[bool] = []


def load_plugins() -> None:
    """Run every plugin that SGLANG_PLUGINS does not leave out."""
    if _loaded or not is_at_least(0, 5, 12):
        return
    _loaded.append(True)
    allowed = {name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",")} - {""}
    callables = {}
    for found in entry_points(group=GENERAL_PLUGINS_GROUP):
        if allowed and found.name not in allowed:
            logger.info("Skipping plugin %s (not in SGLANG_PLUGINS)", found.name)
            continue
        try:
            callables[found.name] = found.load()
            logger.info("Loaded plugin %s from group %s", found.name, GENERAL_PLUGINS_GROUP)
        except Exception:
            logger.exception(
                "Failed to load plugin %s from group %s", found.name, GENERAL_PLUGINS_GROUP
            )
    for name, run in callables.items():
        try:
            run()
            logger.info("Executed general plugin: %s", name)
        except Exception:
            logger.exception("Failed to execute general plugin: %s", name)
