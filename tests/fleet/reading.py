"""What a client has of a stream of chat or completion events, whatever the events' borders are."""

import json


def read(stream):
    """By choice all of its text, tokens, log-probabilities and calls; and what is of the whole."""
    assert stream.endswith(b"data: [DONE]\n\n"), stream[-300:]
    whole = {"ids": set(), "choices": {}, "usage": None}
    for line in stream.split(b"\n"):
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line.removeprefix(b"data: "))
        assert "error" not in event, event
        whole["ids"].add((event["id"], event["created"], event["object"], event["model"]))
        if usage := event.get("usage"):
            whole["usage"] = usage["prompt_tokens"], usage["completion_tokens"]
        whole.setdefault("prompt", event.get("prompt_token_ids"))
        for choice in event["choices"]:
            known = whole["choices"].setdefault(choice["index"], {})
            _add(known, {k: v for k, v in choice.items() if k != "index"})
    assert len(whole["ids"]) == 1
    return whole


def without_identity(whole):
    """For streams of two requests."""
    return whole | {"ids": None}


def _add(known, new):
    for name, value in new.items():
        if value in (None, "") or name in ("id", "index"):
            continue
        if isinstance(value, dict):
            _add(known.setdefault(name, {}), value)
        elif name == "tool_calls":
            for call in value:
                _add(known.setdefault(f"call {call['index']}", {}), call)
        elif name in ("finish_reason", "stop_reason", "role", "type", "name"):
            assert name not in known, f"{name} comes twice"
            known[name] = value
        else:
            known[name] = known[name] + value if name in known else value
