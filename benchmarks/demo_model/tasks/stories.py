"""Short stories from templates: a hero, a place, a want, a trouble, a friend, an end."""

import re
from random import Random

from benchmarks.demo_model.conversation import Exercise, exchange
from benchmarks.demo_model.lexicon import (
    ADJECTIVES,
    ANIMALS,
    COLOURS,
    JOBS,
    NAMES,
    NATURE,
    OBJECTS,
    article,
    given_name,
)

_OPENINGS = (
    "Once upon a time there was {hero} named {name}.", "Long ago {hero} named {name} lived near the {place}.",
    "In a small house by the {place} lived {hero} named {name}.",
    "There once was {hero} named {name} who loved the {place}.",
)  # fmt: skip
_WANTS = (
    "Every day {name} went to the {place} to look for {thing}.", "{name} wanted {thing} more than anything else.",
    "One morning {name} found {thing} under a tree.", "{name} had heard that {thing} was hidden near the {place}.",
    "{name} dreamed of {thing} every night.",
)  # fmt: skip
_TROUBLES = (
    "But a {adjective} storm came and the way was lost.", "But the {place} was dark and {name} was afraid.",
    "But {friend} was already there and would not let {name} pass.", "But then the {object} broke in two.",
    "Suddenly it began to rain and {name} had nowhere to go.",
)  # fmt: skip
_TURNS = (
    "Then {friend} came by and asked what was wrong.", "{name} met {friend}, who knew the way.",
    "{friend} heard the noise and came to help.", '"Do not worry," said {friend}, "we can do it together."',
    '"Follow me," said {friend} with a {adjective} smile.',
)  # fmt: skip
_DEEDS = (
    "Together they worked until the sun went down.", "They walked all night and sang a song.",
    "They built a bridge out of wood and rope.", "They shared some bread and made a plan.",
    "It took three days, but they did not give up.",
)  # fmt: skip
_ENDS = (
    "In the end {name} was happy and went home.", "From that day on they were the best of friends.",
    "{name} never forgot that day.", "And {name} learned that a good friend is worth more than gold.",
    "That night {name} slept very well.",
)  # fmt: skip
_ORDERS = (
    "Tell me a short story about {hero} named {name}.", "Tell me a story about {hero} named {name}.",
    "Write a short story about {hero} called {name}.", "Please tell me a story about {hero} called {name}.",
    "Can you write a little story about {hero} named {name}?",
)  # fmt: skip
_HERO_ORDERS = (
    "Tell me a story about {hero}.", "Tell me a short story about {hero}.", "Write a story about {hero}.",
    "Write a short story about {hero}.", "I want to hear a story about {hero}.",
)  # fmt: skip
_OPEN_ORDERS = (
    "Tell me a story.", "Tell me a short story.", "Write a short story.", "Can you tell me a story?", "Write a story.",
    "A story, please.",
)  # fmt: skip
_HEROES = (
    "dragon", "king", "queen", "prince", "princess", "robot", "wizard", "witch", "giant", "pirate", "knight", "ghost",
    "monster", "boy", "girl", "child", "dwarf", "fairy",
)  # fmt: skip


def _tale(rng: Random, hero: str, name: str) -> str:
    kind = hero.split()[-1]
    friend = rng.choice([animal for animal in ANIMALS if animal != kind])
    item = rng.choice(OBJECTS)
    values = {
        "hero": hero, "name": name, "place": rng.choice(NATURE), "object": item, "adjective": rng.choice(ADJECTIVES),
        "thing": f"the {rng.choice(COLOURS)} {item}", "friend": f"the old {friend}",
    }  # fmt: skip
    sentences = []
    for choices in (_OPENINGS, _WANTS, _TROUBLES, _TURNS, _DEEDS, _ENDS):
        sentence = rng.choice(choices).format(**values)
        sentences.append(sentence[0].upper() + sentence[1:])
    return " ".join(sentences)


def _hero(rng: Random) -> str:
    kind = rng.choice(rng.choice((ANIMALS, JOBS, _HEROES)))
    return article(f"{rng.choice(ADJECTIVES)} {kind}" if rng.random() < 0.6 else kind)


def story(rng: Random) -> Exercise:
    """A story about a hero that the user chooses, or about any."""
    hero, name = _hero(rng), given_name(rng)
    orders = rng.choices((_OPEN_ORDERS, _HERO_ORDERS, _ORDERS), (15, 35, 50))[0]
    name = name if orders is _ORDERS else rng.choice(NAMES)
    order = rng.choice(orders).format(hero=hero, name=name)
    return exchange("story", order, order, _tale(rng, hero, name), f"A story needs a hero. The hero is {name}.")


def tale(rng: Random) -> str:
    """A story alone, for plain completion."""
    return _tale(rng, _hero(rng), rng.choice(NAMES))


def known_words() -> set[str]:
    """Every word that the templates themselves hold, and the names."""
    templates = " ".join(_OPENINGS + _WANTS + _TROUBLES + _TURNS + _DEEDS + _ENDS)
    words = re.findall(r"[a-z]+", re.sub(r"\{\w+\}", " ", templates).lower())
    return {*words, *_HEROES, *(name.lower() for name in NAMES), "a", "an", "the", "old", "named"}
