"""What files of keys say in place of a key."""

import hashlib


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
