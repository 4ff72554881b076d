"""The operations that run the model, for the server's table and for the lines of batches."""

from ridgeline.server.endpoint import Operation
from ridgeline.server.errors import Family
from ridgeline.server.routes import chat, completions, messages, plain, responses
from ridgeline.server.schemas.chat import ChatRequest, ChatResponse
from ridgeline.server.schemas.completions import CompletionRequest, CompletionResponse
from ridgeline.server.schemas.messages import (
    CountTokensRequest,
    CountTokensResponse,
    MessagesRequest,
    MessagesResponse,
)
from ridgeline.server.schemas.plain import EmbeddingRequest, EmbeddingResponse
from ridgeline.server.schemas.responses import ResponsesRequest


def model_operations() -> list[Operation]:
    """What runs the model; lines of a batch may ask for those that are ``in_batches``."""
    return [
        Operation(
            method="POST",
            path="/v1/completions",
            generates=True,
            handler=completions.completions,
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
            summary="Answer an input, without state",
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
            family=Family.ANTHROPIC,
        ),
        Operation(
            method="POST",
            path="/v1/messages/count_tokens",
            handler=messages.count_tokens,
            summary="Length of a message's prompt",
            request=CountTokensRequest,
            prompt_field="messages",
            answer=CountTokensResponse,
            family=Family.ANTHROPIC,
            is_counted=True,
        ),
        Operation(
            method="POST",
            path="/v1/embeddings",
            handler=plain.embeddings,
            summary="Vectors of texts",
            request=EmbeddingRequest,
            prompt_field="input",
            answer=EmbeddingResponse,
            in_batches=True,
        ),
    ]
