"""What there is to see of a running server besides its answers: ranks, all-reduce path, flags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from nccltune.errors import ServerError
from nccltune.host.match import has_full_nvlink
from nccltune.live.scanner import find_servers
from nccltune.live.server_facts import ServerFacts, read_facts
from nccltune.live.servers import Context, report_server
from nccltune.live.stock import host_of, shape_of
from nccltune.sglang.allreduce_path import PathVerdict, all_reduce_path
from nccltune.sglang.endpoints import Endpoint, read_server_info
from nccltune.store import ActiveState, Launches, Policy
from nccltune.verify.model import RankState, Seen

if TYPE_CHECKING:
    from collections.abc import Collection

    from nccltune.live.scanner import Server
    from nccltune.profile import Profile
    from nccltune.sglang.command import LaunchCommand

SIMULATED_ACCEPTANCE = "SGLANG_SIMULATE_ACC_LEN"
_INFO_KEYS = (
    "model_path",
    "tp_size",
    "dp_size",
    "nnodes",
    "context_length",
    "max_total_num_tokens",
    "max_running_requests",
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "disable_custom_all_reduce",
    "flashinfer_allreduce_fusion_backend",
    "enable_symm_mem",
    "enable_mscclpp",
    "enable_torch_symm_mem",
)
_SWITCHES = (
    "disable_custom_all_reduce",
    "enable_symm_mem",
    "enable_mscclpp",
    "enable_torch_symm_mem",
)
_FUSION = "flashinfer_allreduce_fusion_backend"
_FUSION_OFF = "enforce_disable_flashinfer_allreduce_fusion"


def active_state(profile: Profile | None) -> ActiveState:
    """Return what the store would say if this profile were the active one."""
    return ActiveState(profile, None if profile is None else profile.name, None, Path())


def servers_among(pids: Collection[int]) -> tuple[Server, ...]:
    """Return the servers whose own process is one of these."""
    return tuple(
        server for server in find_servers() if server.root is not None and server.pid in pids
    )


def look(servers: Sequence[Server], endpoint: Endpoint, profile: Profile | None) -> Seen:
    """Look at a server that is up.

    Args:
        servers: its processes; several where it is spread over "nodes" of this host, none where
            they cannot be seen.
        endpoint: where it answers.
        profile: what its ranks should have.

    Raises:
        ServerError: it does not say how it is set up.
    """
    info = read_server_info(endpoint)
    kept = {name: info[name] for name in _INFO_KEYS if name in info}
    seen = Seen(version=_text(info.get("version")), server_info=kept)
    facts = [read_facts(server, ()) for server in servers]
    if not facts:
        return replace(seen, path_reason="its processes cannot be seen from here")
    path = _path(facts[0], info)
    return replace(
        seen,
        ranks=_ranks(servers, profile),
        is_nccl_on_path=None if path is None else path.is_nccl,
        path_reason="its launch command is not known" if path is None else _reason(path),
        is_simulated_acceptance=any(_is_simulated(each) for each in facts),
    )


def _ranks(
    servers: Sequence[Server], profile: Profile | None
) -> Mapping[str, Mapping[str, RankState]]:
    context = Context(
        active=active_state(profile),
        policy=Policy(Launches.ALL),
        records=(),
        read_host=host_of,
        read_shape=shape_of,
        is_for_all=True,
    )
    return {
        rank.name: {key.key: RankState(key.state) for key in rank.keys}
        for server in servers
        for rank in report_server(server, context).ranks
    }


def _path(facts: ServerFacts, info: Mapping[str, object]) -> PathVerdict | None:
    if facts.command is None:
        return None
    host, _problem = host_of(facts.python, facts.environ, facts.files)
    return all_reduce_path(
        resolved(facts.command, info),
        shape_of(facts.command, facts.environ, facts.files),
        gpu_architecture=None if host is None else host.gpu_architecture,
        has_full_nvlink=has_full_nvlink(None if host is None else host.fingerprint, facts.command),
        environ=facts.environ,
        version=_text(info.get("version")) or facts.version,
    )


def resolved(command: LaunchCommand, info: Mapping[str, object]) -> LaunchCommand:
    """Return a launch with the choices about all-reduce that its server really made."""
    flags = dict(command.flags)
    for name in _SWITCHES:
        if isinstance(info.get(name), bool):
            flags.pop(name, None)
            if info[name]:
                flags[name] = ()
    if _FUSION in info:
        backend = info[_FUSION]
        for name in (_FUSION, "enable_flashinfer_allreduce_fusion", _FUSION_OFF):
            flags.pop(name, None)
        flags.update({_FUSION: (str(backend),)} if backend else {_FUSION_OFF: ()})
    return replace(command, flags=flags)


def _reason(path: PathVerdict) -> str:
    return f"{path.reason}; to let NCCL carry them: {path.fix}" if path.fix else path.reason


def _is_simulated(facts: ServerFacts) -> bool:
    environs = [facts.environ, *(reading.values or {} for reading in facts.environs.values())]
    return any(_is_positive(environ.get(SIMULATED_ACCEPTANCE)) for environ in environs)


def _is_positive(text: str | None) -> bool:
    try:
        return text is not None and float(text) > 0.0
    except ValueError:
        return False


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def check_is_sglang(endpoint: Endpoint) -> None:
    """Refuse an address where no SGLang answers.

    Raises:
        ServerError: nobody answers, or something else does.
    """
    try:
        info = read_server_info(endpoint)
    except ServerError as error:
        if error.code != "bad_answer":
            raise
        raise ServerError(f"{error}: that is no SGLang server", code="not_sglang") from None
    if "version" not in info or "model_path" not in info:
        raise ServerError(
            f"{endpoint.url}/server_info: answers, and not as SGLang does: no version and no "
            "model_path in it; give the address of an SGLang server",
            code="not_sglang",
        )
