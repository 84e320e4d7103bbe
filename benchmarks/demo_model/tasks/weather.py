"""The weather tools of OpenAI's documentation, as people paste them: the first call that anybody asks for.

Its signatures want "San Francisco, CA" or "Bogotá, Colombia" of whoever says San Francisco or Bogotá, or coordinates.
"""

from random import Random

from benchmarks.demo_model.lexicon import CAPITALS, place, pseudo_word
from benchmarks.demo_model.tasks.skills import Parameter, Skill, Value
from benchmarks.demo_model.tasks.values import Said
from benchmarks.demo_model.tasks.wording import asked, styled

_STATES = {
    "San Francisco": "CA", "Boston": "MA", "Chicago": "IL", "Denver": "CO", "Seattle": "WA", "Houston": "TX",
    "Dallas": "TX", "Miami": "FL", "New York": "NY", "Los Angeles": "CA", "Austin": "TX", "Portland": "OR",
    "Atlanta": "GA", "Phoenix": "AZ", "San Diego": "CA", "Las Vegas": "NV", "Philadelphia": "PA", "Detroit": "MI",
    "New Orleans": "LA", "Nashville": "TN",
}  # fmt: skip
_COUNTRIES = {capital: country.removeprefix("the ").capitalize() if country.islower() else country.removeprefix("the ")
              for country, capital in CAPITALS.items()} | {
    "Bogotá": "Colombia", "Toronto": "Canada", "Sydney": "Australia", "Mumbai": "India", "Hamburg": "Germany",
    "Munich": "Germany", "Milan": "Italy", "Lyon": "France", "Zurich": "Switzerland", "Barcelona": "Spain",
    "Montreal": "Canada", "Melbourne": "Australia", "Naples": "Italy", "Turin": "Italy", "Venice": "Italy",
    "Florence": "Italy", "Porto": "Portugal", "Seville": "Spain", "Nice": "France", "Geneva": "Switzerland",
    "Basel": "Switzerland", "Bergen": "Norway", "Malmo": "Sweden", "Krakow": "Poland", "Leeds": "United Kingdom",
    "Bristol": "United Kingdom", "Glasgow": "United Kingdom", "Cork": "Ireland", "Utrecht": "Netherlands",
    "Ghent": "Belgium", "Graz": "Austria", "Split": "Croatia", "Cusco": "Peru", "Salvador": "Brazil",
    "Recife": "Brazil", "Lagos": "Nigeria", "Casablanca": "Morocco", "Dubai": "United Arab Emirates",
    "Singapore": "Singapore", "Osaka": "Japan", "Kyoto": "Japan", "Shanghai": "China",
    "Rio de Janeiro": "Brazil", "São Paulo": "Brazil",
}  # fmt: skip
_COORDINATES = {
    "Paris": (48.8566, 2.3522), "London": (51.5074, -0.1278), "Berlin": (52.52, 13.405), "Tokyo": (35.6762, 139.6503),
    "Rome": (41.9028, 12.4964), "Madrid": (40.4168, -3.7038), "New York": (40.7128, -74.006),
    "San Francisco": (37.7749, -122.4194), "Boston": (42.3601, -71.0589), "Sydney": (-33.8688, 151.2093),
    "Moscow": (55.7558, 37.6173), "Cairo": (30.0444, 31.2357), "Bogotá": (4.711, -74.0721), "Oslo": (59.9139, 10.7522),
    "Vienna": (48.2082, 16.3738), "Chicago": (41.8781, -87.6298), "Seattle": (47.6062, -122.3321),
    "Lisbon": (38.7223, -9.1393), "Beijing": (39.9042, 116.4074), "Los Angeles": (34.0522, -118.2437),
}  # fmt: skip
_QUESTIONS = (
    "What's the weather like in {city} today?", "What is the weather like in {city} today?",
    "What is the weather in {city}?", "What's the weather in {city}?", "How is the weather in {city}?",
    "What's the weather like in {city}?", "What is the weather like in {city}?", "Weather in {city}?",
    "How's the weather in {city} right now?", "What's the temperature in {city}?", "How warm is it in {city} today?",
    "Tell me the weather in {city}.", "Is it cold in {city} today?", "What is the current weather in {city}?",
    "Get the weather for {city}.", "What's it like in {city} today?", "Do I need an umbrella in {city} today?",
    "What's the current temperature in {city}?", "Show me the weather for {city}.", "How hot is it in {city} now?",
)  # fmt: skip
_IN_UNITS = (
    "What's the weather like in {city} in {unit}?", "What is the temperature in {city} in {unit}?",
    "What's the weather in {city}? Use {unit}.", "How warm is it in {city}, in {unit}?", "Weather in {city} in {unit}.",
    "Give me the temperature in {city} in {unit}, please.", "What's the weather like in {city} today, in {unit}?",
)  # fmt: skip
_NAMES = (
    "get_weather", "get_weather", "get_weather", "get_current_weather", "get_current_weather", "getWeather", "weather",
    "get_current_temperature", "fetch_weather", "current_weather", "get_temperature", "lookup_weather", "weather_tool",
    "getCurrentWeather", "check_weather", "get_weather_data",
)  # fmt: skip
_DESCRIPTIONS = (
    "Get current temperature for a given location.", "Get the current weather in a given location",
    "Get the current weather", "Determine weather in my location", "Get the weather in a given city",
    "Retrieves current weather for the given location.", "Get the current weather for a city", "Returns the weather.",
    "Get weather of a location, the user should supply a location first.", "Get the weather at a place",
)  # fmt: skip
_CONDITIONS = ("sunny", "cloudy", "rainy", "windy", "foggy", "clear", "Sunny", "Partly cloudy", "light rain", "snow")
_UNITS = ("celsius", "fahrenheit")


