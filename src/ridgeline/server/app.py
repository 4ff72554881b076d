"""The table of routes (those of the model are apart), and the ASGI application made of it."""

from collections.abc import Collection
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from ridgeline.core.spelling import suggestion
from ridgeline.server.absent_routes import instead_of
from ridgeline.server.access import Access
from ridgeline.server.context import Call, Server
from ridgeline.server.continuation import STATE_PATH
from ridgeline.server.endpoint import Endpoint, Handler, Operation
from ridgeline.server.errors import ApiError, ApiFamily, family_of
from ridgeline.server.openapi import openapi
from ridgeline.server.page import page_operations
from ridgeline.server.replies import Reply, encode
from ridgeline.server.routes import (
    batches,
    caches,
    files,
    llamacpp,
    message_batches,
    ollama_models,
    operations,
    plain,
    prefixes,
    responses,
)
from ridgeline.server.routes.model_operations import model_operations
from ridgeline.server.schemas import caches as schema_caches
from ridgeline.server.schemas import ollama as schemas
from ridgeline.server.schemas import plain as plain_schemas
from ridgeline.server.schemas.batches import (
    FILES_QUERY,
    ITEMS_QUERY,
    MESSAGE_BATCHES_QUERY,
    PAGE_QUERY,
    UPLOAD_FORM,
    BatchRequest,
    MessageBatchRequest,
)
from ridgeline.server.schemas.llamacpp import ApplyTemplateRequest
from ridgeline.server.schemas.operations import ProfileRequest
from ridgeline.server.schemas.responses import ResponsesRequest

_MAX_PATH_CHARS = 100


def api_operations() -> list[Operation]:
    """Every operation that ``/openapi.json`` describes."""
    return [
        *model_operations(),
        *_text(),
        *_jobs(),
        *_message_batches(),
        *_responses(),
        *_prefixes(),
        *_ollama(),
        *_llamacpp(),
        _probe("/health", operations.health, "The process lives"),
        _probe("/ready", operations.ready, "Requests are taken"),
        _probe("/ping", operations.ping, "As /health"),
        _probe("/load", operations.load, "How busy it is"),
        _probe("/metrics", operations.metrics, "Prometheus"),
        Operation("GET", "/version", operations.version, "Version"),
        Operation("GET", "/admin/usage", operations.usage, "Usage of each key", needs_admin=True),
        Operation(
            "GET",
            "/admin/traffic",
            operations.traffic,
            "Lengths and arrivals of the latest requests, and alarms where they changed",
            needs_admin=True,
        ),
        Operation(
            "POST",
            "/admin/profile",
            operations.profile,
            "Where the seconds of the next steps go",
            of_model=True,
            request=ProfileRequest,
            needs_admin=True,
        ),
        Operation(
            "DELETE",
            "/admin/tenants/{tenant}",
            operations.delete_tenant,
            "Remove all that is kept for a tenant",
            needs_admin=True,
        ),
    ]


def _probe(path: str, handler: Handler, summary: str) -> Operation:
    return Operation("GET", path, handler, summary, is_probe=True)


def _text() -> list[Operation]:
    return [
        Operation(
            "GET",
            "/v1/models",
            plain.list_models,
            "Models",
            query=plain_schemas.MODELS_QUERY,
            answer=plain_schemas.ModelList,
        ),
        Operation(
            "GET",
            "/v1/models/{model:path}",
            plain.get_model,
            "One model",
            answer=plain_schemas.ModelCard,
        ),
        *(
            Operation(
                "POST",
                f"/admin/models/{verb}",
                handler,
                summary,
                request=plain_schemas.ModelRequest,
                answer=plain_schemas.ModelCard,
                needs_admin=True,
            )
            for verb, handler, summary in (
                ("load", plain.load_model, "Load one of several models"),
                ("unload", plain.unload_model, "Let one of several models go"),
            )
        ),
        Operation(
            "POST",
            "/tokenize",
            plain.tokenize_text,
            "Text to token ids",
            of_model=True,
            request=plain_schemas.TokenizeRequest,
            answer=plain_schemas.TokenizeResponse,
            is_counted=True,
        ),
        Operation(
            "POST",
            "/detokenize",
            plain.detokenize,
            "Token ids to text",
            of_model=True,
            request=plain_schemas.DetokenizeRequest,
            answer=plain_schemas.DetokenizeResponse,
            is_counted=True,
        ),
        Operation(
            "GET",
            "/tokenizer_info",
            plain.tokenizer_info,
            "About the tokenizer",
            of_model=True,
            answer=plain_schemas.TokenizerInfo,
            is_counted=True,
        ),
    ]


