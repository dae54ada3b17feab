"""``nccltune run``: puts the active profile into a command's environment and becomes the command.

Everything that can go wrong happens in child processes, one that decides and, beside it, one that
asks the driver; what is left here ends in the command. Not part of ``nccltune.cli``, so that a
launch does not wait for what draws tables and help.
"""

from __future__ import annotations

import errno
import gc
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nccltune.inject.apart import Errand, end, receive, start

EXIT_NO_PROFILE = 3
EXIT_OWN_FAULT = 125
EXIT_CANNOT_RUN = 126
EXIT_NOT_FOUND = 127
EXIT_INTERRUPTED = 130

LOOK_UP_TIMEOUT_S = 30.0
"""The driver takes seconds to answer on a host of many GPUs without its persistence daemon."""

USAGE = "usage: nccltune run [OPTIONS] -- COMMAND [ARGUMENT]..."
HELP = f"""{USAGE}

Start a server under the active profile: sets its environment and becomes it.

The command starts whatever happens: without a profile, with one of another
host or one that is broken it starts as it is, and stderr says so.

Options:
  --policy WHICH     Which SGLang launches get the profile: eagle3, speculative
                     or all. Default: what policy.json in the state folder
                     says, else eagle3.
  --any-host         Use the profile on a host that it was not made for, at
                     tensor parallel size 1 and over several nodes, too.
  --require-profile  End with status 3 instead of starting without a profile.
  --report-file F    Write what was decided to F, as JSON.
  -h, --help         Show this and exit.

Exit status: the command's own; 125 if nccltune itself cannot go on, 126 if
the command cannot be run, 127 if it is not found.
"""

_POLICIES = ("eagle3", "speculative", "all")
_HANDING_DOWN = ("sh", "bash", "dash", "ksh", "zsh", "systemd")
_MARKER, _NOTHING_APPLIED = "NCCLTUNE_APPLIED", "none:"
"""As ``nccltune.inject.marker`` has them, which is loaded in a child alone."""

_COERCED_LOCALES = ("C.UTF-8", "C.utf8", "UTF-8")


class UsageFault(Exception):
    """The command line of ``run`` itself makes no sense."""


