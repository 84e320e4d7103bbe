"""Options of images: each form of a limit, and host names in every spelling."""

from __future__ import annotations

import pytest

from penstock.protocol.config import ApiConfig, Config
from penstock.protocol.engine_config import ModelConfig
from penstock.protocol.errors import ConfigError
from penstock.protocol.media import Domain, dns_name, image_limit, read_domains
from penstock.protocol.validation import check


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("16", 16), (" 3 ", 3), ("0", 0), ("image=4", 4), ("image = 4, video=0", 4), ("video=0", 16),
        ('{"image": 2}', 2), ('{"image": "2", "audio": 0}', 2), ('{"image": 0}', 0), ("{}", 16), ("65536", 65536),
    ],
)  # fmt: skip
def test_forms_of_the_limit(text: str, limit: int) -> None:
    assert image_limit(ModelConfig(limit_mm_per_prompt=text)) == limit


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("many", "image=N"), ("-1", "image=N"), ("1.5", "image=N"), ("image=", "image=N"), ("{", "image=N"),
        ("٣", "image=N"), ('{"image": true}', "image=N"), ('{"image": {"count": 3}}', "image=N"), ("[1]", "image=N"),
        ("", "image=N"),
        ("image=2,video=1", "video is not served"), ('{"audio": 1}', "audio is not served"),
        ("picture=1", "no modality 'picture'"), ("65537", "at most 65536"), ("9" * 5000, "image=N"),
    ],
)  # fmt: skip
def test_wrong_limits_are_refused_at_the_start(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        check(Config(model=ModelConfig(limit_mm_per_prompt=text)))
    assert caught.value.option == "--limit-mm-per-prompt"


def test_hosts_as_they_are_given() -> None:
    found = read_domains(ApiConfig(allowed_media_domains="Example.ORG, *.cdn.example.org,bücher.example:8443"))
    assert found == (
        Domain("example.org"), Domain("cdn.example.org", below=True), Domain("xn--bcher-kva.example", port=8443),
    )  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "*", "*.", "*.*.org", "a.*.org", "https://example.org", "example.org/", "example.org:0", "example.org:65536",
        "example.org:x", "u@example.org", "127.0.0.1", "127.1", "2130706433", "0x7f000001", "0x7f.1", "0177.0.0.1",
        "example.0x", "[::1]", "::1", "-a.org", "a..org", ".org", "a.org.", "１２７.0.0.1", "xn--a.example\n",
        "a b.org", "a" * 64 + "é.org",
    ],
)  # fmt: skip
def test_what_is_no_host_name_is_refused_at_the_start(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(Config(api=ApiConfig(allowed_media_domains=text.replace("\n", "\\"))))
    assert caught.value.option == "--allowed-media-domains"


def test_what_a_domain_holds() -> None:
    below, exact = Domain("example.org", below=True), Domain("example.org", port=8443)
    assert below.holds("a.example.org", 443)
    assert below.holds("a.b.example.org", 443)
    assert not below.holds("example.org", 443)
    assert not below.holds("badexample.org", 443)
    assert not below.holds("a.example.org", 8443)
    assert exact.holds("example.org", 8443)
    assert not exact.holds("example.org", 443)
    assert not exact.holds("a.example.org", 8443)


def test_names_that_look_alike_are_one_name() -> None:
    assert dns_name("ＥＸＡＭＰＬＥ。org") == dns_name("Example.org") == "example.org"
    assert dns_name("faß.de") == "xn--fa-hia.de"  # IDNA 2008 keeps apart what IDNA 2003 took for one
    assert dns_name("e" * 254) == ""
