"""Patterns, schemas and grammars made to cost time or memory."""

import itertools


def _nested(depth, inner, open_, close):
    return open_ * depth + inner + close * depth


def _deep_refs(count):
    defs = {
        f"d{i}": {"type": "array", "items": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 9}}
        for i in range(count)
    }
    return {"$defs": defs | {f"d{count}": {}}, "$ref": "#/$defs/d0"}


def regexes():
    for n in (10, 100, 1000, 4000):
        yield "a?" * (n // 2) + "a" * (n // 2)
        yield f"(a|aa){{{n}}}"
        yield f".{{0,{n * 100}}}x"
        yield f"(.*a){{1,{n}}}"
        yield f"[a-z]{{1,{n}}}[0-9]{{1,{n}}}" * 8
        yield f"(x+x+)+y{{{n}}}"
        yield rf"\p{{L}}{{1,{n}}}\w{{1,{n}}}"
        yield f"(a|b)*a(a|b){{{n}}}"
        yield "|".join(f"w{i}" for i in range(n))
        yield _nested(n // 4, "a", "(", ")*")
        yield f"(?i:{'straße' * (n // 8)}){{9}}"
        yield f"((((a{{1,{n}}}){{1,{n}}}){{1,{n}}}){{1,{n}}})"
        yield ".*".join("abcdefgh"[: n % 7 + 2]) * (n // 16 + 1)
        yield f"([^a]*a){{{n}}}|([^b]*b){{{n}}}|([^c]*c){{{n}}}"
    yield "a" * 200_000
    yield "(" * 3000
    yield "[" * 3000


def schemas():
    for n in (10, 100, 1000):
        yield {"type": "string", "minLength": n * 1000, "maxLength": n * 10_000}
        yield {"type": "array", "items": {}, "minItems": n * 100, "maxItems": n * 1000}
        yield {"enum": [f"value {i}" for i in range(n * 5)]}
        yield {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(n)}}
        yield {"anyOf": [{"properties": {f"k{i}": {"const": i}}} for i in range(n)]}
        yield {"oneOf": [{"properties": {f"k{i}": {"const": i}}} for i in range(n)]}
        yield {"allOf": [{"pattern": f"^.*{i}.*$"} for i in range(n // 2)], "type": "string"}
        yield {"type": "string", "pattern": f"(.*a){{1,{n}}}"}
        yield {"type": "integer", "minimum": -(10**n), "maximum": 10**n}
        yield {"type": "integer", "multipleOf": 10**9 + 7, "minimum": 0, "maximum": 10 ** (n % 18)}
        yield {"patternProperties": {f"^{'a?' * (i % 40)}{i}": {} for i in range(n // 4)}}
        yield _deep_refs(min(n, 300))
        yield {"$ref": "#"}
        nested = {}
        for _ in range(min(n, 60)):
            nested = {"anyOf": [nested, {"type": "array", "items": nested}]}
        yield {"not": {"not": {"minLength": n}}}
        yield {"type": "object", "required": [f"r{i}" for i in range(n)]}
        yield {"dependentRequired": {f"r{i}": [f"r{i + 1}"] for i in range(n)}}


def grammars():
    for n in (10, 100, 1000):
        yield 'start: "a" start? "b"? start?'
        yield (
            "start: s0\n" + "\n".join(f"s{i}: s{i + 1} s{i + 1}" for i in range(n)) + f'\ns{n}: "x"'
        )
        yield "start: " + " | ".join(f"a{i}" for i in range(n))
        yield 'start: x\nx: x x | x x x | "a"'
        yield f'start: ("a" | "b"? "c"?){{1,{n}}}'
        yield f"start: /{'(a|b)?' * n}/"
        yield f"start: T{{{n}}}\nT: /.*/ /.*a/"


def every_bomb():
    yield from ({"regex": each} for each in regexes())
    yield from ({"json": each} for each in schemas())
    yield from ({"grammar": each} for each in grammars())


def cycle(count):
    """The first ``count`` of them, over and over."""
    return list(itertools.islice(itertools.cycle(every_bomb()), count))