def _responses() -> list[Operation]:
    path = "/v1/responses/{response_id}"
    return [
        Operation("GET", path, responses.get_response, "A response that was kept", is_counted=True),
        Operation(
            "GET",
            f"{path}/input_items",
            responses.input_items,
            "What a kept response was made from",
            query=ITEMS_QUERY,
            is_counted=True,
        ),
        Operation(
            "POST",
            "/v1/responses/input_tokens",
            responses.count_input_tokens,
            "Length of a response's prompt",
            request=ResponsesRequest,
            prompt_field="input",
            of_model=True,
            is_counted=True,
        ),
        Operation("DELETE", path, responses.delete_response, "Forget a response", is_counted=True),
    ]


def _ollama() -> list[Operation]:
    def operation(
        method: str, path: str, handler: Handler, request: type | None = None
    ) -> Operation:
        return Operation(
            method,
            f"/api/{path}",
            handler,
            f"Ollama's {path}",
            request=request,
            family=ApiFamily.OLLAMA,
            is_counted=path in ("pull", "delete"),
            of_model=path == "show",
        )

    return [
        operation("GET", "version", ollama_models.ollama_version),
        operation("GET", "tags", ollama_models.ollama_tags),
        operation("GET", "ps", ollama_models.ollama_ps),
        operation("POST", "show", ollama_models.ollama_show, schemas.OllamaShowRequest),
        operation("POST", "pull", ollama_models.ollama_pull, schemas.OllamaPullRequest),
        operation("DELETE", "delete", ollama_models.ollama_delete, schemas.OllamaDeleteRequest),
    ]


def _llamacpp() -> list[Operation]:
    return [
        Operation("GET", "/props", llamacpp.props, "llama.cpp's props", of_model=True),
        Operation(
            "GET", "/slots", llamacpp.slots, "llama.cpp's slots", of_model=True, is_probe=True
        ),
        Operation(
            "POST",
            "/apply-template",
            llamacpp.apply_template,
            "The prompt of a conversation, llama.cpp's way",
            of_model=True,
            request=ApplyTemplateRequest,
            prompt_field="messages",
            is_counted=True,
        ),
    ]


def _prefixes() -> list[Operation]:
    return [
        Operation(
            "POST",
            "/explain_miss",
            prefixes.explain_miss,
            "Why a prompt is not cached further than it is",
            of_model=True,
            request=plain_schemas.ExplainRequest,
            answer=plain_schemas.MissResponse,
            is_counted=True,
        ),
        Operation(
            "POST",
            "/v1/caches",
            caches.create_cache,
            "Keep a prefix, to be named by requests",
            request=schema_caches.CacheRequest,
            answer=schema_caches.CacheCard,
        ),
        Operation(
            "GET",
            "/v1/caches",
            caches.list_caches,
            "Named prefixes",
            answer=schema_caches.CacheList,
            is_counted=True,
        ),
        Operation(
            "GET",
            "/v1/caches/{cache_id}",
            caches.get_cache,
            "One named prefix",
            answer=schema_caches.CacheCard,
            is_counted=True,
        ),
        Operation(
            "PATCH",
            "/v1/caches/{cache_id}",
            caches.change_cache,
            "Let it expire at another time",
            request=schema_caches.CacheChange,
            answer=schema_caches.CacheCard,
            is_counted=True,
        ),
        Operation(
            "DELETE",
            "/v1/caches/{cache_id}",
            caches.delete_cache,
            "Let go of a named prefix",
            is_counted=True,
        ),
        *(
            Operation(
                "DELETE",
                path,
                caches.delete_responses,
                "Forget answers that are kept",
                is_counted=True,
            )
            for path in ("/v1/response-cache", "/v1/response-cache/{response}")
        ),
    ]


