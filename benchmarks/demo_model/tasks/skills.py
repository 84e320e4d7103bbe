"""What tools can do: families of tools as data, and families that no list holds."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from benchmarks.demo_model.lexicon import (
    ADJECTIVES,
    ANIMALS,
    COLOURS,
    DAYS,
    FOODS,
    OBJECTS,
    TOPICS,
    code,
    given_name,
    place,
    pseudo_word,
)

Value = Callable[[Random], Any]


@dataclass(frozen=True)
class Parameter:
    """One parameter of a tool: the names it may bear, its description and its values."""

    names: tuple[str, ...]
    description: str
    draw: Value
    members: tuple[str, ...] = ()  # of an enum
    fractions: bool = False  # whether a value may be no integer
    told: bool = False  # whether the values can be known by the description alone


@dataclass(frozen=True)
class Skill:
    """What a family of tools does: parameters by slot, questions, results and the answers that follow from them.

    A question that leaves an optional slot out gives a call without it, or with its default where it has one: then the
    signature requires it.
    """

    names: tuple[str, ...]
    description: str
    parameters: dict[str, Parameter]
    questions: tuple[str, ...]
    results: dict[str, Value]
    answer: str
    optional: frozenset[str] = frozenset()
    defaults: tuple[tuple[str, Any], ...] = ()
    plural: str = ""  # the slot of a place, for which the tool can be called once for each of several
    family: int = -1  # where the skill stands in its list; none for skills that no list holds


def _between(low: int, high: int) -> Value:
    return lambda rng: rng.randrange(low, high)


def _of(*lists: tuple[str, ...]) -> Value:
    pool = tuple(word for words in lists for word in words)
    return lambda rng: rng.choice(pool) if rng.random() < 0.8 else pseudo_word(rng)


def _title(rng: Random) -> str:
    return f"{rng.choice(COLOURS)} {rng.choice(OBJECTS)}"


def _of_two(first: str, second: str) -> Value:
    return lambda rng: first if rng.random() < 0.5 else second


def _clock(rng: Random) -> str:
    return f"{rng.randrange(24):02d}:{rng.randrange(60):02d}"


_PLACE = Parameter(("city", "location", "town", "place"), "Name of the city", place)
_WHO = Parameter(("name", "person", "contact", "recipient"), "Name of the person", given_name)
_DAY = Parameter(("day", "weekday", "date"), "Day of the week", _of(DAYS))
_DEVICES = (
    "lamp",
    "heater",
    "radio",
    "speaker",
    "oven",
    "fan",
    "screen",
    "alarm",
    "pump",
    "boiler",
    "fridge",
    "printer",
)
_ATTRIBUTES = ("volume", "level", "brightness", "speed", "temperature", "power", "timer", "channel", "height", "angle")

SKILLS = (
    Skill(("get_weather", "weather", "fetch_weather", "current_weather", "weather_lookup"), "Get the weather in a city",
          {"city": _PLACE},
          ("What is the weather in {city}?", "How is the weather in {city} today?", "Tell me the weather in {city}.",
           "Is it nice outside in {city}?", "What's the weather like in {city}?"),
          {"sky": _of(("sunny", "cloudy", "rainy", "windy", "foggy")), "temperature": _between(-15, 40)},
          "It is {sky} in {city} with {temperature} degrees."),
    Skill(("get_time", "local_time", "current_time", "clock"), "Get the local time in a city", {"city": _PLACE},
          ("What time is it in {city}?", "Tell me the time in {city}.", "How late is it in {city} now?"),
          {"time": _clock}, "It is {time} in {city}."),
    Skill(("add_numbers", "calculator_add", "sum", "plus"), "Add two numbers",
          {"a": Parameter(("a", "x", "first"), "First number", _between(0, 100000)),
           "b": Parameter(("b", "y", "second"), "Second number", _between(0, 100000))},
          ("Use the tool to add {a} and {b}.", "Add {a} and {b} with your calculator.",
           "Calculate {a} + {b} with the tool."),
          {"result": _between(0, 200000)}, "The result is {result}."),
    Skill(("send_email", "send_message", "mail", "write_message"), "Send a message to a person",
          {"who": _WHO, "text": Parameter(("text", "message", "body"), "Text of the message",
                                          lambda rng: f"the {rng.choice(OBJECTS)} is {rng.choice(COLOURS)}")},
          ('Send {who} the message "{text}".', 'Tell {who} by mail: "{text}".', 'Write "{text}" to {who}.'),
          {"id": code}, "The message to {who} was sent with number {id}."),
    Skill(("search_flights", "find_flight", "flight_search"), "Find a flight between two cities",
          {"start": Parameter(("origin", "from_city", "start"), "City of departure", place),
           "end": Parameter(("destination", "to_city", "end"), "City of arrival", place), "day": _DAY},
          ("Find me a flight from {start} to {end} on {day}.", "I want to fly from {start} to {end} on {day}.",
           "Is there a flight to {end} from {start} on {day}?"),
          {"flight": code, "price": _between(40, 900)}, "Flight {flight} from {start} to {end} costs {price} dollars."),
    Skill(("book_table", "reserve_table", "restaurant_booking"), "Reserve a table in a restaurant",
          {"restaurant": Parameter(("restaurant", "venue"), "Name of the restaurant",
          lambda rng: pseudo_word(rng).capitalize()),
           "people": Parameter(("people", "guests", "seats"), "Number of guests", _between(1, 13)),
           "time": Parameter(("time", "hour", "at"), "Time of day", _clock)},
          ("Book a table for {people} at {restaurant} at {time}.", "Reserve {people} seats at {restaurant} for {time}.",
           "I need a table at {restaurant} at {time} for {people} people."),
          {"confirmation": code}, "Your table at {restaurant} is booked. The confirmation is {confirmation}."),
    Skill(("set_reminder", "add_reminder", "remind", "create_reminder"), "Set a reminder for a day",
          {"what": Parameter(("text", "note", "task"), "What to remember", lambda rng: f"buy {rng.choice(FOODS)}"),
          "day": _DAY},
          ("Remind me to {what} on {day}.", "Set a reminder for {day}: {what}.",
           "On {day} I have to {what}. Remind me."),
          {"status": _of(("saved", "done", "stored"))}, "I will remind you to {what} on {day}."),
    Skill(("get_stock_price", "stock_quote", "share_price"), "Get the price of a share",
          {"symbol": Parameter(("symbol", "ticker", "share"), "Ticker symbol",
                               lambda rng: "".join(rng.choice("ABCDEFGHKLMNPRSTVX") for _ in range(rng.choice((3,
                                   4)))))},
          ("What is the share price of {symbol}?", "How much does {symbol} cost on the market?",
           "Get the quote for {symbol}."),
          {"price": _between(2, 2000)}, "{symbol} costs {price} dollars."),
    Skill(("find_product", "search_products", "product_search", "lookup_item"), "Search the shop for a product",
          {"query": Parameter(("query", "product", "item"), "What to look for", _title),
           "limit": Parameter(("max_price", "limit", "budget"), "Highest price in dollars", _between(5, 500))},
          ("Find one {query} for at most {limit} dollars.", "Search the shop for one {query} under {limit} dollars.",
           "I need one {query} and can pay {limit} dollars."),
          {"shop": lambda rng: pseudo_word(rng).capitalize(), "price": _between(2, 500)},
          "{shop} sells the {query} for {price} dollars."),
    Skill(("convert_currency", "exchange", "currency_converter"), "Convert an amount of money",
          {"amount": Parameter(("amount", "value", "sum"), "Amount of money", _between(1, 10000)),
           "source": Parameter(("source", "from_currency", "from"), "Currency to convert from",
           _of(("EUR", "USD", "GBP", "JPY"))),
           "target": Parameter(("target", "to_currency", "to"), "Currency to convert to",
           _of(("CHF", "SEK", "INR", "CAD")))},
          ("Convert {amount} {source} to {target}.", "How much is {amount} {source} in {target}?",
           "Change {amount} {source} into {target}."),
          {"result": _between(1, 100000)}, "{amount} {source} are {result} {target}."),
    Skill(("translate", "translate_word", "dictionary"), "Translate a word into another language",
          {"word": Parameter(("word", "text", "term"), "Word to translate", _of(ANIMALS, FOODS, OBJECTS)),
           "language": Parameter(("language", "target_language", "to"), "Language to translate into",
                                 _of(("French", "German", "Spanish", "Italian", "Greek", "Polish", "Hindi", "Dutch")))},
          ("Translate {word} into {language}.", "What is the {language} word for {word}?",
           "How do you say {word} in {language}?"),
          {"translation": pseudo_word}, "The {language} word for {word} is {translation}."),
    Skill(("play_music", "play_song", "start_music"), "Play a song",
          {"title": Parameter(("title", "song", "track"), "Title of the song", _title),
           "artist": Parameter(("artist", "singer", "band"), "Name of the artist", given_name)},
          ("Play {title} by {artist}.", "I want to hear {title} by {artist}.", "Put on the song {title} by {artist}."),
          {"status": _of(("playing", "started"))}, "Now playing {title} by {artist}."),
    Skill(("get_order", "track_order", "order_status", "lookup_order"), "Look up the state of an order",
          {"order": Parameter(("order_id", "order", "id", "number"), "Number of the order", code)},
          ("Where is my order {order}?", "What is the state of order {order}?", "Track order {order}.",
           "Has order {order} been sent?"),
          {"state": _of(("packed", "sent", "delivered", "waiting")), "city": place},
          "Order {order} is {state} in {city}."),
    Skill(("search_articles", "web_search", "find_article", "search"), "Search for articles about a topic",
          {"topic": Parameter(("topic", "query", "keyword"), "Topic of the article", _of(TOPICS))},
          ("Find an article about {topic}.", "Search for {topic}.", "Look up something about {topic}."),
          {"title": _title, "author": given_name}, 'I found "{title}" by {author}.'),
    Skill(("get_weather", "get_current_weather", "get_temperature", "weather"),
        "Get the current temperature for a given location",
          {"city": _PLACE, "unit": Parameter(("unit", "units", "scale"), "Unit of the temperature",
          _of_two("celsius", "fahrenheit"))},
          ("What is the temperature in {city} in {unit}?", "How warm is it in {city}, in {unit}?",
           "Weather in {city} in {unit}, please.",
           "What is the weather in {city}? Use {unit}."),
          {"temperature": _between(-20, 100)}, "It is {temperature} degrees in {city}."),
    Skill(("get_population", "population", "count_people"), "Get the number of people in a city", {"city": _PLACE},
          ("How many people live in {city}?", "What is the population of {city}?"),
          {"population": _between(1000, 10000000)}, "{population} people live in {city}."),
)  # fmt: skip


def _setting(rng: Random) -> Skill:
    """A skill that no list holds: to set some attribute of some device."""
    attribute, device = rng.choice(_ATTRIBUTES), rng.choice(_DEVICES + OBJECTS)
    verb = rng.choice(("set", "change", "adjust", "update"))
    return Skill(
        (f"{verb}_{device}_{attribute}", f"{device}_{attribute}", f"{verb}_{attribute}_of_{device}"),
        f"{verb.capitalize()} the {attribute} of the {device}",
        {"value": Parameter((attribute, "value", "level", "number"), f"New {attribute}", _between(0, 101)),
         "room": Parameter(("room", "where", "zone"), "Name of the room",
         _of(("kitchen", "bedroom", "office", "hall", "garage")))},
        (f"Set the {attribute} of the {device} in the {{room}} to {{value}}.",
         f"Please turn the {attribute} of the {{room}} {device} to {{value}}.",
         f"Make the {device} {attribute} {{value}} in the {{room}}."),
        {"status": _of(("done", "ok", "set"))},
        f"The {attribute} of the {device} in the {{room}} is now {{value}}.",
    )  # fmt: skip


_RECORD_VERBS = (
    "get",
    "delete",
    "open",
    "close",
    "find",
    "show",
    "update",
    "archive",
    "restart",
    "cancel",
    "approve",
    "check",
    "print",
)
_RECORDS = (
    "user", "file", "invoice", "ticket", "order", "page", "account", "device", "document", "project", "task", "note",
    "customer",
    "contract", "server", "folder", "report", "payment", "room", "album", "photo", "patient", "course", "backup", "job",
    "student",
)  # fmt: skip


def _record(rng: Random) -> Skill:
    """Something done to one record, named by its id."""
    verb, noun = rng.choice(_RECORD_VERBS), rng.choice(_RECORDS + OBJECTS)
    identity = Parameter(
        (f"{noun}_id", "id", "name", noun, "key"),
        f"Which {noun}",
        lambda rng: code(rng) if rng.random() < 0.7 else pseudo_word(rng),
    )
    return Skill(
        (f"{verb}_{noun}", f"{verb}{noun.capitalize()}", f"{noun}_{verb}", f"{verb}-{noun}"),
        rng.choice((f"{verb.capitalize()} a given {noun}", f"{verb.capitalize()} the {noun} with this id")),
        {"id": identity},
        (f"{verb.capitalize()} the {noun} {{id}}.", f"Please {verb} {noun} {{id}}.",
         f"Can you {verb} the {noun} {{id}}?",
         f"I want to {verb} {noun} {{id}}."),
        {"status": _of(("done", "ok", "pending", "closed", "open")), "owner": given_name},
        f"The {noun} {{id}} has the status {{status}}.",
    )  # fmt: skip


_OPERATIONS = ("multiply", "divide", "subtract", "compare", "add", "power", "modulo", "average")


def _operation(rng: Random) -> Skill:
    """A function of two numbers."""
    verb = rng.choice(_OPERATIONS)
    low = _between(0, 10 ** rng.choice((1, 2, 3, 4, 5)))
    return Skill(
        (verb, f"{verb}_numbers", f"math_{verb}", f"calc_{verb}"),
        rng.choice((f"{verb.capitalize()} two numbers", f"{verb.capitalize()} two integers")),
        {"a": Parameter(("a", "x", "first", "left"), "First number", low), "b": Parameter(("b", "y", "second", "right"),
        "Second number", low)},
        (f"{verb.capitalize()} {{a}} and {{b}}.", f"Use the tool to {verb} {{a}} and {{b}}.",
         f"Please {verb} {{a}} and {{b}}.",
         f"Call {verb} with {{a}} and {{b}}."),
        {"result": _between(0, 1000000)},
        "The result is {result}.",
    )  # fmt: skip


def _property(rng: Random) -> Skill:
    """A question about a property of a thing in a place."""
    noun, where = rng.choice(OBJECTS + FOODS), rng.choice(("shop", "room", "city", "store", "warehouse", "museum"))
    prop = rng.choice(("price", "number", "size", "state", "colour", "weight", "quality", "rating"))
    return Skill(
        (f"get_{noun}_{prop}", f"{noun}_{prop}", f"lookup_{prop}", f"get{noun.capitalize()}{prop.capitalize()}"),
        f"Get the {prop} of the {noun} in a {where}",
        {"where": Parameter((where, "name", "place", f"{where}_name"), f"Name of the {where}",
        lambda rng: place(rng) if rng.random() < 0.5 else code(rng))},
        (f"What is the {prop} of the {noun} in {{where}}?", f"Tell me the {noun} {prop} in {{where}}.",
         f"Get the {noun} {prop} for {{where}}."),
        {prop: lambda rng: rng.choice(ADJECTIVES) if rng.random() < 0.5 else rng.randrange(1000)},
        f"The {prop} of the {noun} in {{where}} is {{{prop}}}.",
    )  # fmt: skip


def invented(rng: Random) -> Skill:
    """A skill that no list holds."""
    return rng.choice((_setting, _record, _record, _operation, _property))(rng)
