"""What encryption of stored data costs, in processor time: python benchmarks/encryption.py."""

import os
import statistics
import time
from collections.abc import Callable

from ridgeline.core.encryption import Encryption

ROUNDS = 7


def median_s(count: int, work: Callable[[bytes, str], object], content: bytes) -> float:
    """Processor seconds of one call, the median of some rounds of ``count``."""
    seconds = []
    for _ in range(ROUNDS):
        start_s = time.process_time()
        for _ in range(count):
            work(content, "name")
        seconds.append((time.process_time() - start_s) / count)
    return statistics.median(seconds)


def main() -> None:
    """Print the cost of large contents by MiB, and of small ones each."""
    encryption = Encryption(os.urandom(32))
    for size, count in ((1 << 10, 1000), (1 << 17, 100), (1 << 24, 1)):
        content = os.urandom(size)
        sealed = encryption.seal(content, "name")
        write_s = median_s(count, encryption.seal, content)
        read_s = median_s(count, encryption.unseal, sealed)
        mib = size / 2**20
        print(
            f"{size:>9,} bytes: write {write_s * 1e6:8.1f} µs ({write_s * 1e3 / mib:5.2f} ms/MiB), "
            f"read {read_s * 1e6:8.1f} µs ({read_s * 1e3 / mib:5.2f} ms/MiB)"
        )


if __name__ == "__main__":
    main()
