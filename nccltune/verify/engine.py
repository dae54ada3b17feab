"""One verify from its first boot to its last: every arm in turn, one server at a time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from nccltune.bench.host_lock import VERIFY, host_lock, host_lock_path
from nccltune.errors import FileError, NccltuneError, ServerError
from nccltune.sglang.command import parse_launch
from nccltune.verify.plan import boot_order, ends_round
from nccltune.verify.record import Problem, logs_dir, newest_records, save
from nccltune.verify.resuming import begin_record
from nccltune.verify.sameness import (
    check_boot,
    check_flags,
    hidden,
    resolved_flags,
    visible,
    without_secrets,
)
from nccltune.verify.serving.boots import Booter
from nccltune.verify.serving.memory import MemoryWatch
from nccltune.verify.serving.preflight import Ground, ReadyArm, prepare
from nccltune.verify.spec import DEFAULT_BOOTS, VerifyProgress, VerifyStage

if TYPE_CHECKING:
    from nccltune.supervise import Moment
    from nccltune.verify.model import Boot
    from nccltune.verify.record import VerifyRecord
    from nccltune.verify.spec import VerifyObserver, VerifySpec

_LOOKED_AT = 20
"""Verifies, the newest, among which one of the same launch is looked for."""


def run_verify(spec: VerifySpec, observer: VerifyObserver) -> VerifyRecord:
    """Start and measure every arm in turn; each boot is kept at once.

    A boot that gives no numbers ends it, with the reason among the record's problems. Ctrl-C ends
    it too, and the server with it; so does what stands in the way between two boots (a full disk, a
    port that somebody took): the record says why it stopped.

    Raises:
        UsageProblem: arms or boots that make no sense.
        FileError: a file that the launch names is not there, there is nothing to resume, or the
            state folder cannot be written.
        ServerError: the program of the launch is not there.
        BusyError: the port is in use, or a search or verify runs on this host.
        HostError: the driver does not answer before there is a boot.
    """
    boot_order(len(spec.arms), spec.boots or DEFAULT_BOOTS)  # refused before anything is begun
    with host_lock(host_lock_path(), VERIFY):
        ground = prepare(spec)
        record = begin_record(spec, ground)
        if spec.on_begin is not None:
            spec.on_begin(record)
        order = boot_order(len(spec.arms), record.boots_planned)
        return _Verify(spec, observer, ground, record).run(order)


def stored_boot_s(launch: Sequence[str]) -> float | None:
    """Return how long a boot of this launch takes, by the newest verify that has one.

    None where none of the newest is of this launch.

    Raises:
        FileError: the state folder cannot be read.
    """
    kept = hidden(launch)
    for record in newest_records(limit=_LOOKED_AT):
        if record.launch == kept and not record.url and record.boots:
            times = [_boot_s(boot) for boot in record.boots]
            return sum(times) / len(times)
    return None


class _Verify:
    def __init__(
        self, spec: VerifySpec, observer: VerifyObserver, ground: Ground, record: VerifyRecord
    ) -> None:
        self._spec, self._observer, self._ground, self._record = spec, observer, ground, record
        self._began_s = time.monotonic()
        self._made_count = 0
        self._boot_s = spec.boot_s
        self._arm, self._position = spec.arms[0].name, 0
        uuids = () if ground.fingerprint is None else ground.fingerprint.gpu_uuids
        memory = MemoryWatch(uuids)
        for text in memory.others():
            self._note(text)
        self._booter = Booter(
            spec.load,
            spec.limits,
            memory,
            on_moment=lambda moment: self._tell(VerifyStage.START, moment=moment),
            on_measure=lambda text: self._tell(VerifyStage.MEASURE, note=text),
            on_stop=lambda: self._tell(VerifyStage.STOP),
            note=self._note,
        )

    def run(self, order: Sequence[int]) -> VerifyRecord:
        """Make the boots that are left; whatever ends them, what is known is kept."""
        self._save()
        try:
            while not self._is_done(len(order)):
                self._boot(self._ground.arms[order[len(self._record.boots)]])
        except ServerError as error:
            self._keep_problem(error, len(order))
            return self._record
        except KeyboardInterrupt:
            return replace(self._record, is_interrupted=True)
        except NccltuneError as error:
            if not self._record.boots:
                raise
            return replace(self._record, stopped=error)
        self._record = replace(self._record, is_finished=True)
        self._save()
        with suppress(OSError):
            logs_dir(self._record.id).rmdir()
        return self._record

    def _boot(self, ready: ReadyArm) -> None:
        self._arm, self._position = ready.arm.name, len(self._record.boots)
        check_flags(ready.flags, resolved_flags(parse_launch(ready.arm.argv)))
        boot = self._booter.boot(ready, self._position, self._log_path)
        check_boot(boot, self._record.boots)
        self._log_path.unlink(missing_ok=True)
        self._made_count += 1
        self._boot_s = self._elapsed_s / self._made_count
        self._record = replace(self._record, boots=(*self._record.boots, boot))
        self._save()
        self._tell(VerifyStage.STOP, boot=boot)
        self._booter.settle()

    @property
    def _log_path(self) -> Path:
        return logs_dir(self._record.id) / f"{self._position:02d}.log"

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began_s

    def _is_done(self, boot_total: int) -> bool:
        done = len(self._record.boots)
        if done >= boot_total:
            return True
        is_decided = self._spec.is_decided
        is_whole = ends_round(len(self._spec.arms), done)
        return is_whole and is_decided is not None and is_decided(self._record)

    def _keep_problem(self, error: ServerError, boot_total: int) -> None:
        log_path = str(self._log_path)
        text = without_secrets(str(error), self._spec.launch)
        message = f"boot {self._position + 1} of {boot_total} (arm {self._arm}): {text}"
        if self._log_path.exists():
            message += f"; its output: {log_path}"
        else:
            log_path = ""
        problem = Problem(self._arm, self._position, error.code, visible(message), log_path)
        self._record = replace(self._record, problems=(problem,))
        with suppress(FileError):  # a full disk; the answer says so when it is kept
            self._save()

    def _note(self, text: str) -> None:
        text = visible(text)
        if text not in self._record.notes:
            self._record = replace(self._record, notes=(*self._record.notes, text))

    def _save(self) -> None:
        save(self._record)

    def _tell(
        self,
        stage: VerifyStage,
        *,
        moment: Moment | None = None,
        note: str = "",
        boot: Boot | None = None,
    ) -> None:
        done = len(self._record.boots)
        left_s = None
        if self._boot_s is not None:
            left_s = self._boot_s * (self._record.boot_total - done)
        self._observer.update(
            VerifyProgress(
                stage=stage,
                arm=self._arm,
                position=self._position,
                boot_total=self._record.boot_total,
                elapsed_s=self._elapsed_s,
                remaining_s=left_s,
                moment=moment,
                note=note,
                boot=boot,
            )
        )


def _boot_s(boot: Boot) -> float:
    runs_s = sum(run.duration_s for run in boot.runs)
    guards_s = 1e-3 * (sum(boot.ttft_short_ms) + sum(boot.ttft_long_ms))
    return boot.start_s + runs_s + guards_s
