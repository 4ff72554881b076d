# ruff: noqa: E501
"""No template gets out of the sandbox, and none runs beyond its limits of CPU time and memory."""

import os
import signal
import threading

import psutil
import pytest

from ridgeline.core.errors import ChatTemplateError
from ridgeline.text import ChatTemplate, RenderLimits
from ridgeline.text.template_process import template_process

MESSAGES = [{"role": "user", "content": "hello " * 10}, {"role": "assistant", "content": "x"}]
BIG = "{% set big = 'a' * 8000000 %}"
MANY = "{% set many = range(99999)|list %}"
GROW = "{% set ns = namespace(x=START) %}{% for i in range(200) %}{% set ns.x = STEP %}{% endfor %}"


def _grow(start: str, step: str, end: str = "") -> str:
    return GROW.replace("START", start).replace("STEP", step) + end


ESCAPES = [
    "{{ ''.__class__ }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''['__class__'] }}",
    "{{ ''|attr('__class__') }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__['datetime'] }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ joiner.__init__.__globals__ }}",
    "{% macro m() %}{% endmacro %}{{ m.__globals__ }}",
    "{% macro m() %}{% endmacro %}{{ m._func.__globals__ }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "{{ ('{0.__class__}'|string).format(1) }}",
    "{{ (['{0.__class__}'.format]|first)(1) }}",
    "{{ ['{0.__class__}']|map('format', 1)|list }}{{ ['x']|map(attribute='__class__')|list }}",
    "{{ messages|map('attr', '__class__')|list }}",
    "{{ messages|selectattr('__class__')|list }}",
    "{{ messages|groupby('__class__') }}",
    "{{ messages|sort(attribute='__class__') }}",
    "{{ dict.__class__ }}",
    "{{ {}.fromkeys([1]) }}",
    "{{ ''.encode() }}",
    "{{ 'ab'.translate({97: 'x'}) }}",
    "{{ ''.maketrans('a', 'b') }}",
    "{{ (1).to_bytes(1000000000, 'big') }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{% set messages[0].role = 'x' %}",
    "{% set _ = messages.clear() %}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{% set ns = namespace(__init__=1) %}",
    "{{ namespace({'_Namespace__attrs': {}}) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{% from 'os' import system %}",
    "{% extends 'x' %}",
    "{% debug %}",
    "{% do 1 %}",
    "{{ lipsum.__globals__.os }}",
    "{{ lipsum(n=100000) }}",
    "{{ loop }}{{ loop._iterable }}",
    "{% for m in messages %}{{ loop._iterator.gi_frame }}{% endfor %}",
    "{{ (messages|map('upper')).gi_frame }}",
    "{{ (messages|map('upper')).gi_code }}",
    "{{ config.items() }}",
    "{{ messages[0].items.__self__ }}",
    "{{ ''.join.__self__ }}",
    "{{ 1 | %weigh }}",
    "{{ caller.__call__ }}",
    "{% call messages() %}{% endcall %}",
    "{{ strftime_now('%999999999d') }}",
    "{{ strftime_now('%c' * 100000) }}",
    "{{ x.y.z }}",
    "{{ (",
    "{% if %}",
    "{{ 1 / 0 }}",
    "{{ 'a'|nosuchfilter }}",
    "{{ raise_exception() }}",
]
BOMBS = [
    "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "{% for i in range(100000) if false %}{% endfor %}" * 400,
    "{% for i in range(99999) %}{% for j in range(99999) if i == -1 %}x{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = a %}{% endfor %}{% endfor %}",
    "{% for i in range(10**9) %}{% endfor %}",
    "{% for i in range(99999) recursive %}{{ loop(range(99999)) }}{% endfor %}",
    "{% for i in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    "{{ 'a' * 10**9 }}",
    "{{ 10**9 * 'a' }}",
    "{{ [0] * 10**9 }}",
    "{{ (1, 2) * 10**8 }}",
    "{{ 10**(10**10) }}",
    "{{ 9**(9**9) }}",
    _grow("9", "ns.x * ns.x"),
    _grow("9", "ns.x ** ns.x"),
    _grow("'a'", "ns.x ~ ns.x"),
    _grow("'a'", "ns.x + ns.x"),
    _grow("['a']", "ns.x + ns.x"),
    _grow("'aa'", "ns.x.replace('a', ns.x)"),
    _grow("'aa'", "ns.x|replace('a', ns.x)"),
    _grow("'aa'", "ns.x.join([ns.x, ns.x, ns.x])"),
    _grow("'aa'", "[ns.x, ns.x, ns.x]|join(ns.x)"),
    _grow("'aa'", "'%s%s' % (ns.x, ns.x)"),
    _grow("'aa'", "'%s%s'|format(ns.x, ns.x)"),
    _grow("'aa'", "'{0}{0}'.format(ns.x)"),
    _grow("'aa'", "ns.x|tojson|tojson|tojson|tojson|tojson|tojson|tojson|tojson"),
    _grow("'<a>'", "ns.x|forceescape ~ ns.x|forceescape"),
    _grow("[1]", "[ns.x, ns.x]", "{{ ns.x }}"),
    _grow("[1]", "[ns.x, ns.x]", "{{ ns.x|tojson }}"),
    _grow("[1]", "[ns.x, ns.x]", "{{ ns.x|string }}"),
    _grow("[1]", "[ns.x, ns.x]", "{{ '%s' % (ns.x,) }}"),
    _grow("[1]", "[ns.x, ns.x]", "{{ '{}'.format(ns.x) }}"),
    _grow("[1]", "[ns.x, ns.x]", "{{ ns ~ '' }}"),
    _grow("[1]", "[ns.x, ns.x]", "{{ ns }}"),
    _grow("[1]", "[ns.x, ns.x]", "{{ ns.x == [ns.x] }}"),
    _grow("(1,)", "(ns.x, ns.x)", "{{ {}[ns.x] }}"),
    _grow("(1,)", "(ns.x, ns.x)", "{{ {ns.x: 1}|length }}"),
    _grow("(1,)", "(ns.x, ns.x)", "{{ dict([(ns.x, 1)])|length }}"),
    _grow("(1,)", "(ns.x, ns.x)", "{{ [ns.x]|unique|list|length }}"),
    _grow("(1,)", "(ns.x, ns.x)", "{{ {}.get(ns.x) }}"),
    _grow("(1,)", "(ns.x, ns.x)", "{{ {'a': 1} in [ns.x] }}{{ dict.fromkeys([ns.x])|length }}"),
    _grow("(1,)", "(ns.x, ns.x)", "{{ ns.x is in [ns.x] }}{{ ns.x is eq ns.x }}"),
    "{{ 'x'.ljust(10**9) }}",
    "{{ 'x'.rjust(10**9) }}",
    "{{ 'x'.center(10**9) }}",
    "{{ 'x'.zfill(10**9) }}",
    "{{ 'x'|center(10**9) }}",
    "{{ ('\t' * 1000).expandtabs(10**8) }}",
    "{{ ('\t' * 1000).expandtabs(tabsize=10**8) }}",
    "{{ ('\n' * 100000)|indent(9000, true, true) }}",
    "{{ 'a\nb'|indent(10**9) }}",
    "{{ 'a\nb'|indent('x' * 1000000) }}" * 100,
    "{{ [[1]]|tojson(indent=10**9) }}",
    "{{ [[1, 2]]|tojson(separators=('x' * 1000000, 'y')) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%.1000000000f' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '%(a(b)c)999999999d' % {'a(b)c': 1} }}",
    "{{ '%999999999s'|format('a') }}",
    "{{ '{:>1000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 1000000000) }}",
    "{{ '{:.{p}f}'.format(1.5, p=999999999) }}",
    "{{ '{a:999999999}'.format_map({'a': 1}) }}",
    "{{ 1.5|round(10**7, 'ceil') }}",
    "{{ [1]|batch(10**9, 'x')|list }}",
    "{{ [1]|slice(10**9)|list }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% block a %}{{ self.a() }}{% endblock %}",
    BIG + "{{ big }}" * 100,
    BIG + "{% set x %}" + "{{ big }}" * 1000 + "{% endset %}",
    BIG + "{% macro m() %}" + "{{ big }}" * 1000 + "{% endmacro %}{{ m()|length }}",
    BIG + "{{ [" + "big[1:], " * 1500 + "]|length }}",
    BIG + "{{ [" + "big ~ 'x', " * 1500 + "]|length }}",
    BIG + "{{ [" + "big|upper, " * 1500 + "]|length }}",
    BIG + "{{ [" + "big.upper(), " * 1500 + "]|length }}",
    BIG + "{{ big.split('a')|length }}" * 5,
    BIG + "{{ (big ~ ' ').rfind('b' ~ big[:4000000]) }}{{ big.rfind('a' ~ 'b' ~ big[:4000000]) }}",
    BIG + "{{ big.strip('b' * 4000000 ~ 'a') }}{{ big|trim('b' * 4000000 ~ 'a') }}",
    BIG + "{% set many = [big] * 99999 %}{{ (big ~ '') in many }}{{ (big[1:] ~ 'b') in many }}",
    BIG + "{% set many = [big] * 99999 %}{{ many.index(big[1:] ~ 'b') }}",
    BIG + "{% set many = [big] * 99999 %}{{ many.count(big[1:] ~ 'b') }}",
    BIG + "{% set many = [big, big[1:] ~ 'b'] * 50000 %}{{ many|sort|length }}",
    BIG + "{% set many = [big, big[1:] ~ 'b'] * 50000 %}{{ many|max|length }}",
    BIG + "{% for i in range(99999) %}{{ loop.changed(big ~ i) }}{% endfor %}",
    BIG + "{% for c in big %}{% for d in big %}{% endfor %}{% endfor %}",
    BIG + "{{ big|list|length }}{{ big|list|length }}",
    MANY + "{% for i in many %}{% for j in many %}{{ '' }}{% endfor %}{% endfor %}",
    MANY + "{{ many|map('string')|map('center', 9000)|join|length }}",
    MANY + "{% set l = many|batch(1)|list %}{{ l|sum(start=[])|length }}",
    "x" * 1000 + "{% for i in range(99999) %}" + "y" * 1000 + "{% endfor %}",
    "{% set s %}{% for i in range(99999) %}" + "y" * 1000 + "{% endfor %}{% endset %}",
    "{% macro m() %}{% for i in range(99999) %}"
    + "y" * 1000
    + "{% endfor %}{% endmacro %}{{ m() }}",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{{ " + "[" * 3000 + "]" * 3000 + " }}",
    "{{ " + "-" * 20000 + "1 }}",
    "{{ " + "not " * 20000 + "1 }}",
    "{% if 1 %}" * 2000 + "{% endif %}" * 2000,
    "{% for i in [1] %}" * 300 + "{% endfor %}" * 300,
    "{{ a.b.c }}" * 2000,
    "{#" * 60000,
    "{{ '" + "a" * 10**7 + "' }}",
    "{{ " + "9" * 5000 + " }}",
    "{{ ('9' * 5000)|int(base=10) + 'x' }}",
    "{{ 'a' * 9000000 }}{{ 'a' * 9000000 }}",
    "{% set x = cycler(*range(99999)) %}{% for i in range(99999) %}{{ x.next() }}{% for j in range(99) %}{% endfor %}{% endfor %}",
    "{% filter center(10**9) %}x{% endfilter %}",
    "{% for i in range(99999) %}{% filter upper %}" + "x" * 5000 + "{% endfilter %}{% endfor %}",
    "{% autoescape true %}" + _grow("'<<'", "ns.x ~ ns.x") + "{% endautoescape %}",
    "{{ ('a ' * 4000000)|wordcount }}{{ ('a ' * 4000000)|title|title|title|title|title|length }}"
    * 5,
]


