import os
import signal

import pytest

from ridgeline.engine.interrupts import deferred_interrupts


def test_an_interrupt_comes_at_the_end_of_the_block():
    done = []

    def interrupted():
        with deferred_interrupts():
            os.kill(os.getpid(), signal.SIGINT)
            done.append("all of it")

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert done == ["all of it"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_the_program_is_left_alone():
    came = []
    before = signal.signal(signal.SIGINT, lambda *_: came.append(True))
    try:
        with deferred_interrupts():
            os.kill(os.getpid(), signal.SIGINT)
            assert came
    finally:
        signal.signal(signal.SIGINT, before)
