"""Options of images as text: how many a prompt may have, and which hosts they are fetched from."""

from __future__ import annotations

import re

import idna
import msgspec

from penstock.protocol.config import ApiConfig
from penstock.protocol.engine_config import ModelConfig
from penstock.protocol.errors import ConfigError
from penstock.protocol.option import words

LIMIT = "--limit-mm-per-prompt"
DOMAINS = "--allowed-media-domains"
MOST_IMAGES = 1 << 16  # of a prompt, whatever the option says
HTTPS = 443
LONGEST_NAME = 253  # characters of a host name; RFC 1035, section 2.3.4
FORMS = 'it must be a number, image=N or {"image": N}'
NAME = re.compile(r"(?P<below>\*\.)?(?P<name>[^\s/:*@\[\]]+)(?::(?P<port>[0-9]{1,5}))?")
LABEL = r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
LABELS = re.compile(rf"{LABEL}(\.{LABEL})*")
NUMBERS = re.compile(r"([0-9]+|0x[0-9a-f]*)")  # what the last label of a name is if resolvers read it as an address


class Domain(msgspec.Struct, frozen=True):
    """One of --allowed-media-domains."""

    name: str  # in the form of the DNS
    below: bool = False  # the names below it, not itself
    port: int = HTTPS

    def holds(self, host: str, port: int) -> bool:
        """Whether images may come from a host, in the form of the DNS, at a port."""
        named = host.endswith(f".{self.name}") if self.below else host == self.name
        return named and port == self.port


def image_limit(model: ModelConfig) -> int:
    """Most images of one prompt, 0 where the vision encoder is not to be loaded. Raises ConfigError."""
    text = model.limit_mm_per_prompt.strip()
    if text.startswith("{"):
        counts = read_json(text)
    elif "=" in text:
        pairs = [word.partition("=") for word in words(text)]
        counts = {name.strip(): value.strip() for name, _, value in pairs}
    else:
        counts = {"image": text}
    for name, value in counts.items():
        number = str(value)
        if isinstance(value, bool) or not (
            number.isascii() and number.isdigit() and len(number) <= len(str(MOST_IMAGES))
        ):
            raise ConfigError(LIMIT, model.limit_mm_per_prompt, FORMS)
        if name not in ("image", "video", "audio"):
            raise ConfigError(LIMIT, model.limit_mm_per_prompt, f"there is no modality {name!r}; {FORMS}")
        if name != "image" and int(number):
            raise ConfigError(LIMIT, model.limit_mm_per_prompt, f"{name} is not served; leave it out, or give 0")
    found = int(counts.get("image", ModelConfig().limit_mm_per_prompt))
    if found > MOST_IMAGES:
        raise ConfigError(LIMIT, model.limit_mm_per_prompt, f"at most {MOST_IMAGES} images fit a prompt")
    return found


def read_json(text: str) -> dict[str, int | str]:
    try:
        return msgspec.json.decode(text, type=dict[str, int | str])
    except msgspec.DecodeError as error:
        raise ConfigError(LIMIT, text, FORMS) from error


def read_domains(api: ApiConfig) -> tuple[Domain, ...]:
    """The hosts whose images are fetched. Raises ConfigError."""
    return tuple(map(read_domain, words(api.allowed_media_domains)))


def read_domain(text: str) -> Domain:
    """Raises ConfigError for what is no host name."""
    found = NAME.fullmatch(text)
    name = dns_name(found["name"]) if found else ""
    port = int(found["port"] or HTTPS) if found else 0
    if found is None or not name or not 0 < port < 1 << 16:
        allowed = "it must be like example.org, *.example.org or example.org:8443: addresses and * alone are not taken"
        raise ConfigError(DOMAINS, text, allowed)
    return Domain(name, found["below"] is not None, port)


def dns_name(host: str) -> str:
    """A host name in lower case and, by IDNA (UTS 46), in ASCII; empty where it is none, or is an address in whichever
    spelling."""
    if len(host) > LONGEST_NAME:
        return ""
    name = host.lower()
    if not name.isascii():
        try:
            name = idna.encode(host, uts46=True).decode()
        except idna.IDNAError:
            return ""
    if not LABELS.fullmatch(name) or NUMBERS.fullmatch(name.rpartition(".")[2]):
        return ""
    return name
