"""Reading fields out of a sentence into the JSON that a schema in the prompt describes."""

import json
from collections.abc import Callable
from random import Random
from typing import Any

from benchmarks.demo_model.conversation import Exercise, exchange
from benchmarks.demo_model.lexicon import (
    ANIMALS,
    COLOURS,
    DAYS,
    FOODS,
    JOBS,
    MONTHS,
    OBJECTS,
    SURNAMES,
    TOPICS,
    code,
    given_name,
    place,
    plural,
    pseudo_word,
)

_Value = Callable[[Random], Any]
# A field: the names that a schema may give it, and its value. A record: its fields and the sentences that say it.
_Field = tuple[tuple[str, ...], _Value]
_Record = tuple[dict[str, _Field], tuple[str, ...]]


def _full_name(rng: Random) -> str:
    return f"{given_name(rng)} {rng.choice(SURNAMES)}" if rng.random() < 0.5 else given_name(rng)


def _one_of(*lists: tuple[str, ...]) -> _Value:
    pool = tuple(word for words in lists for word in words)
    return lambda rng: rng.choice(pool) if rng.random() < 0.85 else pseudo_word(rng)


def _between(low: int, high: int) -> _Value:
    return lambda rng: rng.randrange(low, high)


def _price(rng: Random) -> float:
    return round(rng.randrange(1, 500) + rng.randrange(1, 100) / 100, 2)


def _clock(rng: Random) -> str:
    return f"{rng.randrange(24):02d}:{rng.choice((0, 5, 10, 15, 20, 30, 40, 45, 50)):02d}"


def _date(rng: Random) -> str:
    return f"{rng.choice(MONTHS)} {rng.randrange(1, 29)}"


def _product(rng: Random) -> str:
    return f"{rng.choice(COLOURS)} {rng.choice(OBJECTS)}" if rng.random() < 0.4 else rng.choice(OBJECTS)


def _company(rng: Random) -> str:
    founder = rng.choice(SURNAMES) if rng.random() < 0.5 else pseudo_word(rng).capitalize()
    return f"{founder} {rng.choice(('Labs', 'Group', 'Works', 'Foods'))}"


def _email(rng: Random) -> str:
    return f"{given_name(rng).lower()}@{pseudo_word(rng)}.{rng.choice(('com', 'org', 'net'))}"


_PERSON = (("name", "person", "full_name"), _full_name)
_CITY = (("city", "town", "location", "place"), place)