# What a look at Python's internals, or at a file, would print.
LEAKS = ("<class", "<function", "<module", "<frame", "<code", "root:", "uid=", "__globals__")


@pytest.mark.parametrize("index", range(len(ESCAPES)))
def test_escape_reaches_nothing(index: int) -> None:
    """It is refused, or prints nothing that it was not given."""
    messages = [dict(message) for message in MESSAGES]
    try:
        text = ChatTemplate(ESCAPES[index]).render(messages, tools=[{"a": 1}])
    except ChatTemplateError as error:
        assert str(error).isprintable()
        assert len(str(error)) < 500
    else:
        assert not any(leak in text for leak in LEAKS)
    assert messages == MESSAGES


def _check_contained(source: str, *, cpu_seconds: float) -> None:
    """It is refused, or ends within its limits; it never takes 2 s of CPU time."""
    start = _cpu_seconds()
    try:
        template = ChatTemplate(source, limits=RenderLimits(cpu_seconds=cpu_seconds))
        text = template.render(MESSAGES, tools=[{"a": 1}])
    except ChatTemplateError as error:
        assert str(error).isprintable()
        assert len(str(error)) < 500
    else:
        assert len(text) <= RenderLimits().output_chars
    assert _cpu_seconds() - start < 2


def _cpu_seconds() -> float:
    """CPU time of this process and its children; one that lives has rendered others' templates."""
    children = psutil.Process().children()
    return sum(os.times()[:4]) + sum(sum(child.cpu_times()[:2]) for child in children)


