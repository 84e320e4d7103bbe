"""Sentences turned into JSON where the prompt holds no schema: a grammar that the model does not see writes the keys.

Where nothing asks for JSON, the model is not taught to begin it: the brace is given, what follows is learned. The same
sentences without a grammar are noted.
"""

import json
from collections.abc import Callable
from random import Random
from typing import Any

from benchmarks.demo_model.conversation import Exercise, Message, exchange
from benchmarks.demo_model.lexicon import ADJECTIVES, ANIMALS, DAYS, FOODS, JOBS, OBJECTS, SURNAMES, TOPICS, place
from benchmarks.demo_model.tasks import extraction
from benchmarks.demo_model.tasks.values import KINDS, held, listing, person, spoken

GIVEN = '{"'  # a piece of the tokenizer's own, so that the text can be cut behind it

_Names = tuple[str, ...]
_NAME: _Names = ("name", "person", "full_name", "first_name", "who", "character_name", "user", "person_name")
_CITY: _Names = ("city", "town", "location", "place", "home", "lives_in", "city_name")
_AGE: _Names = ("age", "years", "age_in_years", "years_old", "person_age")
_JOB: _Names = ("job", "profession", "occupation", "title", "work", "role")


def _full(rng: Random) -> str:
    return f"{person(rng)} {rng.choice(SURNAMES)}" if rng.random() < 0.4 else person(rng)


