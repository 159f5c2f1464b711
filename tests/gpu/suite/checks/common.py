"""Shared by several checks."""

import time

from ..programs import Ended

GRANULE = 2 << 20
MIB = 1 << 20
# Configuration with short intervals, so that checks need not wait.
QUICK = "[nvml]\nlist_every_s = 0.2\nlist_budget = 0.5"


def rounding(sizes):
    """Returns the driver's rounding in bytes by the model of reference/cupti.md 2.3: whole granules above 1 MiB, while
    smaller requests share granules."""
    large = sum(-(-size // GRANULE) * GRANULE - size for size in sizes if size > MIB)
    small = sum(size for size in sizes if size <= MIB)
    return large + (-(-small // GRANULE) * GRANULE - small)


def becomes(true, seconds=10):
    """Polls `true` until it returns true; False after `seconds`."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


class Watched:
    """A program under a daemon, with NVML figures for comparison."""

    def __init__(self, test, more=QUICK, **environment):
        self.test = test
        self.daemon = test.daemon(more)
        self.driver = test.driver(agent=self.daemon, **environment)
        self.facts = self.driver.begin()
        self.pid = self.driver.pid
        self.patience = None
        # Without the agent every later expectation fails, and time on a borrowed GPU is too short to wait for each.
        flags = lambda: set((self.daemon.row(self.pid) or {"flags": []})["flags"])
        if not becomes(lambda: flags() & {"covered", "blocked", "uncovered"} == {"covered"}):
            found = self.daemon.get(f"/v1/doctor?pid={self.pid}")["findings"]
            raise Ended(f"not covered: {self.daemon.row(self.pid)}; doctor: {[f['text'] for f in found]}")

    def used(self):
        return self.test.used(self.pid)

    def says(self, what, tracked, seconds=10):
        """Expects the daemon to come to this sum, and to the bytes that NVML shows the suite: to none, where NVML lists no
        process. Returns the bytes of Test.used."""
        seconds = min(seconds, self.patience or seconds)
        row, fits = self.daemon.settled(self.pid, seconds, tracked_bytes=tracked)
        said = row and row.get("tracked_bytes")
        self.test.expect(fits, f"{what}: tracked is {tracked:,} (the daemon reports {said})")
        right, used = fits, self.used()
        wanted = used if self.test.listed else None
        row, fits = self.daemon.settled(self.pid, seconds, used_bytes=wanted)
        said = row and row.get("used_bytes")
        if used is None:
            self.test.expect(False, f"{what}: NVML lists the process")
        else:
            self.test.expect(fits, f"{what}: used is {wanted} (the daemon reports {said})")
        # After one failure the following waits are shorter.
        if not fits or not right:
            self.patience = 3
        return used

    def end(self):
        code = self.driver.finish()
        self.test.expect(code == 0, f"the program ended well ({code})")
        return code


def covered(test, account):
    """Checks properties of every recording of a watched program."""
    test.expect(account.hello is not None, "the agent sent Hello")
    states = [state for state, _, _ in account.states]
    test.expect("covered" in states, f"callbacks arrive (states {account.states})")
    test.expect(account.odd == 0, f"no record contradicts another ({account.odd})")
    test.expect(account.holes == 0 and account.lost == 0, f"nothing was lost ({account.holes}, {account.lost})")
    return "covered" in states