@dataclass(slots=True)
class Options:
    """What was asked for."""

    command: tuple[str, ...] = ()
    policy: str | None = None
    report_path: str | None = None
    is_any_host: bool = False
    is_required: bool = False
    wants_help: bool = False


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns only where it cannot be, with the exit status."""
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _run(arguments: Sequence[str]) -> int:
    try:
        options = parse_options(arguments)
    except UsageFault as fault:
        _say(f"{fault}; see nccltune run --help")
        return EXIT_OWN_FAULT
    if options.wants_help:
        os.write(1, HELP.encode())
        return 0
    gc.disable()  # nothing here lives long enough, and looking for it takes part of the start
    _hold_standard_streams()
    environ = inherited_environ()
    program, status = find_command(options.command[0], environ)
    if program is None:
        return status
    tuned, has_profile = _tuned(options, environ)
    if options.is_required and not has_profile:
        return EXIT_NO_PROFILE
    problem = _become(program, options.command, tuned)
    if problem.errno == errno.E2BIG and not options.is_required:
        _say("warning: there is no room for the profile: the command starts WITHOUT it")
        for less in ({**environ, _MARKER: _NOTHING_APPLIED}, environ):
            problem = _become(program, options.command, less)
    _say(f"{options.command[0]}: {os.strerror(problem.errno or 0).lower()}")
    return EXIT_NOT_FOUND if problem.errno == errno.ENOENT else EXIT_CANNOT_RUN


def parse_options(arguments: Sequence[str]) -> Options:
    """Read the options; the first word that is none, or what follows ``--``, is the command.

    Raises:
        UsageFault: an unknown option, one without its value, or no command.
    """
    options = Options()
    words = list(arguments)
    while words:
        word = words.pop(0)
        if word == "--":
            break
        if not word.startswith("-") or word == "-":
            words.insert(0, word)
            break
        name, equals, value = word.partition("=")
        if name in ("--policy", "--report-file"):
            if not equals and not words:
                raise UsageFault(f"{name} needs a value")
            value = value if equals else words.pop(0)
            _set_value(options, name, value)
        elif word in _SWITCHES:
            setattr(options, _SWITCHES[word], True)
        else:
            raise UsageFault(f"no such option: {word}")
    if not words and not options.wants_help:
        raise UsageFault("no command given: nccltune run -- COMMAND")
    options.command = tuple(words)
    return options


_SWITCHES: Mapping[str, str] = {
    "--any-host": "is_any_host",
    "--require-profile": "is_required",
    "-h": "wants_help",
    "--help": "wants_help",
}


def _set_value(options: Options, name: str, value: str) -> None:
    if name == "--report-file":
        options.report_path = value
    elif value in _POLICIES:
        options.policy = value
    else:
        raise UsageFault(f"--policy {value}: it is one of {', '.join(_POLICIES)}")


def inherited_environ() -> dict[str, str]:
    """Return the environment as it was handed over.

    Python adds LC_CTYPE by itself where the locale is C or unset (PEP 538), and a server's own
    start should decide about that.
    """
    environ = dict(os.environ)
    if environ.get("LC_CTYPE") in _COERCED_LOCALES:
        try:
            block = Path("/proc/self/environ").read_bytes()
        except OSError:
            return environ
        if not any(entry.startswith(b"LC_CTYPE=") for entry in block.split(b"\0")):
            del environ["LC_CTYPE"]
    return environ


def find_command(name: str, environ: Mapping[str, str]) -> tuple[str | None, int]:
    """Find the file of a command as execvp does; without one, say so and name the exit status."""
    if "/" in name:
        candidates = [name]
    else:
        folders = environ.get("PATH", os.defpath).split(os.pathsep)
        candidates = [str(Path(folder or ".", name)) for folder in folders if name]
    existing = [path for path in candidates if os.path.exists(path)]  # noqa: PTH110 - "" is ""
    for path in existing:
        if os.access(path, os.X_OK) and not os.path.isdir(path):  # noqa: PTH112
            return path, 0
    if existing:
        _say(f"{name}: permission denied")
        return None, EXIT_CANNOT_RUN
    _say(f"{name}: command not found")
    return None, EXIT_NOT_FOUND


def _tuned(options: Options, environ: dict[str, str]) -> tuple[dict[str, str], bool]:
    """Return the environment for the command, and whether it holds the profile."""
    errands: list[Errand] = []
    try:
        try:
            gpus = start(lambda: _ask_driver(environ))
            errands.append(gpus)
            look_up = start(lambda: _look_up(options, environ, gpus))
            errands.append(look_up)
            answer = receive(look_up, LOOK_UP_TIMEOUT_S)
            tuned = answer["environ"]
            assert isinstance(tuned, dict)  # noqa: S101 - written by _look_up
        finally:
            signals = end(errands)
    except Exception as error:  # noqa: BLE001 - no fault of ours may cost a launch
        cause = " ".join([str(error), *(signals.get(each.pid, "") for each in errands[1:])])
        ending = "not started" if options.is_required else "the command starts WITHOUT a profile"
        _say(f"warning: nccltune failed ({cause}): {ending}")
        return environ, False
    return tuned, answer["has_profile"] is True


def _ask_driver(environ: dict[str, str]) -> dict[str, object]:
    """Read the GPUs; runs in a child of its own, while the other one looks at everything else."""
    from nccltune.errors import NccltuneError
    from nccltune.host.facts import read_visible

    try:
        facts = read_visible(environ, is_last=True)
    except NccltuneError as error:
        return {"problem": str(error)}
    return {"fingerprint": facts.fingerprint.to_json(), "architecture": facts.gpu_architecture}


def _look_up(options: Options, environ: dict[str, str], gpus: Errand) -> dict[str, object]:
    """Decide, tell and write down; runs in the child."""
    # Loaded here, in the child: an installation that is broken costs no launch.
    from nccltune.inject.decision import apply, decide
    from nccltune.inject.driver_answer import driver_answer
    from nccltune.inject.run_report import describe, write_report
    from nccltune.live.launch_inbox import put_on_record
    from nccltune.store import Launches

    # The child's parent is the process that becomes the command.
    decision, record = decide(
        options.command,
        environ,
        is_any_host=options.is_any_host,
        launches=None if options.policy is None else Launches(options.policy),
        pid=os.getppid(),
        read_gpus=lambda seen: driver_answer(gpus, environ, seen),
    )
    is_refused = options.is_required and not decision.is_applied
    for line in describe(decision, is_refused=is_refused):
        _say(line)
    if options.report_path is not None:
        try:
            write_report(Path(options.report_path), decision, is_refused=is_refused)
        except Exception as error:  # noqa: BLE001 - the launch goes on
            _say(f"warning: {error}")
    if not is_refused:
        try:
            put_on_record(record, environ)
        except Exception as error:  # noqa: BLE001 - the launch goes on
            _say(f"warning: this launch is not on record: {error}")
    return {"environ": apply(environ, decision), "has_profile": decision.is_applied}


def _become(program: str, command: Sequence[str], environ: Mapping[str, str]) -> OSError:
    """Replace this process by the command; returns why, where that cannot be done."""
    # Python ignores these for itself, and a command would inherit that.
    handed_down = _handed_down()
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        is_ignored = handed_down >> (number - 1) & 1
        signal.signal(number, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
    try:
        os.execve(program, list(command), environ)  # noqa: S606 - what the operator asked for
    except OSError as error:
        if error.errno != errno.ENOEXEC:
            return error
    try:
        # A script without its first line is the shell's, as for execvp.
        os.execve("/bin/sh", ["/bin/sh", program, *command[1:]], environ)  # noqa: S606
    except OSError as error:
        return error


def _handed_down() -> int:
    """Return which signals we were started to ignore, as the kernel's bit mask, if that shows.

    What Python ignores for itself hides it. A shell and systemd hand down what they ignore, and
    show it; of other programs nobody knows.
    """
    try:
        rows = Path(f"/proc/{os.getppid()}/status").read_text(errors="replace").splitlines()
        facts = dict(row.split(":", 1) for row in rows)
        return int(facts["SigIgn"], 16) if facts["Name"].strip() in _HANDING_DOWN else 0
    except (OSError, ValueError, KeyError):
        return 0


def _hold_standard_streams() -> None:
    """Keep pipes of ours from taking the place of a closed stream, until the command has begun."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number; closed again at exec


def _say(text: str) -> None:
    """Write one line to stderr, whole; nobody may be there to read it."""
    line = "".join(char if char.isprintable() else " " for char in text)
    try:
        os.write(2, f"nccltune: {line}\n".encode(errors="replace"))
    except OSError:
        return
