"""Places for the lines of batches that run at once."""

import asyncio
from collections import deque


class Slots:
    """Whoever waits gets one in turn: each tenant, and of one tenant whoever came first."""

    def __init__(self, count: int) -> None:
        self.num_free = count
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # the next tenant is first

    async def acquire(self, tenant: str) -> None:
        """Take one, for `release` to give back."""
        if self.num_free:
            self.num_free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it came just before
                self.release()
            raise

    def release(self) -> None:
        """Give one back, or to who waits."""
        while self._waiting:
            tenant = next(iter(self._waiting))
            turns = self._waiting.pop(tenant)
            turn = turns.popleft()
            if turns:
                self._waiting[tenant] = turns
            if not turn.done():
                turn.set_result(None)
                return
        self.num_free += 1
