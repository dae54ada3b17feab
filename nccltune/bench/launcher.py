"""A bench on real GPUs: every launch starts all ranks afresh and leaves nothing behind."""

from __future__ import annotations

import itertools
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from nccltune.bench.gpu_watch import GpuWatch
from nccltune.bench.host import HostPlan, rank_environ
from nccltune.bench.leftovers import list_segments, make_folder, remove_segments
from nccltune.bench.nccl_log import NcclReport, parse_nccl_log
from nccltune.bench.prepared import PreparedServer, ServerGone
from nccltune.bench.rank import FAULT_VARIABLE, RankJob, RankSamples, Role
from nccltune.bench.ranks import RankFault, Ranks, host_outcome
from nccltune.measurement import (
    KeepGoing,
    Launch,
    Outcome,
    PayloadMeasurement,
    PayloadRequest,
    Settings,
)

DEFAULT_DEADLINE_S = 30.0
DEVICE_MODULE = "nccltune.bench.device"
COMMUNICATORS_PER_SERVER = 2
"""SGLang keeps two on the tensor-parallel group: its own for graphs, torch's for everything
else."""

_LOOKUP = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV,TUNING"}


class GpuBench:
    """Measures settings on real GPUs (``nccltune.measurement.Bench``).

    Args:
        plan: which rank runs on which GPU and cores.
        base: NCCL and CUDA variables that hold in every launch, below the settings: what SGLang
            sets by itself and what the operator has set.
        deadline_s: for one launch, from its first process to its last.
        is_fresh: start new interpreters for every launch instead of forking; only to measure what
            forking saves.
        watch: sees whether the GPUs are ours alone and their memory comes back; none by default.
        device_module: what ranks drive; tests give a stand-in.

    Raises:
        RankError: rank processes cannot be started at all.
    """

    def __init__(
        self,
        plan: HostPlan,
        base: Mapping[str, str],
        *,
        deadline_s: float = DEFAULT_DEADLINE_S,
        is_fresh: bool = False,
        watch: GpuWatch | None = None,
        device_module: str = DEVICE_MODULE,
        test_fault: str = "",
    ) -> None:
        self._plan = plan
        self._base = dict(base)
        self._deadline_s = deadline_s
        self._is_fresh = is_fresh
        self._watch = watch or GpuWatch()
        self._device_module = device_module
        self._test_fault = test_fault
        self._seeds = itertools.count(1)
        self._leaving: Ranks | None = None
        self._folder = make_folder()
        try:
            self._server = self._start_server()
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    @property
    def source(self) -> str:
        """Where the numbers come from."""
        return "shared-gpu" if self._plan.is_shared else "gpus"

    @property
    def versions(self) -> dict[str, str]:
        """Versions of torch and of the NCCL that is really loaded."""
        return self._server.versions

    def nearest(self, proposal: Settings, tried: Sequence[Settings]) -> Settings:
        """Return the proposal: real GPUs can measure anything, also again."""
        del tried
        return proposal

    def baseline_launches(self) -> Sequence[Launch]:
        """Return nothing: real GPUs measure the baseline afresh."""
        return ()

    def launch(
        self,
        settings: Settings,
        requests: Sequence[PayloadRequest],
        *,
        keep_going: KeepGoing | None = None,
    ) -> Launch:
        """Measure payloads in order under settings."""

        def work(ranks: Ranks, record: _Record) -> None:
            for request in requests:
                measured = self._measure(ranks, request)
                record.payloads.append(measured)
                if not measured.is_data_ok:
                    message = f"wrong data in an all-reduce of {request.size_bytes} B"
                    raise RankFault(Outcome.WRONG_DATA, message, None)
                is_last = len(record.payloads) == len(requests)
                if keep_going is not None and not keep_going(measured) and not is_last:
                    record.is_pruned = True
                    return

        return self._run(settings, {}, work)

    def inspect(self, settings: Settings, requests: Sequence[PayloadRequest]) -> NcclReport:
        """Look up what NCCL really does under settings, in an untimed launch with its log on.

        An empty report means that the launch failed.
        """
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        once = [PayloadRequest(r.size_bytes, 1, replay_count=1, warmup_count=0) for r in requests]

        def work(ranks: Ranks, record: _Record) -> None:
            for request in once:
                record.payloads.append(self._measure(ranks, request))

        self._run(settings, {**_LOOKUP, "NCCL_DEBUG_FILE": str(folder / "%p")}, work)
        logs = [path.read_text(errors="replace").splitlines() for path in sorted(folder.iterdir())]
        shutil.rmtree(folder, ignore_errors=True)
        return parse_nccl_log(itertools.chain.from_iterable(logs))

    def check_collectives(
        self, settings: Settings, gathers: Sequence[PayloadRequest] = ()
    ) -> Launch:
        """Run all-gather, broadcast and reduce-scatter, and measure what communicators cost.

        A profile can pass every all-reduce and stop a server, whose other collectives find no
        algorithm. Where all their data is right, the all-gathers asked for are timed.
        """

        def work(ranks: Ranks, record: _Record) -> None:
            for _ in range(COMMUNICATORS_PER_SERVER - 1):
                self._connect(ranks)
            answers = ranks.ask("running other collectives", "check_collectives", next(self._seeds))
            wrong = sorted({name for answer in answers for name, ok in answer.items() if not ok})
            free = ranks.ask("reading memory", "free_bytes")
            # Ranks that share a GPU all see what they took together.
            sharers = self._plan.rank_count if self._plan.is_shared else 1
            record.memory_bytes = tuple(
                (before - after) // sharers
                for before, after in zip(record.free_bytes, free, strict=True)
            )
            if wrong:
                raise RankFault(Outcome.WRONG_DATA, f"wrong data in {', '.join(wrong)}", None)
            for request in gathers:
                measured = self._measure(ranks, request, "measure_gather")
                record.gathers.append(measured)
                if not measured.is_data_ok:
                    message = f"wrong data in an all-gather of {request.size_bytes} B a rank"
                    raise RankFault(Outcome.WRONG_DATA, message, None)

        return self._run(settings, {}, work)

    def close(self) -> None:
        """End the server and remove temporary files."""
        self._await_last()
        self._server.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start_server(self) -> PreparedServer:
        return PreparedServer(self._device_module, rank_environ(self._base, self._plan, 0, {}))

    @contextmanager
    def _servers(self) -> Iterator[list[PreparedServer]]:
        if not self._is_fresh:
            yield [self._server]
            return
        fresh = [self._start_server() for _ in range(self._plan.rank_count)]
        try:
            yield fresh
        finally:
            for server in fresh:
                server.close()

    def _run(
        self,
        settings: Settings,
        extra: Mapping[str, str],
        work: Callable[[Ranks, _Record], None],
    ) -> Launch:
        """Launch, and once more where that ended with the process that ranks are forked from.

        Raises:
            ServerGone: it ended again.
        """
        try:
            return self._attempt(settings, extra, work)
        except ServerGone as error:
            if self._is_fresh:
                raise
            self._server.close()
            self._server = self._start_server()
            again = self._attempt(settings, extra, work)
            return replace(again, message=again.message or f"launched again: {error}")

    def _attempt(
        self,
        settings: Settings,
        extra: Mapping[str, str],
        work: Callable[[Ranks, _Record], None],
    ) -> Launch:
        began = time.monotonic()
        record = _Record()
        segments = list_segments()
        try:
            self._watch.begin()
        except RankFault as fault:
            record.fault = fault
            return record.launch(settings, time.monotonic() - began)
        with tempfile.TemporaryDirectory(dir=self._folder) as logs, self._servers() as servers:
            ranks = Ranks(servers, self._jobs(settings, extra, Path(logs)), self._deadline_s)
            try:
                self._open(ranks, record)
                with record.phase("measure"):
                    work(ranks, record)
                with record.phase("teardown"):
                    ranks.ask("closing", "close")
                    ranks.leave()
                self._leaving = ranks
            except RankFault as fault:
                record.fault = fault
            finally:
                with record.phase("kill"):
                    if ranks is not self._leaving:
                        ranks.kill()
                    if self._is_fresh:
                        self._await_last()
        if record.fault is not None:
            self._clean_up(ranks, segments, record)
            if self._server.is_gone:  # what became of its ranks says nothing of the settings
                raise self._server.gone_error()
        return record.launch(settings, time.monotonic() - began)

    def _clean_up(self, ranks: Ranks, segments: frozenset[str], record: _Record) -> None:
        """After a kill: nothing of the ranks may stay, or the host is to blame from here on."""
        remove_segments(segments)
        if ranks.is_stuck:
            record.fault = RankFault(Outcome.HOST_FAILED, "a killed rank does not end", None)
        record.fault = self._watch.await_memory() or record.fault

    def _open(self, ranks: Ranks, record: _Record) -> None:
        with record.phase("start"):
            ranks.await_start()
        with record.phase("context"):
            try:
                ranks.ask("opening its GPU", "open_context")
            except RankFault as fault:
                # No setting has been read yet, so that whatever is wrong is the host's.
                raise RankFault(Outcome.HOST_FAILED, str(fault), fault.rank) from fault
            self._await_last()
            self._watch.check_alone(Counter(gpu.uuid for gpu in self._plan.gpus))
            record.free_bytes = tuple(ranks.ask("reading memory", "free_bytes"))
        with record.phase("communicator"):
            self._connect(ranks)

    def _await_last(self) -> None:
        """See the ranks of the launch before out.

        A process with a CUDA context takes a while to end, as another takes one to begin: both
        happen at the same time, but nothing is measured before the GPUs are free.
        """
        if self._leaving is not None:
            self._leaving.await_gone()
            self._leaving = None

    @staticmethod
    def _connect(ranks: Ranks) -> None:
        ranks.ask(
            "joining the communicator", "connect", ranks.ask_first("making an id", "unique_id")
        )

    def _measure(
        self, ranks: Ranks, request: PayloadRequest, command: str = "measure"
    ) -> PayloadMeasurement:
        what = f"measuring {request.size_bytes} B"
        answers: list[RankSamples] = ranks.ask(what, command, request, next(self._seeds))
        slowest = [max(times) for times in zip(*(a.samples_us for a in answers), strict=True)]
        is_data_ok = all(answer.is_data_ok for answer in answers)
        return PayloadMeasurement.from_samples(request.size_bytes, slowest, is_data_ok=is_data_ok)

    def _jobs(self, settings: Settings, extra: Mapping[str, str], logs: Path) -> list[RankJob]:
        jobs = []
        for rank in range(self._plan.rank_count):
            environ = {
                **rank_environ(self._base, self._plan, rank, settings),
                "NCCL_DEBUG": "WARN",
                **extra,
            }
            if self._test_fault:
                environ[FAULT_VARIABLE] = self._test_fault
            role = Role(rank, self._plan.rank_count, self._plan.device_ordinal(rank))
            cpu_set = self._plan.cpu_sets[rank] if self._plan.cpu_sets else frozenset()
            jobs.append(RankJob(role, environ, str(logs / f"rank{rank}.log"), cpu_set))
        return jobs


class _Record:
    """What a launch gathers while it runs."""

    def __init__(self) -> None:
        self.payloads: list[PayloadMeasurement] = []
        self.gathers: list[PayloadMeasurement] = []
        self.phases_s: dict[str, float] = {}
        self.free_bytes: tuple[int, ...] = ()
        self.memory_bytes: tuple[int, ...] = ()
        self.is_pruned = False
        self.fault: RankFault | None = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.phases_s[name] = time.monotonic() - began

    def launch(self, settings: Settings, duration_s: float) -> Launch:
        details: dict[str, Any] = {"outcome": Outcome.OK}
        if self.fault is not None:
            details = {
                "outcome": host_outcome(self.fault),
                "message": str(self.fault),
                "failed_rank": self.fault.rank,
            }
        return Launch(
            settings=dict(settings),
            payloads=tuple(self.payloads),
            gathers=tuple(self.gathers),
            is_pruned=self.is_pruned,
            phases_s=self.phases_s,
            memory_bytes=self.memory_bytes,
            duration_s=duration_s,
            **details,
        )