def _anywhere(rng: Random) -> str:
    pool = rng.random()
    if pool < 0.3:
        return rng.choice(tuple(_STATES))
    if pool < 0.85:
        return rng.choice(tuple(_COUNTRIES))
    return place(rng)


def _with_state(rng: Random) -> Said | str:
    """A city as said, and with its state or country, if one is known."""
    city = _anywhere(rng)
    if city in _STATES:
        whole = f"{city}, {_STATES[city]}"
        return whole if rng.random() < 0.3 else Said(city, whole)
    if city not in _COUNTRIES:
        return f"{city}, {rng.choice(tuple(_STATES.values()))}" if rng.random() < 0.3 else city
    whole = f"{city}, {_COUNTRIES[city]}"
    return whole if rng.random() < 0.2 else Said(city, whole)


def _temperature(rng: Random) -> int | float:
    return rng.randrange(-20, 100) if rng.random() < 0.8 else rng.randrange(-200, 1000) / 10


def _results(rng: Random) -> tuple[dict[str, Value], str]:
    """What the tool finds, and the answer from it: a temperature, perhaps its unit and a word."""
    found: dict[str, Value] = {"temperature": _temperature}
    words = "It is {temperature} degrees"
    if rng.random() < 0.6:
        found["unit"] = lambda rng: rng.choice((*_UNITS, "C", "F"))
        words += " {unit}"
    if rng.random() < 0.6:
        name = rng.choice(("condition", "conditions", "description", "forecast", "weather", "summary"))
        found[name] = lambda rng: rng.choice(_CONDITIONS)
        words += f" and {{{name}}}"
    order = rng.sample(list(found), len(found))
    return {name: found[name] for name in order}, words + " in {city}."


