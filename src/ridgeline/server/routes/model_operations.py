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
            "POST",
            "/v1/completions",
            completions.completions,
            "Continue prompts",
            generates=True,
            is_continued=True,
            request=CompletionRequest,
            answer=CompletionResponse,
            in_batches=True,
        ),
        Operation(
            "POST",
            "/v1/chat/completions",
            chat.chat,
            "Answer a conversation",
            generates=True,
            is_continued=True,
            request=ChatRequest,
            prompt_field="messages",
            answer=ChatResponse,
            in_batches=True,
        ),
        Operation(
            "POST",
            "/v1/responses",
            responses.responses,
            "Answer an input",
            generates=True,
            request=ResponsesRequest,
            prompt_field="input",
            in_batches=True,
        ),
        Operation(
            "POST",
            "/v1/messages",
            messages.messages,
            "Answer a conversation, Anthropic's way",
            generates=True,
            request=MessagesRequest,
            prompt_field="messages",
            answer=MessagesResponse,
            family=ApiFamily.ANTHROPIC,
            in_batches=True,
        ),
        Operation(
            "POST",
            "/v1/messages/count_tokens",
            messages.count_tokens,
            "Length of a message's prompt",
            request=CountTokensRequest,
            prompt_field="messages",
            answer=CountTokensResponse,
            family=ApiFamily.ANTHROPIC,
            is_counted=True,
        ),
        Operation(
            "POST",
            "/v1/embeddings",
            pooling.embeddings,
            "Vectors of texts",
            request=EmbeddingRequest,
            prompt_field="input",
            answer=EmbeddingResponse,
            in_batches=True,
        ),
        *_scoring(),
        *_ollama(),
        Operation(
            "POST",
            "/completion",
            llamacpp.completion,
            "Continue a prompt, llama.cpp's way",
            generates=True,
            request=LlamaCppRequest,
        ),
        Operation(
            "POST",
            "/infill",
            llamacpp.infill,
            "Fill in the middle, llama.cpp's way",
            generates=True,
            request=InfillRequest,
            prompt_field="input_prefix",
        ),
    ]


def _scoring() -> list[Operation]:
    """Under the paths that clients of vLLM, Jina and Cohere know."""
    scores = [
        Operation(
            "POST",
            path,
            pooling.score,
            "Scores of pairs of texts",
            request=ScoreRequest,
            prompt_field="text_2",
            answer=ScoreResponse,
        )
        for path in ("/score", "/v1/score")
    ]
    rankings = [
        Operation(
            "POST",
            path,
            pooling.rerank,
            "Documents by their relevance to a query",
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
            "POST",
            f"/api/{path}",
            handler,
            f"Ollama's {path}",
            generates=not path.startswith("embed"),
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
