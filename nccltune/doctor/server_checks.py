"""The interpreter that runs the server: which NCCL it loads, and whether our hook is in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nccltune.doctor.check import Check, Status
from nccltune.sglang.defaults import Release, is_at_least

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nccltune.doctor.case import Case
    from nccltune.doctor.server import NcclLibrary, ProbedServer

CHOSEN_VARIABLE = "SGLANG_NCCL_SO_PATH"
IMAGE_VARIABLE = "NCCL_VERSION"
WHITELIST_VARIABLE = "SGLANG_PLUGINS"
PLUGIN_RELEASE: Release = (0, 5, 12)
HOOK_PACKAGE = "nccltune_hook"


def check_server(case: Case) -> Iterator[Check]:
    """Look at the interpreter and at everything that it answers."""
    yield _interpreter(case)
    server = case.server
    if server is None:
        for name in ("nccl_version", "nccl_two_versions", "plugin_hook"):
            yield Check(name, Status.SKIP, "the server's interpreter gives no answer")
        return
    yield _nccl_version(case, server)
    yield _two_versions(server)
    yield _hook(case, server)


def _interpreter(case: Case) -> Check:
    name = "server_python"
    server = case.server
    if case.interpreter.path is None:
        return Check(name, Status.SKIP, case.interpreter.problem, case.interpreter.fix)
    if server is None:
        fix = "name an interpreter that has SGLang with --python PATH"
        return Check(name, Status.FAIL, case.server_problem, fix)
    where = f"{server.executable} (Python {server.python_version})"
    if server.sglang_version is None:
        fix = "name the interpreter of the server with --python PATH"
        return Check(name, Status.WARN, f"{where} has no SGLang", fix)
    torch = f"torch {server.torch_version}" if server.torch_version else "no torch"
    found = f"{where} has SGLang {server.sglang_version} and {torch}"
    if server.torch_problem:
        message = f"{found}, which cannot be imported: {server.torch_problem}"
        return Check(name, Status.FAIL, message, "install a torch that fits this SGLang")
    if server.torch_version is None:
        return Check(name, Status.FAIL, found, "install the torch that this SGLang asks for")
    return Check(name, Status.OK, found)


def _nccl_version(case: Case, server: ProbedServer) -> Check:
    """Name the version that is loaded; labels of images and of packages are told from it."""
    name = "nccl_version"
    library = server.graph_nccl
    if library is None or library.version is None:
        reason = library.problem if library is not None else "nothing names one"
        message = f"the server's interpreter cannot load NCCL: {reason}"
        fix = f"see {CHOSEN_VARIABLE}, and that torch is built for CUDA"
        return Check(name, Status.FAIL, message, fix)
    message = f"the server loads NCCL {library.version} from {library.path}"
    labels = [
        f"the metadata of {wheel} says {version}"
        for wheel, version in server.wheels.items()
        if version != library.version and not version.startswith(f"{library.version}.")
    ]
    if len(server.wheels) > 1:
        shared = " and ".join(server.wheels)
        fix = "remove the one that torch does not depend on, then install the other again"
        message += f"; {shared} are both installed, and write to the same files"
        return Check(name, Status.WARN, message, fix)
    if case.assumed_nccl not in (None, library.version):
        message += f", and launches take it for {case.assumed_nccl}, as its package says"
        return Check(name, Status.FAIL, message, "install the NCCL package of that torch again")
    if labels and case.environ.get(CHOSEN_VARIABLE) is None:
        fix = "install that package again, or leave it: what is loaded counts here"
        return Check(name, Status.WARN, f"{message}, while {labels[0]}", fix)
    image = case.environ.get(IMAGE_VARIABLE, "")
    if image and not image.startswith(library.version):
        message += f"; {IMAGE_VARIABLE}={image} is a label that nothing reads"
    return Check(name, Status.OK, message)


def _two_versions(server: ProbedServer) -> Check:
    name = "nccl_two_versions"
    chosen, torch = server.chosen_nccl, server.torch_nccl
    if chosen is None:
        return Check(name, Status.OK, "one NCCL carries captured and eager collectives")
    if torch is None or torch.version is None:
        message = f"{CHOSEN_VARIABLE} names {_shown(chosen)}; torch's own NCCL is not known"
        return Check(name, Status.WARN, message)
    if chosen.version == torch.version:
        return Check(name, Status.OK, f"{CHOSEN_VARIABLE} and torch bring NCCL {torch.version}")
    message = (
        f"two NCCLs: decode passes run on {_shown(chosen)} ({CHOSEN_VARIABLE}), prefill and other "
        f"eager collectives on torch's {_shown(torch)}; one profile drives both"
    )
    fix = f"unset {CHOSEN_VARIABLE}, or let it name the version that torch brings"
    return Check(name, Status.WARN, message, fix)


def _shown(library: NcclLibrary) -> str:
    return f"{library.version or 'an unknown version'} from {library.path}"


def _hook(case: Case, server: ProbedServer) -> Check:
    """See whether a launch typed by hand in this interpreter would get the profile too."""
    name = "plugin_hook"
    if server.sglang_version is None:
        return Check(name, Status.SKIP, "not looked at: this interpreter has no SGLang")
    if not is_at_least(server.sglang_version, PLUGIN_RELEASE):
        message = (
            f"SGLang {server.sglang_version} has no plugins, so that only launches through "
            "nccltune run or launch get the profile"
        )
        return Check(name, Status.WARN, message, "start servers with: nccltune run -- CMD")
    hooks = [n for n, value in server.plugins.items() if value.startswith(f"{HOOK_PACKAGE}")]
    if not hooks:
        message = (
            "the hook is not in the server's interpreter: a launch typed by hand gets no profile"
        )
        return Check(name, Status.WARN, message, f"nccltune install --python {server.executable}")
    listed = case.environ.get(WHITELIST_VARIABLE, "")
    allowed = {word.strip() for word in listed.split(",") if word.strip()}
    if allowed and not allowed.intersection(hooks):
        message = f"{WHITELIST_VARIABLE}={listed} leaves the hook out"
        return Check(name, Status.WARN, message, f"add {hooks[0]} to {WHITELIST_VARIABLE}")
    return Check(name, Status.OK, f"the hook {hooks[0]} is in the server's interpreter")