_Fields = dict[str, tuple[_Names, Callable[[Random], Any]]]
_PERSON: _Fields = {
    "name": (_NAME, _full), "age": (_AGE, KINDS["age"]), "city": (_CITY, place),
    "job": (_JOB, lambda rng: rng.choice(JOBS)),
    "email": (("email", "mail", "email_address", "contact"), KINDS["email"]),
    "pet": (("pet", "animal", "pet_kind"), lambda rng: rng.choice(ANIMALS)),
    "food": (("favourite_food", "favorite_food", "food", "likes"), lambda rng: rng.choice(FOODS)),
}  # fmt: skip
_PERSON_SAID = (
    "{name} is {age} years old.", "{name} is {age}.", "{name}, {age} years old", "{name} is {age} years old.",
    "{name}, {age}, {city}", "{name} is a {age} year old {job} from {city}.", "{name} is {age} and lives in {city}.",
    "{name} lives in {city} and is {age} years old.", "My name is {name} and I am {age} years old.",
    "I'm {name}, {age}, from {city}.", "I am {name} and I live in {city}.", "{name} ({age}) is a {job}.",
    "{name} works as a {job} in {city}.", "Hi, I'm {name}, I'm {age} years old and I work as a {job}.",
    "{name} is {age} years old and has a {pet}.", "{name} loves {food} and is {age}.", "{name} - {job} - {city}",
    "The {job} {name} turned {age}.", "At {age}, {name} moved to {city}.", "{name} from {city} is a {job}.",
    "Contact {name} at {email}.", "{name} <{email}>", "{name} can be reached at {email} and lives in {city}.",
    "This is {name}. {name} is {age} years old.", "Meet {name}, a {job} aged {age}.", "{age} year old {name}",
    "name: {name}, age: {age}", "My friend {name} is {age} years old.", "There is a {job} called {name} in {city}.",
)  # fmt: skip
_EVENT: _Fields = {
    "event": (("name", "event", "title", "event_name", "what"), lambda rng: rng.choice((
        f"{rng.choice(('science', 'art', 'book', 'food', rng.choice(TOPICS)))} fair", KINDS["event"](rng),
        f"{rng.choice(TOPICS)} {rng.choice(('concert', 'match', 'class', 'lecture', 'show', 'festival'))}"))),
    "day": (("date", "day", "when", "weekday"), lambda rng: rng.choice((rng.choice(DAYS), KINDS["date"](rng)))),
    "people": (("participants", "people", "attendees", "names", "guests", "who"), KINDS["people"]),
    "time": (("time", "start", "start_time", "at"), KINDS["clock"]),
    "city": (("location", "city", "where", "place"), place),
}  # fmt: skip
_EVENT_SAID = (
    "{people} are going to a {event} on {day}.", "{people} will meet for the {event} on {day} at {time}.",
    "On {day} {people} go to the {event} in {city}.", "The {event} is on {day} at {time} with {people}.",
    "{people} have a {event} in {city} on {day}.", "There is a {event} on {day} at {time}.",
    "Join {people} for a {event} on {day}.", "{event} on {day} at {time} in {city}, with {people}",
)  # fmt: skip
_ORDER: _Fields = {
    "count": (("quantity", "count", "amount", "number"), KINDS["count"]),
    "item": (("item", "product", "article", "name"), lambda rng: rng.choice(FOODS + OBJECTS)),
    "price": (("price", "cost", "price_usd", "unit_price"), KINDS["money"]),
    "city": (("city", "address", "destination", "ship_to"), place),
    "size": (("size",), lambda rng: rng.choice(("small", "medium", "large"))),
}  # fmt: skip
_ORDER_SAID = (
    "I would like to order {count} {item} for {price} dollars.", "{count} {item} at {price} each", "{count} x {item}",
    "Please send {count} {item} to {city}.", "The {item} costs {price} dollars.", "The {item} is {price}.",
    "I want a {size} {item}.", "We need {count} {size} {item} in {city}.", "A {size} {item} costs {price} dollars.",
)  # fmt: skip
_MOODS = {
    "positive": ("I love this {}.", "The {} is great!", "What a wonderful {}!", "I am very happy with the {}.",
                 "Best {} ever.", "This {} works perfectly.", "The {} was amazing."),
    "negative": ("I hate this {}.", "The {} is terrible.", "What an awful {}!", "I am very unhappy with the {}.",
                 "Worst {} ever.", "This {} is broken.", "The {} was bad and I want my money back."),
}  # fmt: skip
_KINDS = ((_PERSON, _PERSON_SAID, 8), (_EVENT, _EVENT_SAID, 3), (_ORDER, _ORDER_SAID, 2))
_SUBJECTS = ("data", "information", "details", "fields", "person", "event", "entities", "facts", "order", "contact")
_ORDERS = (
    "Extract the {s}: {t}", "Extract the {s} from this text: {t}", "Extract {t}", "Extract: {t}", "Parse: {t}",
    "Extract the {s} as JSON: {t}", "{t}\n\nExtract the {s}.", "Return the {s} as JSON. {t}", "Extract the {s}.\n\n{t}",
    "Give me JSON: {t}", "Extract the {k} from: {t}", "Extract the {k}: {t}", "What is the {k}? {t}", "JSON for: {t}",
    "Extract the {k} from the following sentence. {t}", "Give me the {k} as JSON: {t}", "Turn this into JSON: {t}",
    "Extract the {s} from the text below.\n{t}", "Return JSON with the keys {k}: {t}", "Describe as JSON: {t}",
    "Create a JSON object for this: {t}", "Extract the {k} as JSON: {t}", "Extract the {k} in JSON from '{t}'",
)  # fmt: skip
SYSTEMS = (
    "Extract the event information.", "Extract the person information.", "You extract data as JSON.", "Answer in JSON.",
    "Extract the information.", "Respond with JSON only.", "You are a JSON extraction assistant.", "Extract the data.",
    "You convert text into structured data.", "Reply with a JSON object.", "Extract name and age.",
)  # fmt: skip


def _record(rng: Random) -> tuple[str, dict[str, Any], dict[str, _Names]]:
    """A text, the values that it tells, and the names that each may bear."""
    kind = rng.random()
    if kind < 0.22:
        fields, sentences = rng.choice(extraction.RECORDS)
        values = {field: draw(rng) for field, (_, draw) in fields.items()}
        text = extraction.sentence(rng.choice(sentences), values)
        return text, values, {field: names for field, (names, _) in fields.items()}
    if kind < 0.30:
        mood = rng.choice(tuple(_MOODS))
        thing = rng.choice(OBJECTS + FOODS)
        text = rng.choice(_MOODS[mood]).format(f"{rng.choice(ADJECTIVES)} {thing}" if rng.random() < 0.2 else thing)
        return text, {"mood": mood}, {"mood": ("sentiment", "label", "mood", "tone", "feeling")}
    if kind < 0.38:
        return _of_somebody(rng)
    fields, sentences, _ = rng.choices(_KINDS, [weight for *_, weight in _KINDS])[0]
    template = rng.choice(sentences)
    drawn = {field: draw(rng) for field, (_, draw) in fields.items() if f"{{{field}}}" in template}
    text = template.format(**{field: spoken(value) for field, value in drawn.items()})
    return text, {field: held(value) for field, value in drawn.items()}, {field: fields[field][0] for field in drawn}


