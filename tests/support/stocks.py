"""Stocks as the service gets them from its child."""

from __future__ import annotations

from typing import Any


def active_data(**changes: Any) -> dict[str, Any]:
    """Return an active profile that holds on this host."""
    return {
        "name": "mine",
        "digest": "a" * 16,
        "settings": {"NCCL_ALGO": "allreduce:ring", "NCCL_THREAD_THRESHOLDS": "8 8 64 8 8 64"},
        "path": "/state/profiles/mine.json",
        "previous": None,
        "how": "manual",
        "action": "activate",
        "activated_at": "2026-11-29T12:00:00+00:00",
        "is_degraded": False,
        "problem": None,
        "match": "identical",
        "differing": [],
        "is_stale": False,
        "stale": [],
        "unknown": None,
        "advice": None,
        **changes,
    }


def server_data(pid: int = 100, verdict: str = "in_effect", *states: str) -> dict[str, Any]:
    """Return a server with one rank a state, each with one variable."""
    ranks = [
        {
            "pid": pid + 1 + idx,
            "rank": f"TP{idx}",
            "problem": "wiped" if state == "unreadable" else None,
            "keys": [
                {
                    "key": "NCCL_ALGO",
                    "expected": "allreduce:ring",
                    "actual": None if state in ("lost", "unreadable") else "x",
                    "state": state,
                    "source": None,
                    "note": "why",
                }
            ],
        }
        for idx, state in enumerate(states)
    ]
    return {
        "pid": pid,
        "verdict": verdict,
        "expected_profile": "mine",
        "reason": "profile mine is expected",
        "fix": None,
        "ranks": ranks,
    }


def stock_data(*servers: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return the whole."""
    return {"active": active_data(**changes), "servers": list(servers), "warnings": []}
