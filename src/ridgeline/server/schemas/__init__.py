"""What travels over HTTP: msgspec structs, from which ``/openapi.json`` is made."""
