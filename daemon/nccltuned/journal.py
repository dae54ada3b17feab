"""What the journal gets to read: one line a fact, and only what is new."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from nccltune.live.drift import KeyState, Verdict

logger = logging.getLogger("nccltuned")

MAX_LINES_PER_SERVER = 64
_PRIORITIES = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3}
_STANDING = ("name", "digest", "problem", "match", "is_degraded", "differing", "stale")
_CALM = frozenset({Verdict.IN_EFFECT, Verdict.STARTING, Verdict.NOTHING_EXPECTED})
_TOLD = frozenset({KeyState.LOST, KeyState.OVERRIDDEN_BY_SGLANG, KeyState.SET_BY_OPERATOR})


class _Formatter(logging.Formatter):
    """One line, with systemd's priority in front where systemd reads it."""

    def __init__(self, *, has_priority: bool) -> None:
        super().__init__("%(message)s" if has_priority else "nccltuned: %(levelname)s: %(message)s")
        self._has_priority = has_priority

    def format(self, record: logging.LogRecord) -> str:
        """Fold a record into its line."""
        text = super().format(record).replace("\n", " | ")
        line = "".join(char if char.isprintable() else "?" for char in text)
        return f"<{_PRIORITIES.get(record.levelno, 6)}>{line}" if self._has_priority else line


def open_journal(*, is_verbose: bool) -> None:
    """Send log lines to stderr, where systemd or a terminal takes them."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(has_priority="JOURNAL_STREAM" in os.environ))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.DEBUG if is_verbose else logging.INFO)
    # A log that cannot be written is no reason to stop.
    logging.raiseExceptions = False


def tell_changes(before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> None:
    """Log what is new in a stock, as ``Stock.to_json`` lays it out."""
    if before is None or _standing(before["active"]) != _standing(now["active"]):
        _tell_profile(now["active"])
    if before is None or before["warnings"] != now["warnings"]:
        for warning in now["warnings"]:
            logger.warning("%s", warning)
    known = {} if before is None else {server["pid"]: server for server in before["servers"]}
    for server in now["servers"]:
        if known.pop(server["pid"], None) != server:
            _tell_server(server)
    for pid in known:
        logger.info("server is gone: pid=%s", pid)


def _standing(active: Mapping[str, Any]) -> tuple[object, ...]:
    """Return what is worth a line when it changes; what is not known yet is not."""
    return tuple(active[name] for name in _STANDING)


def _tell_profile(active: Mapping[str, Any]) -> None:
    name = active["name"]
    if active["problem"]:
        logger.error(
            "the active profile cannot be used, and servers start without one: profile=%s "
            "problem=%s run=%s",
            name,
            active["problem"],
            active["advice"],
        )
    elif name is None:
        logger.info("no profile is active")
    elif active["is_degraded"]:
        logger.error(
            "the active profile does not hold on this host, and servers start without it: "
            "profile=%s differing=%s unknown=%s run=%s",
            name,
            ",".join(active["differing"]) or "-",
            active["unknown"] or "-",
            active["advice"],
        )
    elif active["is_stale"]:
        logger.warning(
            "the active profile is stale, it is used unverified: profile=%s changed=%s run=%s",
            name,
            ", ".join(active["stale"]),
            active["advice"],
        )
    else:
        match = active["match"] or "not compared"
        logger.info("profile is active: profile=%s host=%s", name, match)


def _tell_server(server: Mapping[str, Any]) -> None:
    is_calm = server["verdict"] in _CALM
    logger.log(
        logging.INFO if is_calm else logging.WARNING,
        "server: pid=%s verdict=%s ranks=%s profile=%s reason=%s%s",
        server["pid"],
        server["verdict"],
        len(server["ranks"]),
        server["expected_profile"] or "-",
        server["reason"],
        f" fix={server['fix']}" if server["fix"] else "",
    )
    lines = list(_drift_lines(server))
    for line in lines[:MAX_LINES_PER_SERVER]:
        logger.warning("%s", line)
    if len(lines) > MAX_LINES_PER_SERVER:
        logger.warning("and %s more, see nccltune status", len(lines) - MAX_LINES_PER_SERVER)


def _drift_lines(server: Mapping[str, Any]) -> Iterator[str]:
    for rank in server["ranks"]:
        unreadable = [key["key"] for key in rank["keys"] if key["state"] == KeyState.UNREADABLE]
        if unreadable:
            yield (
                f"unreadable: pid={rank['pid']} rank={rank['rank']} keys={','.join(unreadable)} "
                f"why={rank['problem'] or 'set by a configuration file'}"
            )
        for key in rank["keys"]:
            if key["state"] in _TOLD:
                yield (
                    f"{key['state']}: pid={rank['pid']} rank={rank['rank']} key={key['key']} "
                    f"expected={key['expected']} actual={key['actual'] or '(not set)'} "
                    f"source={key['source'] or '-'} why={key['note'] or '-'}"
                )


def summary(stock: Mapping[str, Any] | None) -> str:
    """Return the line of ``systemctl status``."""
    if stock is None:
        return "nothing is known of this host yet"
    active = stock["active"]
    name = active["name"] or "no profile"
    standing = active["match"] or "not compared"
    if active["problem"]:
        name, standing = active["name"] or "profile", "cannot be used"
    elif active["name"] is None:
        return f"no profile is active, {_count(stock)}"
    elif active["is_degraded"]:
        standing = "not used on this host"
    elif active["is_stale"]:
        standing = "stale"
    return f"{name} ({standing}), {_count(stock)}"


def _count(stock: Mapping[str, Any]) -> str:
    servers = stock["servers"]
    if not servers:
        return "no server runs"
    verdicts = sorted({server["verdict"].replace("_", " ") for server in servers})
    return f"{len(servers)} server{'s' if len(servers) > 1 else ''}: {', '.join(verdicts)}"