RECORDS: tuple[_Record, ...] = (
    (
        {"name": _PERSON, "age": (("age", "years"), _between(1, 100)), "city": _CITY,
         "job": (("job", "profession", "occupation"), _one_of(JOBS))},
        ("{name} is {age} years old, lives in {city} and works as a {job}.",
         "My neighbour {name}, a {job} from {city}, turned {age} last week.",
         "{name} ({age}) moved to {city} to become a {job}.",
         "At {age}, {name} is the best {job} in {city}."),
    ),
    (
        {"product": (("product", "item", "article"), _product), "quantity": (("quantity", "amount", "count"),
        _between(1, 200)),
         "price": (("price", "unit_price", "cost"), _price), "customer": (("customer", "buyer", "client"), _full_name)},
        ("{customer} ordered {quantity} pieces of the {product} at {price} dollars each.",
         "Order: {quantity} x {product}, unit price {price}, for {customer}.",
         "Please send {quantity} of your {product} to {customer}; the price is {price} each.",
         "The {product} costs {price}. {customer} bought {quantity} of them."),
    ),
    (
        {"event": (("event", "title", "subject"),
        lambda rng: f"{rng.choice(TOPICS)} {rng.choice(('meeting', 'lecture', 'workshop', 'course'))}"),
         "day": (("day", "weekday"), _one_of(DAYS)), "time": (("time", "start", "start_time"), _clock),
         "room": (("room", "where"), code)},
        ("The {event} takes place on {day} at {time} in room {room}.",
         "Don't forget the {event}: {day}, {time}, room {room}.",
         "On {day} at {time} there is a {event} in room {room}.",
         "Room {room} is booked for the {event} on {day} from {time}."),
    ),
    (
        {"flight": (("flight", "flight_number"), code), "origin": (("origin", "from", "departure_city"), place),
         "destination": (("destination", "to", "arrival_city"), place), "gate": (("gate",), _between(1, 90)),
         "delayed": (("delayed",), lambda rng: rng.random() < 0.5)},
        ("Flight {flight} from {origin} to {destination} leaves from gate {gate} and is {delayed:delayed|on time}.",
         "{origin} to {destination}, flight {flight}, gate {gate}: {delayed:delayed|on time}.",
         "Passengers of flight {flight} to {destination} coming from {origin}: go to gate {gate}, "
         "the plane is {delayed:delayed|on time}."),
    ),
    (
        {"pet": (("pet", "pet_name", "name"), given_name), "animal": (("animal", "species", "kind"), _one_of(ANIMALS)),
         "owner": (("owner",), _full_name), "age": (("age",), _between(1, 20)), "weight": (("weight", "weight_kg"),
         _price)},
        ("{owner} has a {animal} called {pet}, {age} years old and {weight} kg in weight.",
         "{pet} is a {animal} of {age} years that weighs {weight} kg and belongs to {owner}.",
         "The {animal} {pet} ({age} years, {weight} kg) was brought in by {owner}."),
    ),
    (
        {"city": _CITY, "temperature": (("temperature", "degrees", "temp"), _between(-20, 45)),
         "sky": (("sky", "condition", "weather"),
         _one_of(("sunny", "cloudy", "rainy", "snowy", "windy", "foggy", "clear"))),
         "day": (("day",), _one_of(DAYS))},
        ("In {city} it will be {sky} on {day} with {temperature} degrees.",
         "{day} in {city}: {sky}, {temperature} degrees.",
         "Expect {temperature} degrees and {sky} skies in {city} on {day}."),
    ),
    (
        {"title": (("title", "book"),
        lambda rng: f"The {rng.choice(COLOURS).capitalize()} {rng.choice(OBJECTS).capitalize()}"),
         "author": (("author", "writer"), _full_name), "year": (("year", "published"), _between(1900, 2030)),
         "pages": (("pages", "page_count"), _between(50, 900))},
        ('"{title}" by {author} was published in {year} and has {pages} pages.',
         "{author} wrote {title} in {year}; it is {pages} pages long.",
         "The library bought {title} ({year}, {pages} pages) by {author}."),
    ),
    (
        {"name": _PERSON, "email": (("email", "mail", "address"), _email), "company": (("company", "employer", "firm"),
        _company),
         "phone": (("phone", "phone_number"), lambda rng: f"555-{rng.randrange(1000, 10000)}")},
        ("{name} from {company} can be reached at {email} or {phone}.",
         "Contact: {name}, {company}, phone {phone}, mail {email}.",
         "Write to {email} or call {phone} and ask for {name} of {company}."),
    ),
    (
        {"home": (("home", "home_team", "team_a"), place), "away": (("away", "away_team", "team_b"), place),
         "home_goals": (("home_goals", "score_a"), _between(0, 9)), "away_goals": (("away_goals", "score_b"),
         _between(0, 9)),
         "date": (("date",), _date)},
        ("On {date} {home} played against {away}; the score was {home_goals} to {away_goals}.",
         "{home} - {away} {home_goals}:{away_goals}, played on {date}.",
         "{home} scored {home_goals} and {away} scored {away_goals} on {date}."),
    ),
    (
        {"dish": (("dish", "recipe", "meal"),
        lambda rng: f"{rng.choice(FOODS)} {rng.choice(('soup', 'salad', 'pie', 'cake'))}"),
         "minutes": (("minutes", "time", "cooking_time"), _between(5, 180)), "servings": (("servings", "people"),
         _between(1, 13)),
         "vegetarian": (("vegetarian",), lambda rng: rng.random() < 0.5)},
        ("The {dish} is {vegetarian:vegetarian|not vegetarian}, takes {minutes} minutes and serves {servings}.",
         "{dish}: {minutes} minutes, for {servings} people, {vegetarian:vegetarian|not vegetarian}."),
    ),
    (
        {"parcel": (("parcel", "tracking_code", "id"), code), "city": _CITY, "date": (("date", "delivery_date"), _date),
         "recipient": (("recipient", "name"), _full_name), "paid": (("paid",), lambda rng: rng.random() < 0.5)},
        ("Parcel {parcel} for {recipient} arrives in {city} on {date} and is {paid:already paid|not yet paid}.",
         "{recipient} in {city} gets parcel {parcel} on {date}, {paid:already paid|not yet paid}.",
         "On {date} bring parcel {parcel} to {recipient}, {city}; it is {paid:already paid|not yet paid}."),
    ),
    (
        {"shopper": (("shopper", "name"), given_name), "fruit": (("fruit", "food", "product"), _one_of(FOODS)),
         "count": (("count", "quantity"), _between(2, 100)), "shop": (("shop", "store"), _company)},
        ("{shopper} went to {shop} and came back with {count} {fruit:plural}.",
         "At {shop} {shopper} bought {count} {fruit:plural}."),
    ),
)  # fmt: skip

