"""Whatever a schema allows to be written is valid by `jsonschema`, which we did not write."""

import json
import random

import jsonschema
import pytest
from tests.decoding.grammars.conftest import random_walk
from tests.decoding.grammars.schemas import BY_HAND, generated

from ridgeline.core.errors import InvalidRequestError
from ridgeline.core.structured_outputs import StructuredOutputs

CHECKER = jsonschema.Draft202012Validator.FORMAT_CHECKER
NUM_GENERATED = 400


def outputs(schema, compiler, tokenizer, seeds):
    wanted = StructuredOutputs.of({"json": schema})
    for seed in seeds:
        tokens = random_walk(compiler.prepare(wanted)(), tokenizer, random.Random(seed))
        yield None if tokens is None else tokenizer.decode(tokens)


def check(schema, text):
    jsonschema.Draft202012Validator(schema, format_checker=CHECKER).validate(json.loads(text))


@pytest.mark.parametrize("schema", BY_HAND, ids=lambda s: json.dumps(s)[:40])
def test_schemas_by_hand(schema, compiler, tokenizer):
    finished = [t for t in outputs(schema, compiler, tokenizer, range(5)) if t is not None]
    assert finished
    for text in finished:
        check(schema, text)


def test_generated_schemas(compiler, tokenizer):
    """Few are refused, and these with a sentence; nearly all outputs finish, and all are valid."""
    refused, unfinished, checked = [], 0, 0
    for seed in range(NUM_GENERATED):
        schema = generated(seed)
        try:
            for text in outputs(schema, compiler, tokenizer, (seed, seed + 1)):
                if text is None:
                    unfinished += 1
                else:
                    check(schema, text)
                    checked += 1
        except InvalidRequestError as error:
            refused.append(str(error))
    assert len(refused) < NUM_GENERATED * 0.1, refused[:5]
    assert unfinished < NUM_GENERATED * 0.1
    assert checked > NUM_GENERATED * 1.7
