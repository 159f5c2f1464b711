"""Questions to the daemon: a connection of its own to the agents' socket, one record out, answers back.

A record is a frame: its length (4 bytes), a slot of 64 bytes, and a payload. Of the slot, byte 60 is the kind (118 Ask, 119
Answer), byte 63 a detail (Ask: 1 text, 2 JSON; Answer: 1 for the last piece), bytes 58 and 59 a result (an errno).
"""

import ctypes
import json
import os
import stat
import struct
import time
from typing import TYPE_CHECKING, Any, Dict, Iterator, List, Optional, Union

from ._library import library
from ._snapshot import STATUS, read

if TYPE_CHECKING:
    import socket

ASK, ANSWER = 118, 119
TEXT, JSON = 1, 2
_SLOT = struct.Struct("<58xHBBBB")
_LENGTH = struct.Struct("<I")
#: A packet of the daemon's fits.
_PACKET = 1 << 20


class Unanswered(RuntimeError):
    """A daemon is there and says why it does not answer."""


def sockets() -> Iterator[str]:
    """Where a daemon may listen, as the agent looks for it."""
    named = os.environ.get("GPUMEM_SOCKET")
    if named:
        yield named
        return
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        yield os.path.join(runtime, "gpumem", "agent.sock")
    yield "/run/gpumemd/agent.sock"
    doubtful = "/tmp/gpumem-{}/agent.sock".format(os.getuid())
    try:
        place = os.stat(os.path.dirname(doubtful), follow_symlinks=False)
    except OSError:
        return
    if place.st_uid == os.getuid() and not place.st_mode & 0o022 and stat.S_ISDIR(place.st_mode):
        yield doubtful


def frame(kind: int, detail: int, payload: bytes, result: int = 0) -> bytes:
    """A record without a place in the order."""
    slot = _SLOT.pack(result, kind, 255, 0, detail)
    return _LENGTH.pack(len(slot) + len(payload)) + slot + payload


def ask(what: int, options: Optional[Dict[str, object]] = None, timeout: float = 10.0) -> Optional[bytes]:
    """The daemon's answer; ``None`` where there is no daemon, or none that knows the question."""
    import socket

    lines = "".join("{}={}\n".format(key, value) for key, value in {**_identity(), **(options or {})}.items())
    for path in sockets():
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.settimeout(timeout)
            connection.connect(path)
            connection.send(frame(ASK, what, lines.encode("utf-8", "replace")))
            return _answer(connection, time.monotonic() + timeout)
        except OSError:
            continue
        finally:
            connection.close()
    return None


def _identity() -> Dict[str, object]:
    """Who asks, beside the pid that the kernel tells: when it was started, and what the agent has recorded so far, which the
    daemon waits for."""
    found: Dict[str, object] = {}
    try:
        with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
            found["start_ticks"] = int(file.read().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        pass
    status = read(STATUS)
    if status is not None:
        found["seq"] = status["recorded"]
    return found


def _answer(connection: "socket.socket", deadline: float) -> Optional[bytes]:
    pieces: List[bytes] = []
    while True:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        packet = connection.recv(_PACKET)
        if not packet:
            return None  # it closed: a daemon that does not know the question
        at = 0
        while at + _LENGTH.size + _SLOT.size <= len(packet):
            length = _LENGTH.unpack_from(packet, at)[0]
            at += _LENGTH.size
            result, kind, _, _, detail = _SLOT.unpack_from(packet, at)
            payload = packet[at + _SLOT.size : at + length]
            at += length
            if kind != ANSWER:
                continue
            if result:
                raise Unanswered("{}: {}".format(os.strerror(result), payload.decode("utf-8", "replace")))
            pieces.append(payload)
            if detail:
                return b"".join(pieces)


def report(format: str = "text", **options: object) -> Union[str, Dict[str, Any], None]:
    """The daemon's report of this process so far: as people read it, or with ``format="json"`` as an object
    (docs/report-json.md).

    ``None`` where no daemon listens. ``options`` are ``by="layer"``, ``"structure"`` or ``"tag"``, and ``all=1``. What the agent has
    recorded up to the call is in it.
    """
    if format not in ("text", "json"):
        raise ValueError("format is 'text' or 'json', not {!r}".format(format))
    try:
        answer = _by_agent(format, options) or ask(JSON if format == "json" else TEXT, options)
    except Unanswered as error:
        return str(error) + "\n" if format == "text" else None
    if answer is None:
        return None
    text = answer.decode("utf-8", "replace")
    if format == "text":
        return text
    found = json.loads(text)
    return found if isinstance(found, dict) else None


def _by_agent(format: str, options: Dict[str, object]) -> Optional[bytes]:
    """The answer as the agent gets it, which first sends what it has recorded; ``None`` where it gets none."""
    found = library()
    if found is None or "report" in found.missing or not found.available():
        return None
    lines = "".join("{}={}\n".format(key, value) for key, value in options.items())
    place = found.report(format.encode(), lines.encode("utf-8", "replace"))
    if not place:
        return None
    answer = ctypes.string_at(place)
    free = ctypes.CDLL(None).free
    free.argtypes, free.restype = [ctypes.c_void_p], None
    free(place)
    return answer


def report_json(timeout: float = 2.0) -> Optional[Dict[str, Any]]:
    """As ``report(format="json")``, soon or not at all."""
    try:
        answer = ask(JSON, None, timeout)
        found = json.loads(answer) if answer else None
    except (Unanswered, ValueError):
        return None
    return found if isinstance(found, dict) else None


def last_oom() -> Optional[Dict[str, Any]]:
    """The last time that this process ran out of memory, as the daemon recorded it: what was asked for, where, and who
    held what (an entry of ``ooms[]`` in docs/report-json.md, with its ``device_name``). What the process has survived by
    flushing a cache is none. ``None`` if it did not, or no daemon listens."""
    last: Optional[Dict[str, Any]] = None
    for device in (report_json() or {}).get("devices") or []:
        for oom in device.get("ooms") or []:
            if oom.get("what") == "oom" and (last is None or oom.get("time_ns", 0) >= last.get("time_ns", 0)):
                last = {**oom, "device_name": device.get("name")}
    return last
