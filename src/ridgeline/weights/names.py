"""Names of tensors and files as messages show them."""


def short_name(name: str) -> str:
    """A name for a message: quoted, control characters escaped, at most 80 characters."""
    return ascii(name if len(name) <= 80 else f"{name[:77]}...")


def list_some(names: list[str], limit: int = 8) -> str:
    """The first ``limit`` names, quoted, and how many more there are."""
    text = ", ".join(short_name(name) for name in names[:limit])
    return text if len(names) <= limit else f"{text} and {len(names) - limit} more"
