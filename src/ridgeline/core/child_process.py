"""A child that answers frames, and is killed and replaced when it overruns.

A frame is a 32-bit little-endian length, then that many bytes.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Sequence


class ChildProcess:
    """Python with ``arguments``, started when it is first asked; for one thread at a time.

    It ends when its input does, as ours ends. ``shows_errors``: what it writes to standard error
    goes to ours, else nowhere.
    """

    def __init__(self, arguments: Sequence[str], *, shows_errors: bool = False) -> None:
        self._command = [sys.executable, *arguments]
        self._stderr = None if shows_errors else subprocess.DEVNULL
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    @property
    def is_running(self) -> bool:
        """Whether there is a child of this process (which may have been forked) that lives."""
        process = self._process
        return process is not None and self._owner == os.getpid() and process.poll() is None

    def exchange(self, request: bytes, *, wall_seconds: float, num_replies: int = 1) -> list[bytes]:
        """Send a frame and read its replies: those that came, where the child ended over it.

        It is killed after ``wall_seconds``, and started anew for the next request.
        """
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        replies: list[bytes] = []
        timer = threading.Timer(wall_seconds, process.kill)
        timer.start()
        try:
            process.stdin.write(len(request).to_bytes(4, "little") + request)
            process.stdin.flush()
            while len(replies) < num_replies:
                header = process.stdout.read(4)
                size = int.from_bytes(header, "little")
                data = process.stdout.read(size) if len(header) == 4 else b""
                if not data or len(data) != size:
                    break
                replies.append(data)
        except BrokenPipeError:
            pass
        except BaseException:  # Ctrl-C: what is still in the pipe must not answer the next request
            self.close()
            raise
        finally:
            timer.cancel()
        if len(replies) < num_replies:
            self.close()
        return replies

    def close(self) -> None:
        """End the child, unless it is that of the process from which this one was forked."""
        if self._process is None or self._owner != os.getpid():
            return
        self._process.kill()
        self._process.communicate()
        self._process = None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or not self.is_running:
            self.close()
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr
            )
            self._owner = os.getpid()
        return self._process
