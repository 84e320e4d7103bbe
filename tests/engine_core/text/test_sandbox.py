"""No template runs without end or fills the memory, whatever it is made of."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any

import jinja2
import pytest

from engine_core.text.sandbox import MAX_OUTPUT, MAX_TURNS, TemplateLimit, compile_template, make_sandbox, render

NOW = datetime(2026, 1, 1)


def run(source: str, **names: Any) -> str:
    return render(compile_template(make_sandbox(), source), names, NOW)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
        "{% for a in range(9999) %}{% for b in big %}{% set c = b %}{% endfor %}{% endfor %}",
        "{% macro m() %}{% for b in big %}{% endfor %}{% endmacro %}{% for a in big %}{{ m() }}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{{ 'a' * 99999999 }}",
        "{{ 99999999 * 'a' }}",
        "{{ [0] * 99999999 }}",
        "{{ 9 ** 9 ** 9 }}",
        "{% set ns = namespace(x=9) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
        "{{ '%99999999d' % 1 }}",
        "{{ '%*d' % (99999999, 1) }}",
        "{{ '%99999999d' | format(1) }}",
        "{{ '{:99999999d}'.format(1) }}",
        "{{ '{:{}}'.format(1, 99999999) }}",
        "{{ 'a'.ljust(99999999) }}",
        "{{ 'a' | center(99999999) }}",
        "{{ 'a\na' | indent(99999999) }}",
        "{{ ('a' * 99999).replace('a', 'b' * 99999) }}",
        "{{ ('a' * 99999) | replace('a', 'b' * 99999) }}",
        "{{ ('b' * 99999).join('a' * 99999) }}",
        "{{ (['b' * 99999] * 99999) | join }}",
        "{{ ('\t' * 99999).expandtabs(99999) }}",
        "{% set ns = namespace(x='') %}{% for a in big %}{% for b in big[:20] %}"
        "{% set ns.x = ns.x ~ text %}{% endfor %}{% endfor %}",
        "{% for a in big %}{% set c = big | selectattr('x', 'undefined') | list %}{% endfor %}",
        "{% for a in range(9999) %}{{ 'x' * 9999 }}{% endfor %}",
        "{{ range(999999999) | list }}",
    ],
)
def test_bombs_are_refused_soon(source: str) -> None:
    began = time.thread_time()
    with pytest.raises((TemplateLimit, OverflowError)):
        run(source, big=list(range(9999)), text="word " * 20)
    assert time.thread_time() - began < 5.0


def test_endless_recursion_is_an_error() -> None:
    with pytest.raises(RecursionError):
        run("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}")


def test_recursive_loops_are_refused_when_read() -> None:
    with pytest.raises(jinja2.TemplateSyntaxError, match="recursive"):
        run("{% for a in x recursive %}{{ loop(a) }}{% endfor %}")


def test_within_the_budget_everything_runs() -> None:
    assert len(run("{% for a in range(n) %}{{ 'x' * 8 }}{% endfor %}", n=50_000)) == 400_000
    assert MAX_TURNS > 50_000
    assert MAX_OUTPUT > 400_000


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 'since 2023: %s, %5d' % ('a', 7) }}", "since 2023: a,     7"),
        ("{{ 'since 2023: {} {:>4}'.format('a', 7) }}", "since 2023: a    7"),
        ("{{ 'a' | center(5) }}|{{ 'a\nb' | indent(2, true) }}", "  a  |  a\n  b"),
        ("{{ [1, 2] | join('-') }}{{ [{'a': 1}, {'a': 2}] | join('+', attribute='a') }}", "1-21+2"),
        ("{{ 'aaa' | replace('a', 'b', 2) }}{{ 'aaa'.replace('a', 'c') }}{{ '-'.join(['x', 'y']) }}", "bbacccx-y"),
        ("{{ {'b': 1, 'a': 2} | dictsort }}{{ [3, 1] | sort | list }}{{ 'abc' | list }}", None),
        ("{{ [1, 2, 3] | map('string') | join }}{{ [1, 2] | sum }}{{ nothing | join }}", "1233"),
    ],
)
def test_counted_filters_and_methods_are_jinjas(source: str, text: str | None) -> None:
    assert run(source) == (text if text is not None else jinja2.Template(source).render())


def test_concatenation_is_jinjas() -> None:
    source = "{{ 1 ~ 'a' ~ none ~ x ~ [2] }}|{{ ('a' ~ 'b') | upper }}{% set c = 'd' ~ 1 %}{{ c }}"
    assert run(source) == "1aNone[2]|ABd1"


def test_one_renderings_budget_is_not_anothers() -> None:
    template = compile_template(make_sandbox(), "{% for a in range(99999) %}{% endfor %}ok")
    assert [render(template, {}, NOW) for _ in range(4)] == ["ok"] * 4
