"""The few NCCL calls that a benchmark needs, on the library that the server would load.

Signatures and enum values are those of nccl.h, stable since 2.10. Calls release the GIL, so that a
rank's own thread can still end the process while a collective hangs.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from ctypes import POINTER, byref, c_char, c_char_p, c_int, c_size_t, c_void_p
from pathlib import Path

UNIQUE_ID_BYTES = 128
BFLOAT16 = 9
SUM = 0
SUCCESS = 0
INVALID_USAGE = 5

_SIGNATURES: dict[str, list[object]] = {
    "ncclGetVersion": [POINTER(c_int)],
    "ncclGetUniqueId": [c_void_p],
    "ncclAllReduce": [c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p],
    "ncclAllGather": [c_void_p, c_void_p, c_size_t, c_int, c_void_p, c_void_p],
    "ncclReduceScatter": [c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p],
    "ncclBroadcast": [c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p],
}
_ADVICE = " (run with NCCL_DEBUG=WARN for details)"


class NcclError(Exception):
    """A call that NCCL refused.

    Attributes:
        code: ncclResult_t; 5 is "invalid usage", which is how 2.24 and newer refuse settings.
    """

    def __init__(self, call: str, code: int, reason: str) -> None:
        super().__init__(f"{call} failed with code {code}: {reason}")
        self.code = code


class UniqueId(ctypes.Structure):
    """ncclUniqueId, passed by value to ncclCommInitRank."""

    _fields_ = (("internal", c_char * UNIQUE_ID_BYTES),)


def library_path(environ: dict[str, str] | None = None) -> str:
    """Return the NCCL library that a server in this interpreter would use.

    ``SGLANG_NCCL_SO_PATH`` wins, as in SGLang; then the wheel that torch depends on; then the
    loader's own search.
    """
    chosen = (os.environ if environ is None else environ).get("SGLANG_NCCL_SO_PATH")
    if chosen:
        return chosen
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        candidate = Path(folder, "nccl", "lib", "libnccl.so.2")
        if candidate.exists():
            return str(candidate)
    return "libnccl.so.2"


class Nccl:
    """The loaded library.

    Raises:
        OSError: the library cannot be loaded: wrong path, or a CUDA library it needs is missing.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._lib = ctypes.CDLL(path)
        for name, argument_types in _SIGNATURES.items():
            function = getattr(self._lib, name)
            function.argtypes, function.restype = argument_types, c_int
        self._lib.ncclCommInitRank.argtypes = [POINTER(c_void_p), c_int, UniqueId, c_int]
        self._lib.ncclCommInitRank.restype = c_int
        self._lib.ncclGetErrorString.restype = c_char_p
        self._lib.ncclGetLastError.argtypes = [c_void_p]
        self._lib.ncclGetLastError.restype = c_char_p

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._lib, name)(*arguments)
        if code != SUCCESS:
            short = self._lib.ncclGetErrorString(code) or b""
            detail = self._lib.ncclGetLastError(None) or b""
            reason = " ".join(
                part.decode(errors="replace").strip() for part in (short, detail) if part
            )
            raise NcclError(name, code, " ".join(reason.replace(_ADVICE, "").split()))

    def version(self) -> str:
        """Return the loaded version, e.g. ``2.28.9``; the number is coded as nccl.h has it."""
        number = c_int()
        self._call("ncclGetVersion", byref(number))
        if number.value < 10000:
            return f"{number.value // 1000}.{number.value // 100 % 10}.{number.value % 100}"
        return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"

    def unique_id(self) -> bytes:
        """Make the id that all ranks of one communicator share."""
        unique = UniqueId()
        self._call("ncclGetUniqueId", byref(unique))
        return bytes(memoryview(unique))

    def init_rank(self, unique_id: bytes, rank: int, world_size: int) -> c_void_p:
        """Join a communicator; blocks until all ranks have, and may refuse the settings."""
        communicator = c_void_p()
        unique = UniqueId.from_buffer_copy(unique_id)
        self._call("ncclCommInitRank", byref(communicator), world_size, unique, rank)
        return communicator

    def all_reduce(self, pointer: int, count: int, communicator: c_void_p, stream: int) -> None:
        """Sum ``count`` bf16 elements over all ranks, in place, on ``stream``."""
        self._call("ncclAllReduce", pointer, pointer, count, BFLOAT16, SUM, communicator, stream)

    def all_gather(
        self, send: int, receive: int, count: int, communicator: c_void_p, stream: int
    ) -> None:
        """Gather ``count`` bf16 elements of every rank."""
        self._call("ncclAllGather", send, receive, count, BFLOAT16, communicator, stream)

    def reduce_scatter(
        self, send: int, receive: int, count: int, communicator: c_void_p, stream: int
    ) -> None:
        """Sum over ranks and leave ``count`` bf16 elements of the result on each."""
        self._call("ncclReduceScatter", send, receive, count, BFLOAT16, SUM, communicator, stream)

    def broadcast(
        self, pointer: int, count: int, root: int, communicator: c_void_p, stream: int
    ) -> None:
        """Copy ``count`` bf16 elements from ``root`` to every rank, in place."""
        self._call("ncclBroadcast", pointer, pointer, count, BFLOAT16, root, communicator, stream)
