"""A board by which ranks send each other messages, over their group's store."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Board:
    """The messages between ranks over their group's store, turn after turn. Keys are deleted after they were read."""

    store: Any
    rank: int
    world: int
    timeout_s: float
    name: str
    turn: int = 0
    old: list[str] = field(default_factory=list)

    def gather(self, own: Any) -> list[Any] | None:
        """Every rank's message, by rank, on rank 0; None on the others."""
        self._next(self.rank != 0, str(self.rank), own)
        if self.rank != 0:
            return None
        said = [own] + [self._hear(str(rank), rank) for rank in range(1, self.world)]
        self._forget()
        return said

    def broadcast(self, own: Any) -> Any:
        """Rank 0's message, on all ranks."""
        self._next(self.rank == 0, "all", own)
        if self.rank == 0:
            return json.loads(json.dumps(own))
        said = self._hear("all", 0)
        self._forget()
        return said

    def close(self) -> None:
        """Deletes all messages: a later group of the same name on the same store must not find them."""
        if self.gather(None) is not None and self.world > 1:
            for rank in range(1, self.world):
                self.store.delete_key(self._key(str(rank)))

    def _next(self, says: bool, who: str, own: Any) -> None:
        self.turn += 1
        if says and self.world > 1:
            key = self._key(who)
            self.store.set(key, json.dumps(own))
            self.old.append(key)

    def _key(self, who: str) -> str:
        return f"overlap_torch/tune/{self.name}/{self.turn}/{who}"

    def _forget(self) -> None:
        # A rank that has sent a message now has read all earlier messages to it.
        for key in self.old:
            self.store.delete_key(key)
        self.old.clear()

    def _hear(self, who: str, rank: int) -> Any:
        key, pause_s = self._key(who), 0.001
        deadline = time.monotonic() + self.timeout_s
        # This polls, because the store's own wait blocks other threads' access.
        while not self.store.check([key]):
            if time.monotonic() >= deadline:
                raise RuntimeError(
                    f"tune: rank {self.rank} heard nothing from rank {rank} within {self.timeout_s:g} s. It died, or "
                    "does not call tune: every rank of the group has to."
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.02)
        return json.loads(self.store.get(key))
