"""The operations that run the model, for the server's table and for the lines of batches."""

from dataclasses import replace

from ridgeline.server.endpoint import Handler, Operation
from ridgeline.server.errors import ApiFamily
from ridgeline.server.routes import (
    chat,
    completions,
    llamacpp,
    messages,
    ollama,
    ollama_models,
    pooling,
    responses,
)
from ridgeline.server.schemas.chat import ChatRequest, ChatResponse
from ridgeline.server.schemas.completions import CompletionRequest, CompletionResponse
from ridgeline.server.schemas.llamacpp import InfillRequest, LlamaCppRequest
from ridgeline.server.schemas.messages import (
    CountTokensRequest,
    CountTokensResponse,
    MessagesRequest,
    MessagesResponse,
)
from ridgeline.server.schemas.ollama import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
)
from ridgeline.server.schemas.pooling import (
    EmbeddingRequest,
    EmbeddingResponse,
    RerankRequest,
    RerankResponse,
    ScoreRequest,
    ScoreResponse,
)
from ridgeline.server.schemas.responses import ResponsesRequest


def model_operations() -> list[Operation]:
    """What runs the model; lines of a batch may ask for those that are ``in_batches``."""
    return [replace(operation, of_model=True) for operation in _operations()]


def _operations() -> list[Operation]:
    return [
        Operation(
            method="POST",
            path="/v1/completions",
            generates=True,
            handler=completions.completions,
            is_continued=True,
            summary="Continue prompts",
            request=CompletionRequest,
            answer=CompletionResponse,
            in_batches=True,
        ),
        Operation(
            method="POST",
            path="/v1/chat/completions",
            generates=True,
            handler=chat.chat,
            is_continued=True,
            summary="Answer a conversation",
            request=ChatRequest,
            prompt_field="messages",
            answer=ChatResponse,
            in_batches=True,
        ),
        Operation(
            method="POST",
            path="/v1/responses",
            generates=True,
            handler=responses.responses,
            summary="Answer an input",
            request=ResponsesRequest,
            prompt_field="input",
            in_batches=True,
        ),
        Operation(
            method="POST",
            path="/v1/messages",
            generates=True,
            handler=messages.messages,
            summary="Answer a conversation, Anthropic's way",
            request=MessagesRequest,
            prompt_field="messages",
            answer=MessagesResponse,
            family=ApiFamily.ANTHROPIC,
        ),
        Operation(
            method="POST",
            path="/v1/messages/count_tokens",
            handler=messages.count_tokens,
            summary="Length of a message's prompt",
            request=CountTokensRequest,
            prompt_field="messages",
            answer=CountTokensResponse,
            family=ApiFamily.ANTHROPIC,
            is_counted=True,
        ),
        Operation(
            method="POST",
            path="/v1/embeddings",
            handler=pooling.embeddings,
            summary="Vectors of texts",
            request=EmbeddingRequest,
            prompt_field="input",
            answer=EmbeddingResponse,
            in_batches=True,
        ),
        *_scoring(),
        *_ollama(),
        Operation(
            method="POST",
            path="/completion",
            generates=True,
            handler=llamacpp.completion,
            summary="Continue a prompt, llama.cpp's way",
            request=LlamaCppRequest,
        ),
        Operation(
            method="POST",
            path="/infill",
            generates=True,
            handler=llamacpp.infill,
            summary="Fill in the middle, llama.cpp's way",
            request=InfillRequest,
            prompt_field="input_prefix",
        ),
    ]


def _scoring() -> list[Operation]:
    """Under the paths that clients of vLLM, Jina and Cohere know."""
    scores = [
        Operation(
            method="POST",
            path=path,
            handler=pooling.score,
            summary="Scores of pairs of texts",
            request=ScoreRequest,
            prompt_field="text_2",
            answer=ScoreResponse,
        )
        for path in ("/score", "/v1/score")
    ]
    rankings = [
        Operation(
            method="POST",
            path=path,
            handler=pooling.rerank,
            summary="Documents by their relevance to a query",
            request=RerankRequest,
            prompt_field="documents",
            answer=RerankResponse,
        )
        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    ]
    return scores + rankings


def _ollama() -> list[Operation]:
    def operation(path: str, handler: Handler, request: type, prompt_field: str) -> Operation:
        return Operation(
            method="POST",
            path=f"/api/{path}",
            generates=not path.startswith("embed"),
            handler=handler,
            summary=f"Ollama's {path}",
            request=request,
            prompt_field=prompt_field,
            family=ApiFamily.OLLAMA,
        )

    return [
        operation("chat", ollama.ollama_chat, OllamaChatRequest, "messages"),
        operation("generate", ollama.ollama_generate, OllamaGenerateRequest, "prompt"),
        operation("embed", ollama_models.ollama_embed, OllamaEmbedRequest, "input"),
        operation("embeddings", ollama_models.ollama_embeddings, OllamaEmbeddingsRequest, "prompt"),
    ]