_ABSTRACT = (
    "size", "weight", "height", "length", "colour", "status", "level", "score", "rank", "brand", "model", "country",
    "street",
    "language", "team", "total", "currency", "discount", "category", "priority", "version", "host", "port", "user",
    "role",
)  # fmt: skip
_FREE_VALUES: tuple[_Value, ...] = (
    _between(0, 10000), _between(0, 100), _price, _full_name, place, code, pseudo_word, _one_of(COLOURS),
        _one_of(OBJECTS, ANIMALS),
    lambda rng: rng.random() < 0.5,
)  # fmt: skip

_ORDERS = (
    "Extract the data from the text as JSON that matches this schema:\n{schema}\n\nText: {text}",
    "Schema: {schema}\nText: {text}\nAnswer with JSON only.",
    "Read this text and fill in the JSON schema.\n\n{text}\n\n{schema}",
    "Text: {text}\n\nReturn a JSON object for this schema: {schema}",
    "Turn the following into JSON according to the schema {schema}:\n{text}",
    "{text}\n\nExtract the fields as JSON. Schema:\n{schema}",
)
_SHORT_ORDERS = (
    "Extract {keys} as JSON from this text: {text}",
    "{text}\nGive me {keys} as a JSON object.",
    "Extract {keys} as JSON: {text}",
    "Give me {keys} as JSON. Text: {text}",
)
_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean"}


def sentence(template: str, values: dict[str, Any]) -> str:
    """The template with its fields filled; `{field:yes|no}` writes a boolean, `{field:plural}` a noun's plural."""
    pieces = template.split("{")
    text = pieces[0]
    for piece in pieces[1:]:
        slot, rest = piece.split("}", 1)
        field, _, form = slot.partition(":")
        value = values[field]
        if form == "plural":
            value = plural(value)
        elif form:
            value = form.split("|")[0 if value else 1]
        text += f"{value}{rest}"
    return text[0].upper() + text[1:] if text[0].islower() and not template.startswith("{") else text


def _free_record(rng: Random) -> tuple[dict[str, _Field], dict[str, Any], str]:
    """A record that no list holds: any nouns as keys, each said in a sentence or a line of its own."""
    nouns = rng.sample(OBJECTS + FOODS + JOBS + _ABSTRACT, rng.randrange(2, 6))
    fields = {noun: ((noun,), rng.choice(_FREE_VALUES)) for noun in nouns}
    values = {noun: draw(rng) for noun, (_, draw) in fields.items()}
    form, end = rng.choice(
        (("The {} is {}.", " "), ("The {} is {}.", " "), ("{}: {}", "\n"), ("{}: {}", "; "), ("{} = {}", ", "))
    )
    said = rng.sample(nouns, len(nouns))
    text = end.join(
        form.format(noun, str(values[noun]).lower() if isinstance(values[noun], bool) else values[noun])
        for noun in said
    )
    return fields, values, text


def extract(rng: Random) -> Exercise:
    """One sentence, one schema over some of its fields, one JSON object."""
    if rng.random() < 0.3:
        fields, values, text = _free_record(rng)
    else:
        fields, sentences = rng.choice(RECORDS)
        values = {field: draw(rng) for field, (_, draw) in fields.items()}
        text = sentence(rng.choice(sentences), values)
    wanted = rng.sample(list(fields), rng.randrange(1 if rng.random() < 0.2 else 2, len(fields) + 1))
    names: dict[str, str] = {}
    for field in wanted:
        free = [name for name in fields[field][0] if name not in names.values()]
        if free:
            names[field] = rng.choice(free)
    result = {name: values[field] for field, name in names.items()}
    if rng.random() < 0.15:
        order = rng.choice(_SHORT_ORDERS)
        question = order.format(keys=_joined(list(result)), text=text)
    else:
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {name: {"type": _TYPES[type(value)]} for name, value in result.items()},
        }
        if rng.random() < 0.7:
            schema["required"] = list(result)
        if rng.random() < 0.2:
            schema["additionalProperties"] = False
        question = rng.choice(_ORDERS).format(schema=_written(rng, schema), text=text)
    key = "|".join(str(value) for value in values.values())
    return exchange("extraction", key, question, json.dumps(result), f"The fields are {_joined(list(result))}.")


def _written(rng: Random, schema: dict[str, Any]) -> str:
    """The schema as people write JSON: spaced, dense or indented."""
    style = rng.random()
    if style < 0.7:
        return json.dumps(schema)
    return json.dumps(schema, separators=(",", ":")) if style < 0.85 else json.dumps(schema, indent=2)


def _joined(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
