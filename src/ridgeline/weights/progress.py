"""How long work reports how far it is; drawing it is up to the caller."""

from collections.abc import Callable

Progress = Callable[[int, int, str], None]
"""Called with the bytes done, the bytes in all, and what is being worked on."""