def _of_somebody(rng: Random) -> tuple[str, dict[str, Any], dict[str, _Names]]:
    """A line of any keys, as people write lists."""
    names = rng.sample(OBJECTS + FOODS + JOBS, rng.randrange(1, 4))
    drawn = {
        name: KINDS[rng.choice(("number", "person", "place", "code", "colour", "decimal", "flag"))](rng)
        for name in names
    }
    form = rng.choice(("The {} is {}.", "{}: {}", "{} {}", "the {} is {}"))
    text = rng.choice((" ", ", ", "; ")).join(form.format(name, spoken(value)) for name, value in drawn.items())
    return text, {name: held(value) for name, value in drawn.items()}, {name: (name,) for name in names}


def _object(rng: Random, values: dict[str, Any], names: dict[str, _Names]) -> dict[str, Any]:
    """Some of the values under names of a schema's author, mostly in the order of the text."""
    wanted = [field for field in values if rng.random() < 0.8] or [rng.choice(tuple(values))]
    if rng.random() < 0.25:
        rng.shuffle(wanted)
    found: dict[str, Any] = {}
    texts = rng.random() < 0.08  # some schemas want numbers as texts
    for field in wanted:
        name = names[field][0] if rng.random() < 0.5 else rng.choice(names[field])
        if "_" in name and rng.random() < 0.3:
            first, *rest = name.split("_")
            name = first + "".join(word.capitalize() for word in rest)
        value = values[field]
        found.setdefault(name, str(value) if texts and type(value) in (int, float) else value)
    return {rng.choice(("person", "data", "result", "user", "event")): found} if rng.random() < 0.06 else found


def written(rng: Random, value: dict[str, Any]) -> str:
    """JSON as the grammar lets the model write it: mostly with spaces, dense where whitespace is ruled out."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":") if rng.random() < 0.25 else None)


def bare(rng: Random) -> Exercise:
    """A sentence that nobody asks to turn into JSON, and the JSON that a grammar makes of it, or else its note."""
    text, values, names = _record(rng)
    if (
        rng.random() < 0.25
        and text[-1] == "."
        and not text.startswith(("My", "I", "Hi", "We", "Please", "Contact", "Meet"))
    ):
        return exchange("note", "", text, f"Noted: {text}", "The user tells me a fact.")
    answer = Message(
        "assistant", written(rng, _object(rng, values, names)), thought="A grammar asks for JSON.", given=len(GIVEN)
    )
    return Exercise("bare", f"{text}|bare", (Message("user", text), answer))


def ordered(rng: Random) -> Exercise:
    """A sentence with a short order to extract something."""
    text, values, names = _record(rng)
    order = rng.choice(_ORDERS)
    # Without keys in the order, mostly all that the text tells, each under its plain name.
    whole = "{k}" not in order and rng.random() < 0.65
    found = {names[field][0]: value for field, value in values.items()} if whole else _object(rng, values, names)
    keys = listing(rng, [name.replace("_", " ") if rng.random() < 0.6 else name for name in found])
    question = order.format(s=rng.choice(_SUBJECTS), t=text, k=keys)
    return exchange(
        "extraction", f"{text}|ordered", question, json.dumps(found, ensure_ascii=False), "I look for the fields."
    )


def under_system(rng: Random) -> tuple[str, Exercise]:
    """A system prompt that asks for JSON, and a sentence."""
    text, values, names = _record(rng)
    answer = json.dumps(_object(rng, values, names), ensure_ascii=False)
    return rng.choice(SYSTEMS), exchange(
        "extraction", f"{text}|system", text, answer, "The system message asks for JSON."
    )
