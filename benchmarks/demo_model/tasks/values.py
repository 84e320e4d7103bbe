"""Values by kind, as people say them and as JSON holds them: what fills questions, facts and arguments."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from benchmarks.demo_model.lexicon import (
    ADJECTIVES,
    ANIMALS,
    CAPITALS,
    CITIES,
    COLOURS,
    DAYS,
    FOODS,
    JOBS,
    MONTHS,
    NATURE,
    NUMBER_WORDS,
    OBJECTS,
    SURNAMES,
    TOPICS,
    VERBS,
    code,
    given_name,
    place,
    plural,
    pseudo_word,
)


@dataclass(frozen=True)
class Said:
    """A value whose words differ from its JSON."""

    text: str
    value: Any


Draw = Callable[[Random], Any]

LANGUAGES = (
    "French", "German", "Spanish", "Italian", "Greek", "Polish", "Hindi", "Dutch", "English", "Japanese", "Chinese",
    "Arabic", "Russian", "Turkish", "Swedish", "Korean", "Portuguese", "Finnish", "Danish", "Czech", "Swahili", "Latin",
)  # fmt: skip
_CURRENCIES = (
    "EUR", "USD", "GBP", "JPY", "CHF", "SEK", "INR", "CAD", "AUD", "CNY", "BRL", "NOK", "PLN", "euros", "dollars",
    "pounds", "yen", "francs", "rupees", "pesos",
)  # fmt: skip
_UNITS = (
    "miles", "kilometers", "metres", "feet", "inches", "centimeters", "kilograms", "pounds", "grams", "ounces",
    "liters", "gallons", "celsius", "fahrenheit", "hours", "minutes", "km", "kg", "cm",
)  # fmt: skip
_COINS = ("bitcoin", "ethereum", "BTC", "ETH", "dogecoin", "solana", "litecoin", "monero", "cardano")
_TICKERS = ("AAPL", "MSFT", "GOOG", "TSLA", "AMZN", "NVDA", "META", "IBM", "Apple", "Tesla", "Google", "Microsoft")
_ROOMS = (
    "kitchen", "bedroom", "living room", "bathroom", "office", "hall", "garage", "cellar", "attic", "dining room",
    "nursery", "garden", "guest room", "library",
)  # fmt: skip
_EXTENSIONS = ("txt", "py", "md", "json", "csv", "log", "pdf", "yaml", "html", "png")
_DINNERS = ("meeting", "dinner", "lunch", "call", "review", "workshop", "party", "interview", "standup", "appointment")
_SPORTS = ("tennis", "football", "chess", "golf", "hockey", "basketball", "volleyball", "badminton", "rugby", "judo")
_DRINKS = ("tea", "coffee", "milk", "water", "juice", "cocoa", "wine", "beer", "lemonade", "cider")
_INSTRUMENTS = ("piano", "violin", "flute", "drum", "guitar", "trumpet", "cello", "harp", "organ", "clarinet")


def spoken(value: Any) -> str:
    """The value as it stands in a sentence."""
    if isinstance(value, Said):
        return value.text
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def held(value: Any) -> Any:
    """The value as JSON holds it."""
    return value.value if isinstance(value, Said) else value


def listing(rng: Random, words: list[str]) -> str:
    """Words as people list them."""
    if len(words) == 1:
        return words[0]
    last = rng.choice((" and ", " and ", " and ", ", and " if len(words) > 2 else " and "))
    return ", ".join(words[:-1]) + last + words[-1]


def of(*pools: tuple[str, ...], strange: float = 0.2) -> Draw:
    """One word of the pools, now and then an invented one."""
    pool = tuple(word for words in pools for word in words)
    return lambda rng: rng.choice(pool) if rng.random() >= strange else pseudo_word(rng)


def between(low: int, high: int) -> Draw:
    return lambda rng: rng.randrange(low, high)


def _number(rng: Random) -> int:
    return rng.randrange(1, 10 ** rng.choice((1, 2, 2, 3, 3, 4)))


def _counted(rng: Random) -> Any:
    size = rng.randrange(1, 31)
    return Said(NUMBER_WORDS[size], size) if 1 < size < 13 and rng.random() < 0.5 else size


def _money(rng: Random) -> Any:
    if rng.random() < 0.5:
        return rng.randrange(1, 2000)
    cents = rng.randrange(100, 30000)
    return Said(f"{cents / 100:.2f}", cents / 100)


def _clock(rng: Random) -> str:
    hour, minute = rng.randrange(24), rng.choice((0, 0, 15, 30, 45, rng.randrange(60)))
    form = rng.randrange(4)
    if form == 0:
        return f"{hour % 12 + 1}{rng.choice(('am', 'pm', ' am', ' pm'))}"
    if form == 1:
        return f"{hour % 12 + 1}:{minute:02d} {rng.choice(('am', 'pm', 'AM', 'PM'))}"
    return f"{hour:02d}:{minute:02d}"


def iso_date(rng: Random) -> str:
    return f"{rng.randrange(1990, 2040)}-{rng.randrange(1, 13):02d}-{rng.randrange(1, 29):02d}"


def date(rng: Random) -> str:
    """A day of a year in one of several forms."""
    month, day = rng.choice(MONTHS), rng.randrange(1, 29)
    return rng.choice((f"{month} {day}", f"{day} {month}", f"{month} {day}", iso_date(rng)))


def _day(rng: Random) -> str:
    return rng.choice((rng.choice(DAYS), rng.choice(DAYS), date(rng), "tomorrow", "today", f"next {rng.choice(DAYS)}"))


def _when(rng: Random) -> str:
    return rng.choice((
        f"on {rng.choice(DAYS)}", f"at {_clock(rng)}", "tomorrow", f"tomorrow at {_clock(rng)}", "tonight",
        f"on {date(rng)}", f"in {rng.randrange(2, 60)} minutes", f"next {rng.choice(DAYS)}", "in an hour",
    ))  # fmt: skip


def email(rng: Random) -> str:
    host = pseudo_word(rng) if rng.random() < 0.6 else rng.choice(("example", "mail", "work", "test"))
    name = given_name(rng).lower() if rng.random() < 0.7 else f"{given_name(rng)}.{rng.choice(SURNAMES)}".lower()
    return f"{name}@{host}.{rng.choice(('com', 'org', 'net', 'io', 'de'))}"


def sentence(rng: Random) -> str:
    """A short clause without a full stop."""
    pick = rng.choice
    noun, other = pick(OBJECTS + FOODS), pick(OBJECTS + ANIMALS)
    return pick((
        f"the {noun} is {pick(ADJECTIVES)}", f"I will be {rng.randrange(5, 60)} minutes late", "hi", "hello there",
        f"we need more {plural(noun)}", f"the {other} is in the {pick(_ROOMS)}",
        f"I like the {pick(ADJECTIVES)} {noun}",
        f"the code is {code(rng)}", f"see you on {pick(DAYS)}",
        f"{given_name(rng)} likes {pick(COLOURS)} {plural(noun)}",
        f"please bring the {noun}", f"thank you for the {noun}", f"the {_event(rng)} is on {pick(DAYS)}",
        f"I am in {place(rng)}", "dinner is ready", f"{pseudo_word(rng)} {pseudo_word(rng)} {pseudo_word(rng)}",
        f"this {noun} was {pick(ADJECTIVES)} and {pick(ADJECTIVES)}", f"do not forget the {noun}", "happy birthday",
    ))  # fmt: skip


def _event(rng: Random) -> str:
    kind = rng.choice(_DINNERS)
    return rng.choice((kind, f"{rng.choice(ADJECTIVES)} {kind}", f"{rng.choice(TOPICS)} {kind}", f"team {kind}"))


def _task(rng: Random) -> str:
    noun = rng.choice(OBJECTS + FOODS)
    return rng.choice((
        f"buy {rng.choice(FOODS)}", f"call {given_name(rng)}", f"{rng.choice(VERBS)} the {noun}", "pay the rent",
        f"fix the {noun}", f"water the {plural(noun)}", f"send the {noun} to {given_name(rng)}", "take out the trash",
        f"{pseudo_word(rng)} the {noun}", f"clean the {rng.choice(_ROOMS)}", f"feed the {rng.choice(ANIMALS)}",
    ))  # fmt: skip


def _product(rng: Random) -> str:
    noun = rng.choice(OBJECTS + FOODS) if rng.random() < 0.85 else pseudo_word(rng)
    return rng.choice((noun, f"{rng.choice(COLOURS)} {noun}", f"{rng.choice(ADJECTIVES)} {noun}"))


def _dish(rng: Random) -> str:
    food = rng.choice(FOODS)
    return rng.choice(
        (food, f"{food} {rng.choice(('soup', 'salad', 'pie', 'cake', 'curry', 'stew'))}", "pizza", "sushi")
    )


def topic(rng: Random) -> str:
    """One to four words to look for."""
    pick = rng.choice
    first = pick(TOPICS + NATURE + ANIMALS) if rng.random() < 0.8 else pseudo_word(rng)
    return pick((
        first, first, f"{pick(ADJECTIVES)} {first}", f"{first} in {place(rng)}", f"{first} and {pick(TOPICS)}",
        f"the history of {first}", f"{pick(ADJECTIVES)} {plural(pick(OBJECTS))}", f"{given_name(rng)} {pick(SURNAMES)}",
    ))  # fmt: skip


def _textual(rng: Random) -> str:
    return rng.choice((
        rng.choice(OBJECTS + FOODS + ANIMALS), "hello", "good morning", "thank you", "where is the station",
        sentence(rng), f"the {rng.choice(ADJECTIVES)} {rng.choice(ANIMALS)}", "how are you", "I love you",
    ))  # fmt: skip


def proper(rng: Random) -> str:
    """The name of a firm, a house or a team."""
    pick = rng.choice
    invented = pseudo_word(rng).capitalize()
    return pick((
        invented, f"{pick(SURNAMES)}'s", f"The {pick(COLOURS).capitalize()} {pick(ANIMALS).capitalize()}",
        f"{place(rng)} {pick(('United', 'City', 'Tigers', 'Rovers', 'Bears'))}", f"Chez {given_name(rng)}",
        f"{pick(SURNAMES)} {pick(('Labs', 'Group', 'Works', 'Foods'))}",
        f"{invented} {pick(('Inc', 'Bar', 'Systems'))}",
    ))  # fmt: skip


def _song(rng: Random) -> str:
    pick = rng.choice
    noun = pick(OBJECTS + NATURE)
    return pick((f"{pick(COLOURS)} {noun}", f"The {pick(ADJECTIVES).capitalize()} {noun.capitalize()}",
                 f"{noun.capitalize()} of {place(rng)}", pseudo_word(rng).capitalize(), f"My {noun}"))  # fmt: skip


def path(rng: Random) -> str:
    stem = rng.choice(OBJECTS + VERBS) if rng.random() < 0.6 else pseudo_word(rng)
    folder = rng.choice(("", "", "/tmp/", "docs/", f"/home/{given_name(rng).lower()}/", "src/", f"{pseudo_word(rng)}/"))
    return f"{folder}{stem}.{rng.choice(_EXTENSIONS)}"


def _folder(rng: Random) -> str:
    return rng.choice(("/tmp", "docs", "src", f"/home/{given_name(rng).lower()}", f"/var/{pseudo_word(rng)}", "/etc"))


def _sum(rng: Random) -> str:
    a, b, c = (_number(rng) for _ in range(3))
    sign, other = rng.choice("+-*/"), rng.choice("+-*/")
    return rng.choice((f"{a} {sign} {b}", f"{a}{sign}{b}", f"({a} {sign} {b}) {other} {c}",
    f"{a} {sign} {b} {other} {c}",
                       f"sqrt({a})", f"{a}^{b % 9}"))  # fmt: skip


def _sql(rng: Random) -> str:
    table, column = plural(rng.choice(OBJECTS + JOBS)), rng.choice(("id", "name", "price", "*", "count(*)", "city"))
    where = (
        f" WHERE {rng.choice(('id', 'age', 'price'))} {rng.choice('=<>')} {_number(rng)}" if rng.random() < 0.5 else ""
    )
    return f"SELECT {column} FROM {table}{where}"


def _command(rng: Random) -> str:
    return rng.choice(("ls -la", "pwd", f"cat {path(rng)}", f"rm {path(rng)}", "git status", f"echo {pseudo_word(rng)}",
                       f"mkdir {pseudo_word(rng)}", "df -h", f"grep {pseudo_word(rng)} {path(rng)}",
                       "uptime"))  # fmt: skip


def _python(rng: Random) -> str:
    return rng.choice((f"print({_sum(rng)})", f"print('{pseudo_word(rng)}')", f"sum(range({_number(rng)}))",
                       f"len('{pseudo_word(rng)}')", f"max({_number(rng)}, {_number(rng)})"))  # fmt: skip


def _problem(rng: Random) -> str:
    noun = rng.choice(OBJECTS)
    return rng.choice((f"the {noun} is broken", f"my {noun} does not work", f"I cannot open the {noun}",
                       f"the {noun} makes a {rng.choice(ADJECTIVES)} noise", "the server is down",
                       f"{pseudo_word(rng)} crashes on start"))  # fmt: skip


def _picture(rng: Random) -> str:
    pick = rng.choice
    return f"a {pick(ADJECTIVES)} {pick(ANIMALS + OBJECTS)}" + pick(
        ("", f" in the {pick(NATURE)}", f" on a {pick(OBJECTS)}")
    )


def _address(rng: Random) -> str:
    street = pseudo_word(rng).capitalize() if rng.random() < 0.5 else rng.choice(NATURE + ADJECTIVES).capitalize()
    return rng.choice((f"{rng.randrange(1, 300)} {street} {rng.choice(('Street', 'Road', 'Lane', 'Avenue'))}",
                       "the airport", "the station",
                       f"the {rng.choice(ADJECTIVES)} {rng.choice(OBJECTS)} museum"))  # fmt: skip


def _several(draw: Draw) -> Draw:
    def drawn(rng: Random) -> Said:
        words = list(dict.fromkeys(str(draw(rng)) for _ in range(rng.randrange(1, 5))))
        return Said(listing(rng, words), words)

    return drawn


def _full_name(rng: Random) -> str:
    return f"{given_name(rng)} {rng.choice(SURNAMES)}" if rng.random() < 0.7 else given_name(rng)


def scrambled(rng: Random) -> str:
    """Letters in no order that any language knows: what can only be copied letter by letter."""
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyzaeiouaeiourstln") for _ in range(rng.randrange(3, 10)))


def person(rng: Random) -> str:
    """A first name, known or invented."""
    return scrambled(rng).capitalize() if rng.random() < 0.15 else given_name(rng)


def secret(rng: Random) -> str:
    if rng.random() < 0.2:
        return scrambled(rng)
    return pseudo_word(rng) if rng.random() < 0.4 else rng.choice(OBJECTS + ANIMALS + NATURE)


def _ticker(rng: Random) -> str:
    if rng.random() < 0.3:
        return rng.choice(_TICKERS)
    return "".join(rng.choice("ABCDEFGHIKLMNOPQRSTVXYZ") for _ in range(rng.choice((3, 4))))


KINDS: dict[str, Draw] = {
    "place": place, "person": person, "name": person, "fullname": _full_name, "email": email, "code": code,
    "clock": _clock, "day": _day, "when": _when, "date": date, "number": _number, "small": between(1, 31),
    "big": between(10, 10000), "count": _counted, "guests": _counted, "money": _money, "task": _task,
    "decimal": lambda rng: round(rng.randrange(1, 120) / 10, 1), "price": between(5, 5000), "sentence": sentence,
    "phrase": lambda rng: f"{rng.choice(ADJECTIVES)} {rng.choice(OBJECTS)}", "product": _product, "food": _dish,
    "flight": lambda rng: "".join(rng.choice("ABKLUXQ") for _ in range(2)) + str(rng.randrange(10, 10000)),
    "address": _address, "proper": proper, "company": proper, "ticker": _ticker, "coin": of(_COINS),
    "currency": of(_CURRENCIES, strange=0.0), "unit": of(_UNITS, strange=0.0), "sum": _sum, "textual": _textual,
    "language": of(LANGUAGES, strange=0.05), "word": of(ANIMALS, FOODS, OBJECTS, ADJECTIVES, NATURE, VERBS, TOPICS),
    "topicphrase": topic, "url": lambda rng: f"https://{pseudo_word(rng)}.{rng.choice(('com', 'org', 'io'))}"
    + rng.choice(("", f"/{rng.choice(OBJECTS)}", f"/{pseudo_word(rng)}.html")), "song": _song, "room": of(_ROOMS),
    "onoff": lambda rng: rng.choice(("on", "off")), "path": path, "folder": _folder, "sql": _sql, "command": _command,
    "pycode": _python, "problem": _problem, "picture": _picture, "job": of(JOBS), "country": of(tuple(CAPITALS)),
    "year": between(1990, 2040), "host": lambda rng: rng.choice((pseudo_word(rng),
    f"{pseudo_word(rng)}-{rng.randrange(20)}",
                                                                 "web-1", "db", "billing", "frontend")),
    "tags": _several(of(ADJECTIVES, COLOURS, OBJECTS)), "people": _several(given_name),
    "colour": of(COLOURS, strange=0.1),
    "animal": of(ANIMALS), "age": between(5, 100), "secret": secret, "sport": of(_SPORTS), "drink": of(_DRINKS),
    "phone": lambda rng: f"{rng.choice(('555-', '0', '+49 ', '030 '))}{rng.randrange(1000, 1000000)}",
    "allergy": lambda rng: plural(rng.choice(FOODS)), "instrument": of(_INSTRUMENTS), "city": of(CITIES),
    "event": _event,
    "ip": lambda rng: ".".join(str(rng.randrange(1, 255)) for _ in range(4)), "dish": of(FOODS),
    "flag": lambda rng: rng.random() < 0.5,
}  # fmt: skip


FRACTIONS = ("money", "decimal")  # kinds of numbers that need not be integers


def kind(name: str) -> Draw:
    """The values of a kind; `enum:a/b` is one of those words."""
    if name.startswith("enum:"):
        members = tuple(name[5:].split("/"))
        return lambda rng: rng.choice(members)
    return KINDS[name]
