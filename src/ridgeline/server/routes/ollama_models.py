"""Ollama's routes around models: what there is, what it is, downloads, embeddings."""

import hashlib
import time
from collections.abc import AsyncGenerator
from datetime import UTC, datetime, timedelta
from typing import Any

import ridgeline
from ridgeline.core.errors import RidgelineError
from ridgeline.server.context import Call, Server
from ridgeline.server.downloads import Download, download_error
from ridgeline.server.errors import ApiError, bad_request
from ridgeline.server.fim import fim_template
from ridgeline.server.pool.choice import LATEST_TAG
from ridgeline.server.replies import EventStream, Reply, json_lines
from ridgeline.server.routes.ollama import model_of
from ridgeline.server.routes.pooling import embeddings
from ridgeline.server.schemas.ollama import (
    OllamaDeleteRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaPullRequest,
    OllamaShowRequest,
)
from ridgeline.server.schemas.pooling import EmbeddingRequest, EmbeddingResponse

_API_VERSION = "0.12.0"  # of Ollama, whose interface this is: its clients compare its three numbers
_PROGRESS_S = 0.2
_NEVER = "9999-12-31T23:59:59Z"
_YEAR_S = 365 * 86400


async def ollama_version(_: Call) -> Reply:
    """The version of Ollama whose interface this is, and ours."""
    return Reply(body={"version": _API_VERSION, "ridgeline": ridgeline.__version__})


async def ollama_tags(call: Call) -> Reply:
    """Every model that a request can name."""
    server = call.server
    return Reply(body={"models": [_card(server, name) for name in server.models_of(call.caller)]})


async def ollama_ps(call: Call) -> Reply:
    """The models in memory, and until when they stay if nobody asks for them."""
    server = call.server
    models = []
    for name in server.models_of(call.caller):
        view = server.view_of(name)
        if view.model is None or view.model.state == "loaded":
            models.append(_card(server, name) | _loaded(view))
    return Reply(body={"models": models})


def _loaded(server: Server) -> dict[str, Any]:
    loaded = {"size_vram": 0, "context_length": server.facts.context, "expires_at": _NEVER}
    if server.model is not None:
        loaded["size"] = server.model.tenancy.num_bytes
        if (left_s := server.model.expires_in_s) < _YEAR_S:
            ends = datetime.now(UTC) + timedelta(seconds=left_s)
            loaded["expires_at"] = ends.isoformat().replace("+00:00", "Z")
    return loaded


async def ollama_show(call: Call, request: OllamaShowRequest) -> Reply:
    """What is known of a model."""
    server = call.server
    name = _named(server, request.model or request.name)
    server.check_model(name, call.caller)
    spec, summary = server.engine.spec, server.engine.summary
    family = spec.model_type
    capabilities = ["completion", "embedding"] if spec.has_head else ["embedding"]
    capabilities += ["tools"] if server.engine.chat_template is not None else []
    capabilities += ["thinking"] if server.reasoning_parser is not None else []
    gap = "" if server.engine.tokenizer is None else fim_template(server.engine.tokenizer)
    capabilities += ["insert"] if gap else []
    card = _card(server, name)
    return Reply(
        body={
            "modelfile": f"FROM {server.engine.model_name}\n",
            "parameters": "\n".join(
                f"{key} {value}" for key, value in server.engine.sampling_defaults.items()
            ),
            "template": gap + server.template_source,
            "details": card["details"],
            "model_info": {
                "general.architecture": family,
                "general.parameter_count": summary.num_parameters,
                f"{family}.context_length": server.engine.config.max_model_len,
                f"{family}.embedding_length": spec.hidden_size,
                f"{family}.block_count": len(spec.layers),
            },
            "capabilities": capabilities,
            "modified_at": card["modified_at"],
        }
    )


async def ollama_embed(call: Call, request: OllamaEmbedRequest) -> Reply:
    """The vector of each input."""
    started_s = time.monotonic()
    found = await _embedded(call, request.model, request.input, request)
    return Reply(
        body={
            "model": request.model,
            "embeddings": [item.embedding for item in found.data],
            "total_duration": int((time.monotonic() - started_s) * 1e9),
            "load_duration": 0,
            "prompt_eval_count": found.usage.prompt_tokens,
        }
    )


