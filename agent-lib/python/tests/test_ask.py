"""Requests to a fake daemon."""

import json
import os
import pathlib
import socket
import struct
import sys
import tempfile
import threading
import unittest
from unittest import mock

PACKAGE = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PACKAGE))

import gpumem  # noqa: E402
from gpumem import _ask, _late  # noqa: E402


class FakeDaemon:
    """Replies to one request at a time with the given packets."""

    def __init__(self, path, packets):
        self.packets, self.asked = packets, []
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.bind(path)
        self.socket.listen()
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def serve(self):
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            with connection:
                self.asked.append(connection.recv(1 << 16))
                for packet in self.packets:
                    connection.send(packet)

    def close(self):
        self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
        self.thread.join()


def answer(text, last, result=0):
    return _ask.frame(_ask.ANSWER, last, text.encode(), result)


class Asking(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.path = os.path.join(self.folder.name, "agent.sock")
        self.environment = mock.patch.dict(os.environ, GPUMEM_SOCKET=self.path)
        self.environment.start()

    def tearDown(self):
        self.environment.stop()
        self.folder.cleanup()

    def daemon(self, *packets):
        daemon = FakeDaemon(self.path, packets)
        self.addCleanup(daemon.close)
        return daemon

    def test_none_without_a_daemon(self):
        self.assertIsNone(gpumem.report())
        self.assertIsNone(gpumem.report("json"))
        self.assertIsNone(gpumem.last_oom())

    def test_request_and_reply_in_pieces(self):
        daemon = self.daemon(answer("used ", 0) + answer("71,", 0), answer("204\n", 1))
        self.assertEqual(gpumem.report(by="tag"), "used 71,204\n")
        frame = daemon.asked[0]
        length = struct.unpack_from("<I", frame)[0]
        self.assertEqual(length, len(frame) - 4)
        self.assertEqual((frame[4 + 60], frame[4 + 63]), (118, 1))
        self.assertIn(b"by=tag\n", frame[68:])
        self.assertRegex(frame[68:].decode(), r"^start_ticks=[1-9]\d*\n")

    def test_json_and_the_last_oom(self):
        first = {"what": "oom", "time_ns": 5, "asked_bytes": 1}
        ooms = [[first, {"what": "pressure", "time_ns": 9}], [{"what": "oom", "time_ns": 7, "asked_bytes": 2}]]
        told = {
            "devices": [
                {"name": "GPU-1", "last": {"predates_bytes": 5}, "ooms": ooms[0]},
                {"name": "GPU-2", "last": None, "ooms": ooms[1]},
            ]
        }
        self.daemon(answer(json.dumps(told), 1))
        self.assertEqual(gpumem.report("json"), told)
        self.assertEqual(gpumem.last_oom(), {**ooms[1][0], "device_name": "GPU-2"})
        self.assertEqual(_late._of_report(told), {"GPU-1": 5})

    def test_refusal_returns_the_reason(self):
        self.daemon(answer("no such run", 1, 2))
        self.assertIn("no such run", gpumem.report())
        self.assertIsNone(gpumem.report("json"))

    def test_none_if_the_daemon_does_not_support_requests(self):
        self.daemon()
        self.assertIsNone(gpumem.report())

    def test_malformed_replies_are_ignored(self):
        self.daemon(b"", b"\xff" * 100, answer("x", 1)[:30])
        self.assertIsNone(gpumem.report())
        with self.assertRaises(ValueError):
            gpumem.report("xml")

    def test_sockets_in_foreign_directories_are_ignored(self):
        with mock.patch.dict(os.environ, GPUMEM_SOCKET="", XDG_RUNTIME_DIR="/run/user/7"):
            found = list(_ask.sockets())
            self.assertEqual(found[:2], ["/run/user/7/gpumem/agent.sock", "/run/gpumemd/agent.sock"])
            with mock.patch("os.stat", return_value=mock.Mock(st_uid=os.getuid() + 1, st_mode=0o40700)):
                self.assertEqual(len(list(_ask.sockets())), 2)
            with mock.patch("os.stat", return_value=mock.Mock(st_uid=os.getuid(), st_mode=0o40700)):
                self.assertEqual(len(list(_ask.sockets())), 3)


if __name__ == "__main__":
    unittest.main()
