"""Routes of other servers that are not here, and what is done instead."""

_ONE_NAME = "--served-model-name gives the served model other names, at the start"
_ADAPTERS = "adapters are named at the start, --adapters NAME=FOLDER, and asked for as models"
_POOLING = "/v1/embeddings makes vectors, and /rerank and /score compare texts"
_CHATS = "/v1/responses and /v1/chat/completions are here"
_TEXT = "the models here read and write text"
# The end of the sentence "There is no route PATH", by the beginning of the path.
_INSTEAD = {
    "/api/create": "there are no Modelfiles; `ridgeline serve MODEL` chooses what is served, and "
    "each request has its system message and options",
    "/api/copy": f"{_ONE_NAME}, and `ridgeline pull MODEL --alias NAME` those on this machine",
    "/api/push": "models are downloaded, and never uploaded",
    "/api/blobs": "models come by /api/pull, or as files that `ridgeline serve PATH` names",
    "/api/web_": "this server calls no other",
    "/v1/images": _TEXT,
    "/v1/audio": _TEXT,
    "/v1/moderations": "`--guard` has scorers of outputs",
    "/v1/fine_tuning": "`ridgeline train-adapter` and `ridgeline distill` train, without a server",
    "/v1/vector_stores": "/v1/embeddings makes vectors, and keeps none",
    "/v1/conversations": "send the conversation as input, or name a previous_response_id",
    "/v1/uploads": "/v1/files takes a file as a whole",
    "/v1/assistants": _CHATS,
    "/v1/threads": _CHATS,
    "/v1/load_lora_adapter": _ADAPTERS,
    "/v1/unload_lora_adapter": _ADAPTERS,
    "/lora-adapters": _ADAPTERS,
    "/pooling": _POOLING,
    "/classify": _POOLING,
    "/slots/": "no slot owns a cache: requests find the prefixes of all, and /v1/caches names some",
    "/sleep": "a server of several models lets one go with POST /admin/models/unload",
}


def instead_of(path: str) -> str | None:
    """What is here in place of another server's route, if that is known."""
    return next((text for start, text in _INSTEAD.items() if path.startswith(start)), None)
