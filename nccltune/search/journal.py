"""The study on disk: an Optuna journal that survives being killed at any instant.

And the lock that keeps others out.

Optuna 5.0.0, tried: a journal with a half-written last line opens, but the next append makes it
unreadable for good; a lock file left by a killed process stalls the next for 30 s; trials that were
running stay so for ever, and one that was enqueued but not yet asked for is handed out in place of
the next. Hence a lock of our own first, then the torn tail is cut, the stale lock removed and the
left trials told as failed.
"""

from __future__ import annotations

import errno
import json
import os
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import TrialState

from nccltune.bench.host_lock import SEARCH, host_lock
from nccltune.errors import FileError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

STUDY_NAME = "nccltune"
PLAN_KEY = "nccltune.plan"
TRIAL_COUNT = "trial_count"
"""In the plan, and the one thing there that may change."""

LOCK_GRACE_S = 30

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PLAN_WORDS = {
    "base": "NCCL variables in the environment",
    "fingerprint": "GPUs, driver or NCCL",
    "workload": "payloads",
}

DAMAGE = (
    KeyError,
    ValueError,
    TypeError,
    IndexError,
    AttributeError,
    AssertionError,
    optuna.exceptions.OptunaError,
)
"""What reading a journal raises whose lines are whole but do not fit each other."""


@contextmanager
def search_lock(path: Path) -> Iterator[None]:
    """Hold the lock that only one search or verify on a host can have.

    Raises:
        BusyError: another one holds it.
        FileError: the folder cannot be written.
    """
    with host_lock(path, SEARCH):
        yield


def open_study(path: Path, plan: dict[str, object], *, is_resume: bool) -> optuna.Study:
    """Create a study, or open the one that a stopped search left. Call it under ``search_lock``.

    Args:
        path: the journal file.
        plan: what makes trials comparable (workload, host, base environment); kept in the study and
            compared on resume.
        is_resume: open what is there; else an old journal is set aside as ``NAME.old``.

    Raises:
        FileError: nothing to resume, a damaged journal, or one of another workload or host.
    """
    if is_resume and not path.exists():
        raise FileError(path, "there is no search to resume; run without --resume", code="no_study")
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # its news are not for our terminal
    try:
        _remove_stale_locks(path)
        if is_resume:
            _mend(path)
        elif path.exists():
            path.replace(path.with_suffix(path.suffix + ".old"))
        storage = _storage(path)
        study = optuna.create_study(
            study_name=STUDY_NAME,
            storage=storage,
            sampler=optuna.samplers.RandomSampler(),  # never asked: what is tried is decided before
            direction="minimize",
            load_if_exists=is_resume,
        )
        _compare_plan(study, plan, path)
        _fail_unfinished(study)
    except OSError as error:
        raise FileError(path, f"cannot be used: {error.strerror}") from error
    except DAMAGE as error:
        raise damaged_study(path, error) from error
    return study


def keep_trial_count(study: optuna.Study, asked: int | None, default: int) -> int:
    """Return how many trials a study is to have, and keep it for those who resume it.

    Args:
        study: the study, whose plan names what was asked for before.
        asked: for now; None for what it was asked for before.
        default: for one that does not name it.
    """
    plan = study.user_attrs[PLAN_KEY]
    kept: int = plan.get(TRIAL_COUNT, default)
    if asked is None or asked == kept:
        return kept
    study.set_user_attr(PLAN_KEY, {**plan, TRIAL_COUNT: asked})
    return asked


def damaged_study(path: Path, error: Exception) -> FileError:
    """Say that a journal is damaged where no single line can be named."""
    reason = f"is damaged ({type(error).__name__}: {error}); move it away and search anew"
    return FileError(path, reason, code="damaged_study")


class _Backend(JournalFileBackend):
    """A journal file whose failure to be written becomes one line for people."""

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Add lines.

        Raises:
            FileError: usually a full disk; what was told before stays good.
        """
        try:
            super().append_logs(logs)
        except OSError as error:
            reason = f"cannot be written: {error.strerror}"
            cure = "make room" if error.errno in _NO_ROOM else "put that right"
            advice = f"all finished trials are kept; {cure}, then go on with --resume"
            raise FileError(self._file_path, f"{reason}; {advice}", code="study_write") from error


class _Lock(JournalFileOpenLock):
    """Optuna's lock; an interrupt while it is being taken stays an interrupt."""

    def release(self) -> None:
        """Let go, also of what was not held yet."""
        try:
            with suppress(RuntimeError):
                super().release()
        except OSError as error:
            # Interrupted once the file was gone, Optuna 5.0.0 removes it a second time and fails.
            if isinstance(error.__context__, KeyboardInterrupt):
                raise error.__context__ from None
            raise


def _storage(path: Path) -> JournalStorage:
    lock = _Lock(str(path), grace_period=LOCK_GRACE_S)
    return JournalStorage(_Backend(str(path), lock_obj=lock))


def _fail_unfinished(study: optuna.Study) -> None:
    """Tell as failed what a killed process left running, or enqueued and not asked for."""
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        study.tell(trial.number, state=TrialState.FAIL)
    while study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
        study.tell(study.ask(), state=TrialState.FAIL)


def _remove_stale_locks(path: Path) -> None:
    for stale in path.parent.glob(path.name + ".lock*"):
        stale.unlink()


def _mend(path: Path) -> None:
    """Cut a half-written last line; refuse damage further up."""
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    for number, line in enumerate(content[:whole].splitlines(), start=1):
        if not _is_operation(line):
            text = line.decode(errors="replace")
            reason = "is damaged; move it away and search anew"
            raise FileError(path, reason, line=number, text=text, code="damaged_study")
    if whole < len(content):
        with path.open("r+b") as handle:
            handle.truncate(whole)
            os.fsync(handle.fileno())


def _is_operation(line: bytes) -> bool:
    try:
        operation = json.loads(line)
    except ValueError:
        return False
    return isinstance(operation, dict) and "op_code" in operation


def _compare_plan(study: optuna.Study, plan: dict[str, object], path: Path) -> None:
    before = study.user_attrs.get(PLAN_KEY)
    if before is None:
        study.set_user_attr(PLAN_KEY, plan)
        return
    now = json.loads(json.dumps(plan))  # as the journal has it: lists for tuples
    compared = {*now, *before} - {TRIAL_COUNT}
    differing = sorted(k for k in compared if now.get(k) != before.get(k))
    if differing:
        named = ", ".join(_PLAN_WORDS.get(name, name) for name in differing)
        reason = (
            f"belongs to another search ({named} differ); run without --resume, "
            f"and this one is kept as {path.name}.old"
        )
        raise FileError(path, reason, code="other_study")
