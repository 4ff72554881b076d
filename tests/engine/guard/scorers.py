"""Scorers for the tests; a guard's child imports them by name."""

import os
import sys
import time

from ridgeline.engine.guard import End, Hold, Release, Retract


class Late:
    """Lets out what comes, and takes back what it has found four characters later."""

    def see(self, text, new, final):
        at = text.find("bad")
        if 0 <= at <= len(text) - 7 or (final and at >= 0):
            return Retract(at, at + 3, "bad")
        return Release(len(text))


class Troubled:
    """Does what a text tells it to."""

    def see(self, text, new, final):
        if "hang" in new:
            time.sleep(60)
        if "die" in new:
            os._exit(1)
        if "raise" in new:
            raise ValueError(text)
        if "nonsense" in new:
            return "yes"
        if "print" in new:
            print("to where decisions go")
        if "end" in new:
            return End("told", 2)
        return Hold() if "hold" in text else Release(len(text))


class Counting:
    """Says how much its process remembers of other samples."""

    def see(self, text, new, final):
        if "slow" in new:
            time.sleep(0.3)
        judge = sys._getframe(1).f_locals["self"]
        return End(f"kept {len(judge._texts)}") if "count" in new else Release(len(text))


def broken():
    raise RuntimeError("no weights")