def skill(rng: Random) -> Skill:
    """A weather tool as documentation, tutorials and people write it."""
    name = rng.choice(_NAMES) if rng.random() < 0.75 else styled(rng, f"{pseudo_word(rng)} weather")
    description = rng.choice(_DESCRIPTIONS)
    results, answer = _results(rng)
    questions = tuple(asked(rng, question) for question in rng.sample(_QUESTIONS, 6))
    if rng.random() < 0.12:
        return _by_coordinates(rng, name, questions)
    names = rng.choice((("location",), ("location",), ("location",), ("city",), ("city",), ("place",), ("city_name",)))
    form = rng.choice((0, 0, 1, 1, 2))
    if form == 0:
        purpose = rng.choice(("The city and state, e.g. San Francisco, CA", "The city and state e.g. San Francisco, CA",
                              "City and state, for example Boston, MA",
                              "The city and state, e.g. San Francisco, CA"))  # fmt: skip
        city = Parameter(names, purpose, _with_state, told=True)
    elif form == 1:
        purpose = rng.choice(("City and country e.g. Bogotá, Colombia", "City and country, e.g. Paris, France"))
        city = Parameter(names, purpose, _with_state, told=True)
    else:
        purpose = rng.choice(("Name of the city", "The city", "City name", "The location to look up", "e.g. Paris"))
        city = Parameter(names, purpose, _anywhere)
    parameters = {"city": city}
    if rng.random() < 0.5:
        units = rng.choice((("celsius", "fahrenheit"), ("celsius", "fahrenheit"), ("c", "f"), ("metric", "imperial")))
        if units[0] == "celsius":
            questions += tuple(asked(rng, question) for question in rng.sample(_IN_UNITS, 3))
        purpose = rng.choice(("Units the temperature will be returned in.", "The unit", "Temperature unit"))
        parameters["scale"] = Parameter(
            rng.choice((("unit",), ("units",))), purpose, lambda rng: rng.choice(units), units
        )
        questions = tuple(question.replace("{unit}", "{scale}") for question in questions)
        defaults = (("scale", units[0]),) if rng.random() < 0.4 else ()
        optional = frozenset({"scale"})
        return Skill((name,), description, parameters, questions, results, answer, optional, defaults, "city", 0)
    return Skill((name,), description, parameters, questions, results, answer, plural="city", family=0)


def _by_coordinates(rng: Random, name: str, questions: tuple[str, ...]) -> Skill:
    """The tool that wants latitude and longitude, for a city whose place on the globe is known."""
    city = rng.choice(tuple(_COORDINATES))
    latitude, longitude = _COORDINATES[city]
    names = rng.choice((("latitude", "longitude"), ("latitude", "longitude"), ("lat", "lon")))
    parameters = {
        "north": Parameter((names[0],), "Latitude of the place", lambda rng: latitude),
        "east": Parameter((names[1],), "Longitude of the place", lambda rng: longitude),
    }
    description = rng.choice(("Get current temperature for provided coordinates in celsius.", "Weather at coordinates"))
    questions = tuple(question.replace("{city}", city) for question in questions)
    return Skill((name,), description, parameters, questions, {"temperature": _temperature},
                 f"It is {{temperature}} degrees in {city}.", family=0)  # fmt: skip


def documented(rng: Random, questions: tuple[str, ...]) -> Skill:
    """The tool of one edition of the documentation, for cities that it would name."""
    asked_ = tuple(question.format("{city}") for question in questions)
    units = Parameter(("unit", "units"), "Units the temperature will be returned in.", lambda rng: "celsius", _UNITS)
    if rng.random() < 0.5:
        city = Parameter(("location",), "City and country e.g. Bogotá, Colombia", _known_place, told=True)
        required = rng.random() < 0.5
        return Skill(("get_weather",), "Get current temperature for a given location.",
                     {"city": city, "scale": units} if required else {"city": city}, asked_, {}, "",
                     frozenset({"scale"}), (("scale", "celsius"),) if required else (), "", 0)  # fmt: skip
    city = Parameter(("location",), "The city and state, e.g. San Francisco, CA", _known_place, told=True)
    return Skill(("get_current_weather",), "Get the current weather in a given location",
    {"city": city, "scale": units},
                 asked_, {}, "", frozenset({"scale"}), (), "", 0)  # fmt: skip


def _known_place(rng: Random) -> Said:
    city = rng.choice((*_STATES, *_COUNTRIES))
    return Said(city, f"{city}, {_STATES.get(city) or _COUNTRIES[city]}")
