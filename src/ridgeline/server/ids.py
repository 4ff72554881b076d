"""Ids of requests, answers, files and batches."""

import secrets


def new_id(prefix: str) -> str:
    """An id that nobody can guess."""
    return f"{prefix}{secrets.token_hex(12)}"
