"""Client for requests to the daemon: a separate connection to the agents' socket, one record out, replies back.

A record is a frame: its length (4 bytes), a slot of 64 bytes, and a payload. Slot bytes used here: 58 and 59 hold the
result (an errno), 60 the kind (118 Ask, 119 Answer), 63 a detail (Ask: 1 text, 2 JSON; Answer: 1 marks the last piece).
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
#: Receive buffer size in bytes, large enough for one packet from the daemon.
_PACKET = 1 << 20


class Unanswered(RuntimeError):
    """The daemon refused the request and gave a reason."""


def sockets() -> Iterator[str]:
    """Yields socket paths on which a daemon may listen, in the agent's order."""
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
    """Returns a record without a sequence number, as bytes."""
    slot = _SLOT.pack(result, kind, 255, 0, detail)
    return _LENGTH.pack(len(slot) + len(payload)) + slot + payload


def ask(what: int, options: Optional[Dict[str, object]] = None, timeout: float = 10.0) -> Optional[bytes]:
    """Returns the daemon's reply; ``None`` if there is no daemon or it does not support the request."""
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
    """Returns facts that identify this process beyond the pid that the kernel reports: its start time, and the number of
    records made so far, which the daemon waits for before it replies."""
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
            return None  # closed: the daemon does not support this request
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
    """Returns the daemon's report of this process so far.

    ``format="text"`` returns a string, ``format="json"`` an object (docs/report-json.md). ``options`` are ``by="layer"``,
    ``"structure"`` or ``"tag"``, and ``all=1``. Everything that the agent recorded before the call is included. If the
    daemon refuses, the text is its reason, and the object is ``None``. ``None`` without a daemon.

    Raises ``ValueError`` for another format.
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
    """Requests the report through the agent, which first sends its records; ``None`` if it gets no reply."""
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
    """Returns ``report(format="json")``, or ``None`` after ``timeout`` seconds or on any error."""
    try:
        answer = ask(JSON, None, timeout)
        found = json.loads(answer) if answer else None
    except (Unanswered, ValueError):
        return None
    return found if isinstance(found, dict) else None


def last_oom() -> Optional[Dict[str, Any]]:
    """Returns the last time that this process ran out of memory, as recorded by the daemon.

    The object is an entry of ``ooms[]`` in docs/report-json.md with its ``device_name``: requested bytes, place, and the
    memory composition. Failures that the process survived by flushing a cache do not count. ``None`` if there was no
    out-of-memory event, or without a daemon.
    """
    last: Optional[Dict[str, Any]] = None
    for device in (report_json() or {}).get("devices") or []:
        for oom in device.get("ooms") or []:
            if oom.get("what") == "oom" and (last is None or oom.get("time_ns", 0) >= last.get("time_ns", 0)):
                last = {**oom, "device_name": device.get("name")}
    return last
