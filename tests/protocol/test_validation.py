"""One option by itself: its words, its bounds in full, and values without content."""

from __future__ import annotations

import pytest

from penstock.protocol.config import fields
from penstock.protocol.errors import ConfigError
from penstock.protocol.option import number, words
from penstock.protocol.validation import check_content, read_template_kwargs


def test_bounds_are_written_in_full():
    assert number(2**63 - 1) == "9223372036854775807"
    assert number(0.05) == "0.05"
    assert number(10.0) == "10"


def test_the_values_of_an_option_that_takes_several():
    assert words(" a ,, b,") == ("a", "b")
    assert words("") == words(" , ") == ()


@pytest.mark.parametrize("field", fields(), ids=lambda field: field.name)
def test_an_empty_value_is_refused_where_its_absence_means_more(field):
    if field.name in ("api_key", "api_key_file"):
        with pytest.raises(ConfigError, match=f"^{field.flag}: "):
            check_content(field, "")
    else:
        check_content(field, "")
    check_content(field, "a")


def test_defaults_of_a_chat_templates_variables():
    assert read_template_kwargs("") == read_template_kwargs("{}") == {}
    assert read_template_kwargs('{"enable_thinking": false, "n": [1]}') == {"enable_thinking": False, "n": [1]}
    for text, why in (("{", "JSON object"), ("[1]", "JSON object"), ('{"tools": []}', "tools is a parameter")):
        with pytest.raises(ConfigError, match=f"--default-chat-template-kwargs: .*{why}"):
            read_template_kwargs(text)
