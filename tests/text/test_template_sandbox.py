# ruff: noqa: E501
"""No template gets out of the sandbox, and none takes more than 2 s (of CPU time) or 600 MiB."""

import resource
import threading
import time
from collections.abc import Iterator

import pytest

from ridgeline.core.errors import ChatTemplateError
from ridgeline.text import ChatTemplate, RenderLimits

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
    "{% for i in range(100000) if false %}{% endfor %}" * 1300,
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
    BIG + "{{ [" + "big[1:], " * 4000 + "]|length }}",
    BIG + "{{ [" + "big ~ 'x', " * 4000 + "]|length }}",
    BIG + "{{ [" + "big|upper, " * 4000 + "]|length }}",
    BIG + "{{ [" + "big.upper(), " * 4000 + "]|length }}",
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
    "{{ a.b.c }}" * 5900,
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


@pytest.fixture(scope="module", autouse=True)
def _memory_stays_small() -> Iterator[None]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 600 << 10


def _refused(source: str) -> float:
    start = time.thread_time()
    with pytest.raises(ChatTemplateError) as caught:
        ChatTemplate(source).render(MESSAGES, tools=[{"a": 1}])
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500
    return time.thread_time() - start


@pytest.mark.parametrize("index", range(len(ESCAPES)))
def test_escape_is_refused(index: int) -> None:
    assert _refused(ESCAPES[index]) < 2


@pytest.mark.parametrize("index", range(len(BOMBS)))
def test_bomb_is_refused_in_time(index: int) -> None:
    assert _refused(BOMBS[index]) < 2


def test_a_bomb_does_not_spend_a_neighbours_budget() -> None:
    """Budgets belong to threads, and the environment is shared."""
    good = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    bomb = ChatTemplate(BOMBS[3], limits=RenderLimits(seconds=0.3))
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
