"""Who leads, as one coordinator believes it. No I/O: answers of the store come in.

    unknown, standby --claimed--> leader --(until_ms passes, or the store says another leads)--> unknown or standby

A leader counts its time from before it asked, so that it stops before anybody else can begin. A process that was paused
finds its time over when it wakes; what it had already sent carries its old term, which mempools refuse (AQUA has one
coordinator and no such case; the pattern is that of fenced leases).
"""

from dataclasses import dataclass


@dataclass(slots=True)
class Leadership:
    """`term`: of this process's newest leadership, 0 before the first. `leader_url`: of whoever else leads."""

    lease_ms: int
    term: int = 0
    until_ms: int = 0
    leader_url: str = ""
    was_answered: bool = False  # by the store, at least once

    def claimed(self, term: int, *, asked_at_ms: int) -> bool:
        """The store says that this process leads. Returns whether it is a new term."""
        is_new = term != self.term
        self.term, self.until_ms, self.leader_url = term, asked_at_ms + self.lease_ms, ""
        self.was_answered = True
        return is_new

    def refused(self, leader_url: str) -> None:
        """Another process leads."""
        self.until_ms, self.leader_url, self.was_answered = 0, leader_url, True

    def is_leading(self, now_ms: int) -> bool:
        """Whether it may act for the cluster now."""
        return now_ms < self.until_ms

    def role(self, now_ms: int) -> str:
        """ "leader" | "standby" (another one leads) | "unknown" (the store does not answer)."""
        if self.is_leading(now_ms):
            return "leader"
        return "standby" if self.leader_url else "unknown"
