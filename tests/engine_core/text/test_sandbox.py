"""The operator's template does not grow beyond its conversation, and no template can name anything of ours."""

from __future__ import annotations

import inspect
from datetime import datetime
from typing import Any

import jinja2
import pytest

from penstock.engine_core.text import sandbox as module
from penstock.engine_core.text.sandbox import (
    NEEDLESS_FILTERS,
    NEEDLESS_GLOBALS,
    Sandbox,
    TemplateLimit,
    compile_template,
    make_sandbox,
    render,
)

NOW = datetime(2026, 1, 1)


def run(source: str, *, trusted: bool = True, **names: Any) -> str:
    return render(compile_template(make_sandbox(trusted=trusted), source), names, NOW)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in big %}{% for b in big %}{% set c = b %}{% endfor %}{% endfor %}",
        "{% macro m() %}{% for b in big %}{% endfor %}{% endmacro %}{% for a in big %}{{ m() }}{% endfor %}",
        "{% for a in big %}{% set c = big | selectattr('x', 'undefined') | list %}{% endfor %}",
    ],
)
def test_what_squares_the_conversation_has_an_end(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TURNS", 1000)
    assert run(source, big=list(range(9))) is not None
    with pytest.raises(TemplateLimit, match="more than 1000 loop turns"):
        run(source, big=list(range(40)))


def test_what_it_prints_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_OUTPUT", 1000)
    assert len(run("{% for a in range(100) %}{{ text }}{% endfor %}", text="x" * 10)) == 1000
    with pytest.raises(TemplateLimit, match="more than 1000 characters"):
        run("{% for a in range(101) %}{{ text }}{% endfor %}", text="x" * 10)


def test_one_renderings_budget_is_not_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TURNS", 600)
    template = compile_template(make_sandbox(), "{% for a in range(500) %}{% endfor %}ok")
    assert [render(template, {}, NOW) for _ in range(4)] == ["ok"] * 4


def test_endless_recursion_is_an_error() -> None:
    with pytest.raises(RecursionError):
        run("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}")


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in tree recursive %}{{ a.n }}{{ loop(a.c) }}{% endfor %}",
        "{% for a in [3, 1] | sort %}{{ loop.index }}/{{ loop.length }}{{ loop.previtem }}{{ a }}{% endfor %}",
        "{{ [1, 2] | join('-') }}{{ [{'a': 1}] | map(attribute='a') | list }}{{ {'b': 1, 'a': 2} | dictsort }}",
        "{% for a in {'x': 1} %}{{ a }}{% else %}none{% endfor %}{% for a in nothing %}{% else %}none{% endfor %}",
        "{{ 'a' | center(5) }}|{{ 'a\nb' | indent(2, true) }}{{ 1 ~ 'a' ~ none }}{{ '%5d' % 7 }}{{ 'x' * 3 }}",
    ],
)
def test_counting_changes_nothing(source: str) -> None:
    names = {"tree": [{"n": 1, "c": [{"n": 2, "c": []}]}]}
    assert run(source, **names) == jinja2.Template(source).render(**names)


def test_too_many_nested_loops_are_a_syntax_error() -> None:
    with pytest.raises(jinja2.TemplateSyntaxError, match="nested"):
        run("{% for a in [1] %}" * 25 + "{% endfor %}" * 25)


def test_a_requests_template_has_no_needless_names() -> None:
    for name in NEEDLESS_GLOBALS:
        assert run("{{ " + name + " is defined }}", trusted=False) == "False"
    for name in NEEDLESS_FILTERS:
        with pytest.raises(jinja2.TemplateAssertionError, match="No filter"):
            run("{{ 'a' | " + name + " }}", trusted=False)
    assert sorted(make_sandbox(trusted=False).globals) == ["dict", "namespace", "raise_exception", "range"]


@pytest.mark.parametrize("trusted", [True, False])
def test_nothing_of_ours_can_be_reached(trusted: bool) -> None:
    """All that a template can name is followed through every attribute that the sandbox lets it read."""
    sandbox = make_sandbox(trusted=trusted)
    found: list[Any] = []
    sandbox.globals["look"] = found.append
    source = (
        "{% macro m(x) %}{{ look(self) }}{{ look(m) }}{{ look(varargs) }}{{ look(kwargs) }}{{ look(caller) }}"
        "{% endmacro %}{% for a in messages %}{{ look(loop) }}{{ look(a) }}{% endfor %}"
        "{% call m(1) %}x{% endcall %}{% set ns = namespace(x=1) %}{{ look(ns) }}{{ look(strftime_now) }}"
        "{{ look(nothing) }}{{ look(messages | map('upper')) }}{{ look('x'.format) }}{{ look(raise_exception) }}"
        "{{ look(range(3)) }}{% block b %}{{ look(self.b) }}{% endblock %}"
    )
    render(compile_template(sandbox, source), {"messages": [{"role": "user", "content": "x"}]}, NOW)
    found += [value for name, value in sandbox.globals.items() if name != "look"]
    ours = [thing for thing in reachable(sandbox, found) if belongs_to_us(thing)]
    assert {getattr(thing, "__name__", type(thing).__name__) for thing in ours} == {"strftime_now", "raise_exception"}
    assert all(inspect.isfunction(thing) for thing in ours)


def reachable(sandbox: Sandbox, roots: list[Any]) -> list[Any]:
    seen: dict[int, Any] = {}
    todo = list(roots)
    while todo:
        thing = todo.pop()
        if id(thing) in seen:
            continue
        assert len(seen) < 20_000
        seen[id(thing)] = thing
        for name in dir(thing):
            if name == "__wrapped__":
                continue  # of jinja2's wrapper of str.format: a wrapper again, without end
            if isinstance(thing, str | int | float | bool | type(None)):
                break
            try:
                value = sandbox.getattr(thing, name)
            except Exception:  # an attribute that raises leads nowhere
                continue
            if not isinstance(value, jinja2.Undefined):
                todo.append(value)
        if isinstance(thing, dict):
            todo += [*thing.keys(), *thing.values()]
        elif isinstance(thing, list | tuple):
            todo += thing
    return list(seen.values())


def belongs_to_us(thing: Any) -> bool:
    places = (getattr(thing, "__module__", None), type(thing).__module__)
    return any(str(place).startswith("penstock") for place in places)