async def ollama_embeddings(call: Call, request: OllamaEmbeddingsRequest) -> Reply:
    """The vector of one text, by the older route."""
    found = await _embedded(call, request.model, request.prompt, None)
    return Reply(body={"embedding": found.data[0].embedding})


async def _embedded(
    call: Call, model: str, texts: str | list[str], request: OllamaEmbedRequest | None
) -> EmbeddingResponse:
    reply = await embeddings(
        call,
        EmbeddingRequest(
            model=model_of(call.server, model),
            input=texts,
            dimensions=None if request is None else request.dimensions,
            truncate_prompt_tokens=-1 if request is None or request.truncate else None,
        ),
    )
    found: EmbeddingResponse = reply.body
    return found


async def ollama_pull(call: Call, request: OllamaPullRequest) -> Reply | EventStream:
    """Download a model to this machine, for the next start of a server; the admin's to do."""
    server = call.server
    name = _named(server, request.model or request.name)
    download = None
    if name not in server.model_names:
        call.check_admin()
        _check_hub_name(name)
        download = server.downloads.start(name)
    lines = _pulled(name, download)
    if request.stream:
        return json_lines(lines)
    async for _ in lines:
        pass
    return Reply(body={"status": "success"})


async def _pulled(name: str, download: Download | None) -> AsyncGenerator[Any, None]:
    yield {"status": "pulling manifest"}
    if download is not None:
        told, digest = 0, f"sha256:{hashlib.sha256(name.encode()).hexdigest()}"
        while not await download.wait(_PROGRESS_S):
            if download.done > told:
                told = download.done
                yield {
                    "status": f"pulling {name}",
                    "digest": digest,
                    "total": download.total,
                    "completed": told,
                }
        try:
            download.result.result()
        except RidgelineError as error:
            raise download_error(error) from error
    yield {"status": "success"}


async def ollama_delete(call: Call, request: OllamaDeleteRequest) -> Reply:
    """Delete a downloaded model; not one that is in use."""
    from ridgeline.weights.downloaded import remove_downloaded, repository_of

    server = call.server
    name = _named(server, request.model or request.name)
    call.check_admin()
    used = (*server.model_names, *(source for view in server.views for source in view.sources))
    if repository_of(name) in {repository_of(each) for each in used}:
        raise ApiError(409, f"{name} is in use, and so it is not deleted.", code="in_use")
    try:
        await server.in_thread(remove_downloaded, name)
    except RidgelineError as error:
        raise download_error(error) from error
    return Reply(body={})


def _check_hub_name(name: str) -> None:
    from ridgeline.weights.aliases import read_aliases
    from ridgeline.weights.location import hub_name

    try:
        hub_name(read_aliases().get(name, name))
    except RidgelineError as error:
        text = f"model: {name[:96]!r} is no name on the hub, such as owner/name."
        raise bad_request(text, "model") from error


def _named(server: Server, name: str | None) -> str:
    if not name:
        raise bad_request("model: this field is required.", "model")
    return model_of(server, name)


def _card(server: Server, name: str) -> dict[str, Any]:
    server = server.view_of(name)
    facts, family = server.facts, server.facts.family
    count = facts.num_parameters
    shown = f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"
    tagged = name if ":" in name else name + LATEST_TAG
    return {
        "name": tagged,
        "model": tagged,
        "modified_at": datetime.fromtimestamp(server.created, UTC).isoformat(),
        "size": facts.weights_bytes,
        "digest": _digest(server, name),
        "details": {
            "parent_model": "" if server.adapter(name) is None else server.model_name,
            "format": "ridgeline",
            "family": family,
            "families": [family],
            "parameter_size": shown,
            "quantization_level": facts.weights_format,
        },
    }


def _digest(server: Server, name: str) -> str:
    """Names the model and its format; not its bytes, as Ollama's does."""
    facts = server.view_of(name).facts
    told = f"{name}\0{facts.root}\0{facts.weights_format}\0{facts.weights_bytes}"
    return hashlib.sha256(told.encode()).hexdigest()
