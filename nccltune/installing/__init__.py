"""Puts units and the hook onto a host and takes them away again, step by step, each told before."""

from __future__ import annotations

from nccltune.installing.hook import Interpreter, find_interpreters, hook_files, read_interpreter
from nccltune.installing.places import Places
from nccltune.installing.plan import Request, plan_install, plan_uninstall
from nccltune.installing.steps import Action, Plan, Step, carry_out

__all__ = [
    "Action",
    "Interpreter",
    "Places",
    "Plan",
    "Request",
    "Step",
    "carry_out",
    "find_interpreters",
    "hook_files",
    "plan_install",
    "plan_uninstall",
    "read_interpreter",
]