def _jobs() -> list[Operation]:
    return [
        Operation(
            "POST",
            "/v1/files",
            files.upload_file,
            "Upload a file",
            form=UPLOAD_FORM,
            reads_raw=True,
            is_counted=True,
        ),
        Operation(
            "GET", "/v1/files", files.list_files, "Files", query=FILES_QUERY, is_counted=True
        ),
        Operation("GET", "/v1/files/{file_id}", files.get_file, "One file", is_counted=True),
        Operation(
            "DELETE", "/v1/files/{file_id}", files.delete_file, "Delete a file", is_counted=True
        ),
        Operation(
            "GET",
            "/v1/files/{file_id}/content",
            files.get_file_content,
            "What is in a file",
            is_counted=True,
        ),
        Operation(
            "POST",
            "/v1/batches",
            batches.create_batch,
            "Queue a batch",
            request=BatchRequest,
            is_counted=True,
        ),
        Operation(
            "GET", "/v1/batches", batches.list_batches, "Batches", query=PAGE_QUERY, is_counted=True
        ),
        Operation("GET", "/v1/batches/{batch_id}", batches.get_batch, "One batch", is_counted=True),
        Operation(
            "POST",
            "/v1/batches/{batch_id}/cancel",
            batches.cancel_batch,
            "End a batch early",
            is_counted=True,
        ),
    ]


def _message_batches() -> list[Operation]:
    def operation(
        method: str, path: str, handler: Handler, summary: str, **fields: Any
    ) -> Operation:
        return Operation(
            method,
            f"/v1/messages/batches{path}",
            handler,
            summary,
            family=ApiFamily.ANTHROPIC,
            is_counted=True,
            **fields,
        )

    one = "/{batch_id}"
    return [
        operation(
            "POST",
            "",
            message_batches.create_message_batch,
            "Queue messages",
            request=MessageBatchRequest,
        ),
        operation(
            "GET",
            "",
            message_batches.list_message_batches,
            "Batches of messages",
            query=MESSAGE_BATCHES_QUERY,
        ),
        operation("GET", one, message_batches.get_message_batch, "One batch of messages"),
        operation("POST", f"{one}/cancel", message_batches.cancel_message_batch, "End it early"),
        operation("GET", f"{one}/results", message_batches.message_batch_results, "Its results"),
        operation("DELETE", one, message_batches.delete_message_batch, "Delete it"),
    ]


def all_operations() -> list[Operation]:
    """The whole table, with the page, its stream, and the description of the rest."""
    described = api_operations()
    document = encode(openapi(described))

    async def openapi_json(_: Call) -> Reply:
        return Reply(body=document)

    return [
        *described,
        Operation("GET", "/openapi.json", openapi_json, "This description"),
        Operation("GET", "/live", operations.live, "Metrics for the page"),
        Operation(
            "GET", STATE_PATH.decode(), operations.engine_state, "For routers", is_probe=True
        ),
        *page_operations(),
    ]


def build_app(server: Server) -> ASGIApp:
    """The application, behind its access control."""
    return Access(_Routes(server), server)


class _Routes:
    """The router alone: Starlette's own application wraps each piece of a stream twice more."""

    def __init__(self, server: Server) -> None:
        operations = all_operations()
        self._paths = {operation.path for operation in operations}
        routes = [
            Route(operation.path, Endpoint(server, operation), methods=[operation.method])
            for operation in operations
        ]
        self._router = Router(routes, redirect_slashes=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self  # then what has no route is raised, not answered in plain text
        try:
            await self._router(scope, receive, send)
        except HTTPException as error:
            await _plain_error(scope, error, self._paths)(scope, receive, send)


def _plain_error(scope: Scope, error: HTTPException, paths: Collection[str]) -> Response:
    """What has no route, in the shape of its family."""
    path = scope["path"]
    texts = {
        404: f"There is no route {path[:_MAX_PATH_CHARS]}{_hint(path, paths)}",
        405: f"{path[:_MAX_PATH_CHARS]} has no method {scope['method'][:16]}.",
    }
    api_error = ApiError(error.status_code, texts[error.status_code])
    call: Call = scope["state"]["call"]
    return Response(
        encode(api_error.body(family_of(scope["path"]), call.request_id)),
        status_code=error.status_code,
        headers=error.headers,
        media_type="application/json",
    )


def _hint(path: str, paths: Collection[str]) -> str:
    """The end of the sentence that says that there is no such route: the path that was meant."""
    plain = path.rstrip("/").removeprefix("/api").replace("/v1", "")
    for meant in (f"/v1{plain}", plain):
        if meant in paths and meant != path:
            return f"; did you mean {meant}? Base URLs of OpenAI's clients end with /v1."
    instead = instead_of(path)
    if instead is not None:
        return f": {instead}."
    return suggestion(path, [each for each in paths if not each.startswith("/page/")])
