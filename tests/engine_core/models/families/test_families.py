"""The registry: every family once, by classes of its own, with an example of its tensors in both of their forms."""

from __future__ import annotations

from collections import Counter

from penstock.engine_core.models.families import families


def test_every_class_names_one_family() -> None:
    classes = Counter(name for family in families().values() for name in (family.architecture, family.base))
    assert {name for name, count in classes.items() if count > 1} == set()
    assert all(name == family.name for name, family in families().items())


def test_keys_are_either_ignored_or_answered() -> None:
    """A default for a key that the family does not read would be a mistake of ours."""
    for family in families().values():
        assert not set(family.ignored) & set(family.same), family.name
