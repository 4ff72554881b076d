"""Limits of each key over the last minute, and of the whole server."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ridgeline.server.errors import ApiError, bad_request
from ridgeline.server.keys import Caller

_WINDOW_S = 60
_RETRY_AFTER_S = 1.0
_RETRIES_OVER_S = 4  # a crowd that comes back at one moment holds up those who are served


class SlidingCount:
    """A sum over the last 60 seconds, to the second."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds: dict[int, int] = {}
        self._total = 0

    def add(self, amount: int) -> None:
        second = int(self._clock())
        if second not in self._seconds:
            self._forget()
        self._seconds[second] = self._seconds.get(second, 0) + amount
        self._total += amount

    def total(self) -> int:
        self._forget()
        return self._total

    def wait_s(self, room: int) -> float:
        """Seconds until the sum has fallen by so much."""
        for second in sorted(self._seconds):
            room -= self._seconds[second]
            if room <= 0:
                return max(1.0, second + _WINDOW_S - self._clock())
        return float(_WINDOW_S)

    def _forget(self) -> None:
        oldest = int(self._clock()) - _WINDOW_S
        for second in [second for second in self._seconds if second <= oldest]:
            self._total -= self._seconds.pop(second)


class _Tenant:
    def __init__(self, clock: Callable[[], float]) -> None:
        self.running = 0  # outputs in progress
        self.reserved = 0  # output tokens that these may still make
        self.requests = SlidingCount(clock)
        self.inputs = SlidingCount(clock)
        self.outputs = SlidingCount(clock)


class Reservation:
    """Output tokens that a request in progress may still make."""

    def __init__(self, tenant: _Tenant, num_tokens: int) -> None:
        self._tenant = tenant
        self.left = num_tokens
        tenant.reserved += num_tokens

    def spend(self, num_tokens: int) -> None:
        """Let go of so many, or of what is left."""
        num_tokens = min(num_tokens, self.left)
        self.left -= num_tokens
        self._tenant.reserved -= num_tokens


class Limits:
    """Admits a request or refuses it with 429; counts what each tenant uses.

    Lines of batches are counted apart: they have a concurrency of their own, and no limits.
    """

    def __init__(self, max_queue: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_queue = max_queue
        self._running = 0
        self._num_refused = 0
        self._running_lines = 0
        self._tenants: dict[str, _Tenant] = defaultdict(lambda: _Tenant(clock))

    @property
    def running(self) -> int:
        """Requests in progress, without lines of batches."""
        return self._running

    @property
    def running_lines(self) -> int:
        """Lines of batches in progress."""
        return self._running_lines

    @contextmanager
    def admitted_line(self) -> Iterator[None]:
        """Within it a line of a batch counts as in progress; it is never refused."""
        self._running_lines += 1
        try:
            yield
        finally:
            self._running_lines -= 1

    def count_request(self, caller: Caller) -> None:
        """Count a request towards those of a minute.

        Raises:
            ApiError: 429 with Retry-After if that limit is reached.
        """
        tenant = self._tenants[caller.tenant]
        _check(tenant.requests, caller.limits.requests_per_minute, "requests a minute", 1)
        tenant.requests.add(1)

    @contextmanager
    def admitted(
        self, caller: Caller, *, num_outputs: int = 1, output_tokens: int = 0
    ) -> Iterator["Reservation"]:
        """Within it the request counts as in progress, each of its outputs towards concurrency.

        It reserves ``output_tokens``, the most that all its outputs may have, or the whole limit of
        a minute where that is less; what was not made by its end is given back.

        Raises:
            ApiError: 429 with Retry-After, when the server is full or a limit is reached; 400 for
                more outputs than the key may ever have at once.
        """
        self._check_room(caller, num_outputs)
        tenant, limits = self._tenants[caller.tenant], caller.limits
        reserved = 0
        if (limit := limits.output_tokens_per_minute) is not None:
            reserved = min(output_tokens, limit)
            what = "output tokens a minute"
            _check(tenant.outputs, limit, what, max(reserved, 1))
            if tenant.outputs.total() + tenant.reserved + reserved > limit:
                raise _exceeded(what, limit, _RETRY_AFTER_S)  # what runs may give some back
        self.count_request(caller)
        reservation = Reservation(tenant, reserved)
        try:
            with self._counted(tenant, num_outputs):
                yield reservation
        finally:
            reservation.spend(reservation.left)

    @contextmanager
    def waiting(self, caller: Caller) -> Iterator[None]:
        """Within it a request that is not admitted yet waits, and takes the place of one output.

        Raises what `admitted` raises of requests at once.
        """
        self._check_room(caller, 1)
        with self._counted(self._tenants[caller.tenant], 1):
            yield

    def _check_room(self, caller: Caller, num_outputs: int) -> None:
        if self._running >= self._max_queue:
            self._num_refused += 1
            raise ApiError(
                429,
                "The server has as many requests as it takes.",
                code="server_overloaded",
                retry_after_s=_RETRY_AFTER_S + self._num_refused % _RETRIES_OVER_S,
            )
        if (most := caller.limits.concurrency) is None:
            return
        if num_outputs > most:
            raise bad_request(
                f"The request asks for {num_outputs} outputs, and the key may have {most} at once, "
                "over all prompts and n."
            )
        if self._tenants[caller.tenant].running + num_outputs > most:
            raise _exceeded("outputs at once", most, _RETRY_AFTER_S)

    @contextmanager
    def _counted(self, tenant: _Tenant, num_outputs: int) -> Iterator[None]:
        tenant.running += num_outputs
        self._running += 1
        try:
            yield
        finally:
            tenant.running -= num_outputs
            self._running -= 1

    def charge_input(self, caller: Caller, num_tokens: int) -> None:
        """Count prompt tokens before they are computed.

        Raises:
            ApiError: 429 with Retry-After if the limit is reached, 413 if the prompt alone is over
                it, so that waiting would not help.
        """
        tenant = self._tenants[caller.tenant]
        limit = caller.limits.input_tokens_per_minute
        if limit is not None and num_tokens > limit:
            raise ApiError(
                413,
                f"The prompt has {num_tokens} tokens and the key may send {limit} a minute.",
                code="rate_limit_exceeded",
            )
        _check(tenant.inputs, limit, "input tokens a minute", num_tokens)
        tenant.inputs.add(num_tokens)

    def charge_output(
        self, caller: Caller, num_tokens: int, reservation: "Reservation | None" = None
    ) -> None:
        """Count tokens that were generated, from what was reserved for them."""
        if caller.limits.output_tokens_per_minute is not None:
            self._tenants[caller.tenant].outputs.add(num_tokens)
            if reservation is not None:
                reservation.spend(num_tokens)


def _check(count: SlidingCount, limit: int | None, what: str, wanted: int) -> None:
    if limit is not None and (total := count.total()) + wanted > limit:
        raise _exceeded(what, limit, count.wait_s(total + wanted - limit))


def _exceeded(what: str, limit: int, retry_after_s: float) -> ApiError:
    return ApiError(
        429,
        f"The key's limit of {limit} {what} is reached.",
        code="rate_limit_exceeded",
        retry_after_s=retry_after_s,
    )