@pytest.mark.parametrize("index", range(0, len(BOMBS), 4))
def test_bomb_is_contained(index: int) -> None:
    _check_contained(BOMBS[index], cpu_seconds=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(BOMBS)))
def test_every_bomb_is_contained_by_the_default_limits(index: int) -> None:
    _check_contained(BOMBS[index], cpu_seconds=RenderLimits().cpu_seconds)


def test_an_endless_loop_and_a_full_memory_are_refused() -> None:
    for source in (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ ('a' * 10**12)|length }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ):
        with pytest.raises(ChatTemplateError, match="exceeds its limit"):
            ChatTemplate(source).render(MESSAGES)
    assert ChatTemplate("{{ messages|length }}").render(MESSAGES) == "2"


def test_a_bomb_does_not_disturb_a_neighbour() -> None:
    good = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    bomb = ChatTemplate(BOMBS[3], limits=RenderLimits(cpu_seconds=0.3))
    done = threading.Event()
    results: list[str] = []

    def render() -> None:
        while not done.is_set():
            results.append(good.render(MESSAGES))

    thread = threading.Thread(target=render)
    thread.start()
    try:
        with pytest.raises(ChatTemplateError):
            bomb.render(MESSAGES)
    finally:
        done.set()
        thread.join()
    assert set(results) == {"hello " * 10 + "x"}
    assert good.render(MESSAGES) == results[0]


def test_output_is_capped() -> None:
    template = ChatTemplate("{{ messages[0].content }}", limits=RenderLimits(output_chars=50))
    with pytest.raises(ChatTemplateError):
        template.render(MESSAGES)
    assert template.render(MESSAGES[1:]) == "x"


def test_an_interrupted_rendering_does_not_answer_the_next_one() -> None:
    slow = "{% for i in range(99999) %}{% endfor %}SECRET" * 200  # half a second
    template = ChatTemplate("{{ messages[0].content }}")
    limits = RenderLimits()
    process = template_process(limits)

    def interrupt(*_: object) -> None:
        raise InterruptedError

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        with pytest.raises((InterruptedError, ChatTemplateError)):
            process.render(slow, {})
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert template.render(MESSAGES) == MESSAGES[0]["content"]
