"""Who takes nothing is given up; who takes bytes slowly is not."""

import asyncio

import pytest

from ridgeline.server.http import http_protocol

STALL_S = 0.02


class Transport:
    """What a protocol asks of a transport while its buffer is full: ``unread`` falls by ``taken``
    each time."""

    def __init__(self, *, unread, taken):
        self.unread, self.taken, self.aborted = unread, taken, False

    def get_write_buffer_size(self):
        before, self.unread = self.unread, self.unread - self.taken
        return before

    def abort(self):
        self.aborted = True


@pytest.mark.parametrize(("taken", "given_up"), [(0, True), (1, False)])
def test_a_full_buffer_that_shrinks_is_no_stall(taken, given_up):
    async def wait() -> bool:
        protocol = object.__new__(
            http_protocol(
                part_timeout_s=1, stall_timeout_s=STALL_S, max_body_bytes=1, refused=print
            )
        )
        protocol.loop = asyncio.get_running_loop()
        protocol.transport = transport = Transport(unread=1000, taken=taken)
        protocol._watch_reader()
        await asyncio.sleep(10 * STALL_S)
        protocol._unwatch_reader()
        return transport.aborted

    assert asyncio.run(wait()) is given_up
