import os
import signal
import threading

import pytest

from ridgeline.engine.interrupts import InterruptGate


@pytest.fixture(autouse=True)
def handled_interrupts():
    """A shell's background jobs ignore interrupts; these tests are of a process that does not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_comes_at_the_end_of_the_block():
    gate, done = InterruptGate(), []

    def interrupted():
        with gate.installed(), gate:
            interrupt()
            done.append("all of it")

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            interrupted()
    assert done == ["all of it"] * 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_between_blocks_comes_at_once():
    gate, done = InterruptGate(), []

    def interrupted():
        with gate.installed():
            with gate:
                done.append("a block")
            interrupt()
            done.append("never")

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert done == ["a block"]


def test_a_handler_of_the_program_is_left_alone():
    came = []
    before = signal.signal(signal.SIGINT, lambda *_: came.append(True))
    try:
        gate = InterruptGate()
        with gate.installed(), gate:
            interrupt()
            assert came
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_changes_nothing():
    gate, seen = InterruptGate(), []

    def run():
        with gate.installed(), gate:
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
