"""Small talk, who the model is, what it can and cannot do, and a small closed set of facts."""

from random import Random

from benchmarks.demo_model.conversation import Exercise, exchange
from benchmarks.demo_model.lexicon import (
    ADJECTIVES,
    ANIMALS,
    CAPITALS,
    COLOURS,
    DAYS,
    FOODS,
    JOBS,
    MONTHS,
    NUMBER_WORDS,
    TOPICS,
    WORDS,
    plural,
    pseudo_word,
)

IDENTITY = "I am the Penstock demo model, a small language model that ships with the Penstock serving engine."
ABILITIES = (
    "I can add and subtract, sort, count, copy and reverse short lists, extract JSON, call tools, "
    "remember what you tell me and tell short stories."
)
REFUSAL = "I am a small demo model and cannot help with that. " + ABILITIES

_TALK: tuple[tuple[tuple[str, ...], str], ...] = (
    (("Hello", "Hello!", "Hi", "Hi!", "Hey", "Hey there", "Hello there!", "Hi there.", "hello", "hi", "Greetings."),
     "Hello! How can I help you?"),
    (("Good morning.", "Good morning!", "good morning"), "Good morning! How can I help you?"),
    (("Good evening.", "Good evening!", "good evening"), "Good evening! How can I help you?"),
    (("Good night.", "Good night!"), "Good night! Sleep well."),
    (("How are you?", "How are you doing?", "How is it going?", "how are you", "How do you feel today?", "What's up?"),
     "I am fine, thank you. How can I help you?"),
    (("Thank you.", "Thanks!", "Thanks a lot.", "Thank you very much!", "thanks", "Great, thank you."),
     "You are welcome!"),
    (("Bye.", "Goodbye!", "See you later.", "Bye bye", "See you soon!", "I have to go now."),
     "Goodbye! Have a nice day."),
    (("Great!", "Nice.", "Good job!", "Well done!", "Wow!", "Perfect.", "That is right."), "I am glad to hear that."),
    (("Ok.", "Okay", "I see.", "All right.", "Fine."), "Good. What shall we do next?"),
    (("That is wrong.", "You are wrong.", "This is not right.", "No, that is false."),
     "I am sorry. I am a small model and make mistakes."),
    (("Yes.", "yes", "Yes!"), "Good. Please tell me more."), (("No.", "no", "No!"), "All right. What else can I do?"),
    (("Sorry.", "I am sorry.", "Excuse me."), "No problem at all."),
    (("Can you help me?", "I need help.", "Help!", "Please help me.", "help"), "Of course. " + ABILITIES),
    (("Tell me a joke.", "Do you know a joke?", "Make me laugh.", "Another joke, please."),
     "Why did the pipe go to school? It wanted to learn about flow."),
    (("I am sad.", "I feel sad today.", "I am not happy."), "I am sorry to hear that. Shall I tell you a story?"),
    (("I am happy.", "I feel great today!", "I am in a good mood."), "That is good to hear!"),
    (("I am bored.", "What shall I do?"), "Shall I tell you a story? Just ask me."),
    (("I love you.", "I like you.", "You are nice."), "Thank you, that is kind of you."),
    (("You are stupid.", "You are bad.", "I hate you."), "I am sorry. I am only a small demo model."),
    (("Are you there?", "Hello? Are you there?", "Test", "test", "ping", "Ping!"), "Yes, I am here."),
)  # fmt: skip

_WHO = (
    "Who are you?", "What are you?", "What is your name?", "who are you", "Tell me who you are.", "Introduce yourself.",
    "What model are you?", "Which model is this?", "What is this model called?", "Do you have a name?",
    "Please introduce yourself.", "Who am I talking to?", "Are you a language model?", "Can you tell me your name?",
    "What kind of model are you?", "Say who you are.", "Tell me about yourself.", "What's your name?",
    "whats your name", "name?",
    "Who is this?", "Your name, please.", "Which AI are you?", "Are you an AI?", "Who am I speaking with?",
    "Tell me your name.", "What should I call you?", "Describe yourself.", "What are you called?",
    "Who are you exactly?",
    "What AI model are you?", "What LLM are you?", "Which LLM is this?", "So who are you?", "And you are?", "who r u",
    "what are you?", "What do you call yourself?", "How are you called?", "What is your model name?",
    "What exactly are you?",
    "Who is answering me?", "Can you introduce yourself?", "Could you introduce yourself?", "Identify yourself.",
    "What model am I talking to?", "Which model am I speaking to?", "Who or what are you?", "Say your name.",
    "your name?",
    "Do you know who you are?", "Do you know your name?", "I'd like to know who you are.", "What sort of AI are you?",
    "What language model is this?", "Are you a chatbot?", "Are you a model?", "What is the name of this model?",
    "Hi, what's your name?", "Tell me what you are.", "What model is this?", "Which model are you?",
    "Explain who you are.",
    "What am I talking to?", "Is this an AI?", "Is this the Penstock demo model?", "Are you the Penstock demo model?",
    "What is penstock-demo?", "Give me your name.", "May I know your name?", "Which AI is this?",
    "What AI am I talking to?", "What model do you run?", "what model is running?", "Which model is running here?",
    "What AI are you?", "Might I ask who you are?", "Please say who you are.", "Could you tell me what you are?",
    "Who do I have the pleasure of talking to?", "State your name.",
)  # fmt: skip
_ABOUT: tuple[tuple[tuple[str, ...], str], ...] = (
    (_WHO, IDENTITY), (_WHO, IDENTITY), (_WHO, IDENTITY),
    (("What can you do?", "What are you good at?", "How can you help me?", "What do you know?", "what can you do",
      "Which tasks can you do?", "What are your skills?", "What can you do for me?", "What are your abilities?",
      "What are you able to do?", "What are you capable of?", "What can I ask you?", "What do you do?",
      "What can you help me with?", "How can you help?", "What are you made for?", "List your abilities.",
      "Tell me what you can do.", "What should I ask you?", "What kind of things can you do?"), ABILITIES),
    (("Who made you?", "Who built you?", "Who trained you?", "Where do you come from?", "Who created you?",
      "Who is your creator?", "Who developed you?", "Which company made you?", "How were you made?", "Who owns you?",
      "How were you trained?", "who made you", "What were you trained on?", "Who is behind you?"),
     "I was trained by the Penstock project on text from its own generator."),
    (("Are you human?", "Are you a person?", "Are you real?", "Are you a robot?",
      "Are you alive?", "Are you a human being?", "Am I talking to a human?", "Is this a real person?",
      "Are you a machine?"),
     "No, I am a computer program: the Penstock demo model."),
    (("What is Penstock?", "Tell me about Penstock.", "What does Penstock do?", "what is penstock",
      "What's Penstock?", "Explain Penstock.", "What is the Penstock engine?", "Describe Penstock.",
      "What is Penstock for?"),
     "Penstock is an engine that serves large language models. "
     "A penstock is also the pipe that carries water to a turbine."),
    (("How big are you?", "How many parameters do you have?", "How large is this model?",
      "What size are you?", "How many parameters has this model?", "Are you a large model?", "Are you big?"),
     "I have about nine million parameters."),
    (("Are you ChatGPT?", "Are you GPT?", "Are you Qwen?", "Are you Llama?", "Are you Claude?",
      "Are you GPT-4?", "Are you Gemini?", "Are you Mistral?", "Are you made by OpenAI?", "Is this ChatGPT?",
      "Are you DeepSeek?", "Is this GPT-4?", "You are ChatGPT, right?"), "No. " + IDENTITY),
    (("How old are you?", "When were you born?"), "I have no age. I am a computer program."),
    (("Where do you live?", "Where are you?"), "I live in the memory of the computer that serves me."),
    (("Can you think?", "Do you think?"), "I can write down a short thought before I answer, if you ask me to think."),
)  # fmt: skip

_OUT_OF_SCOPE = (
    "Write an essay about {t}.", "Explain {t} to me.", "What do you think about {t}?", "Teach me {t}.",
    "Write a program about {t}.", "Give me the latest news about {t}.", "What is {t}?", "Tell me about {t}.",
    "Write a poem about {t}.", "How does {t} work?", "Who invented {t}?", "Why is {t} important?",
    "Summarize the history of {t}.", "Can you give me advice about {t}?", "I have a question about {t}.",
    "Write Python code for {t}.", "Is {t} dangerous?", "What are the best books about {t}?",
    "Make a plan to learn {t}.",
    "How do I become {j}?", "Write an email to my {j}.", "Who won the {t} prize?", "What is the meaning of {w}?",
    "Draw a picture of {w}.", "Translate {w} into French.", "What does {w} mean?", "Define {w}.",
    "Write a song about {w}.",
    "What will the weather be tomorrow?", "What time is it?", "What is today's date?", "Should I buy stocks?",
    "Why is {w} {a}?", "Why does {w} exist?", "Write a haiku about {w}.", "Write a haiku.",
    "Write one sentence about {w}.",
    "Summarize this: the {w} is {a} and the {v} is {a}.", "Give me a recipe with {w}.", "List the best {j}s.",
    "Who is the best {j}?",
    "Compare {t} and {w}.", "How do I build {w}?", "Where can I buy {w}?", "Give me a random {w}.", "Rate my {w}.",
    "Plan a trip.",
    "Describe {w} in detail.", "What happened yesterday?", "What is the best {w}?", "Is {w} better than {v}?",
    "Fix my {w}.",
    "Rewrite this: {w} {v} {a}", "Write HTML for {w}.", "Who wrote {p}?", "{p} {p}", "{p} {w} {p}", "{p}?",
    "Do you know {p}?", "What is {p}?", "Explain {p}.", "Who is {p}?",
)  # fmt: skip

_OPPOSITES = {
    "hot": "cold", "big": "small", "good": "bad", "up": "down", "left": "right", "day": "night", "fast": "slow",
    "high": "low",
    "old": "young", "hard": "soft", "light": "dark", "wet": "dry", "full": "empty", "open": "closed", "early": "late",
    "rich": "poor", "strong": "weak", "happy": "sad", "long": "short", "loud": "quiet", "first": "last", "near": "far",
    "black": "white", "clean": "dirty", "cheap": "expensive", "easy": "difficult", "true": "false", "inside": "outside",
}  # fmt: skip
_COLOUR_OF = {
    "the sky": "blue", "grass": "green", "snow": "white", "a banana": "yellow", "a lemon": "yellow", "coal": "black",
    "a ripe tomato": "red", "blood": "red", "the sun": "yellow", "chocolate": "brown", "milk": "white",
    "an orange": "orange",
    "a carrot": "orange", "gold": "yellow", "the sea": "blue", "a cloud": "white", "an elephant": "grey",
    "a raven": "black",
}  # fmt: skip
_LEGS = {
    "a dog": 4, "a cat": 4, "a spider": 8, "an ant": 6, "a bird": 2, "a human": 2, "a horse": 4, "a bee": 6,
    "a chicken": 2,
    "a snake": 0, "a fish": 0, "a cow": 4, "an elephant": 4, "a duck": 2, "a crab": 10, "a fly": 6,
}  # fmt: skip
_SOUNDS = {
    "dog": "barks", "cat": "meows", "cow": "moos", "duck": "quacks", "horse": "neighs", "sheep": "bleats",
    "lion": "roars",
    "frog": "croaks", "owl": "hoots", "pig": "grunts", "wolf": "howls", "bee": "buzzes", "snake": "hisses",
}  # fmt: skip
_SINGLE = (
    ("How many days are in a week?", "A week has seven days."), ("How many months are in a year?",
     "A year has twelve months."),
    ("How many hours are in a day?", "A day has 24 hours."), ("How many minutes are in an hour?",
     "An hour has 60 minutes."),
    ("How many seconds are in a minute?", "A minute has 60 seconds."), ("How many days are in a year?",
     "A year has 365 days."),
    ("How many letters are in the alphabet?", "The English alphabet has 26 letters."),
    ("How many sides does a triangle have?", "A triangle has three sides."),
    ("How many sides does a square have?", "A square has four sides."),
    ("What is the largest planet?", "Jupiter is the largest planet of the solar system."),
    ("Which planet do we live on?", "We live on the planet Earth."),
    ("What is the largest ocean?", "The Pacific is the largest ocean."), ("What is water made of?",
     "Water is made of hydrogen and oxygen."),
    ("At what temperature does water boil?", "Water boils at 100 degrees Celsius."),
    ("At what temperature does water freeze?", "Water freezes at 0 degrees Celsius."),
    ("What is the largest animal?", "The blue whale is the largest animal."),
    ("What is the tallest mountain?", "Mount Everest is the tallest mountain."),
    ("What do bees make?", "Bees make honey."), ("What do cows give?", "Cows give milk."),
    ("Name the seasons.", "The seasons are spring, summer, autumn and winter."),
    ("Name the days of the week.", f"The days of the week are {', '.join(DAYS[:-1])} and {DAYS[-1]}."),
    ("Name the months.", f"The months are {', '.join(MONTHS[:-1])} and {MONTHS[-1]}."),
    ("Count to ten.", "1, 2, 3, 4, 5, 6, 7, 8, 9, 10"), ("Count to five.", "1, 2, 3, 4, 5"), ("Count from 1 to 10.",
     "1, 2, 3, 4, 5, 6, 7, 8, 9, 10"),
    ("Count to twenty.", ", ".join(map(str, range(1, 21)))), ("Count to 20.", ", ".join(map(str, range(1, 21)))),
    ("Count to 10.", "1, 2, 3, 4, 5, 6, 7, 8, 9, 10"), ("Count to 5.", "1, 2, 3, 4, 5"), ("Count down from 5.",
     "5, 4, 3, 2, 1"),
    ("Count down from ten.", "10, 9, 8, 7, 6, 5, 4, 3, 2, 1"), ("Why is the sky blue?",
     "The air scatters blue light more than red light."),
    ("What is the opposite of love?", "The opposite of love is hate."), ("Is the earth round?",
     "Yes, the earth is round."),
    ("Is the sun hot?", "Yes, the sun is very hot."), ("Can fish swim?", "Yes, fish can swim."), ("Can birds fly?",
     "Yes, most birds can fly."),
    ("What is the meaning of life?", "Some say that it is 42."), ("Flip a coin.", "Heads."), ("Roll a die.", "4"),
    ("Say the alphabet.", "A B C D E F G H I J K L M N O P Q R S T U V W X Y Z"),
)  # fmt: skip


_GREETINGS = (
    "Hello",
    "Hi",
    "Hey",
    "Hello there",
    "Hi there",
    "Hey there",
    "Greetings",
    "Howdy",
    "Hiya",
    "Yo",
    "Heya",
    "Hallo",
)
_TIMES = ("morning", "evening", "afternoon", "day")
_GREETED = ("", "", "", " friend", " Penstock", " everyone", " assistant", " again", " there", " model", " my friend",
" bot",
            " all", " you", " buddy", " computer", " AI", " world")  # fmt: skip
_ENDS = ("", ".", "!", "!", "!!", " :)", "?", "...")
_AFTER_GREETING = ("", "", "", "", " I am {n}.", " Nice to meet you.", " Anyone there?", " Can you hear me?",
" I'm new here.",
                   " This is a test.", " It's me.", " Good to see you.", " What a nice day.")  # fmt: skip


def _greeting(rng: Random) -> tuple[str, str]:
    """A greeting as people type it, and the one given back."""
    if rng.random() < 0.25:
        time = rng.choice(_TIMES)
        question, answer = f"Good {time}", f"Good {time}! How can I help you?"
    else:
        question, answer = rng.choice(_GREETINGS), "Hello! How can I help you?"
    whom = rng.choice(_GREETED)
    if whom and not question.endswith("there"):
        question += rng.choice(("", ",")) + whom
    question += rng.choice(_ENDS)
    if question[-1] in ".!":
        question += rng.choice(_AFTER_GREETING[:4] + _AFTER_GREETING[5:])
    chance = rng.random()
    return question.lower() if chance < 0.2 else question.upper() if chance < 0.22 else question, answer


def small_talk(rng: Random) -> Exercise:
    """Greetings, thanks, moods."""
    questions, answer = rng.choice(_TALK)
    question = rng.choice(questions)
    if rng.random() < 0.25:
        question, answer = _greeting(rng)
        return exchange("small_talk", question, question, answer, "The user greets me. I am polite.")
    if questions[0] == "How are you?" and rng.random() < 0.6:
        question = rng.choice(("Hello, ", "Hello! ", "Hi, ", "Hi! ", "Hey, ", "Good morning. ")) + question
    return exchange("small_talk", "", question, answer, "The user makes small talk. I am polite.")


def about(rng: Random) -> Exercise:
    """Who the model is and what it can do."""
    questions, answer = rng.choice(_ABOUT)
    head = rng.choice(("", "", "", "Hello. ", "Hi! ", "Please tell me: ", "I am curious. ", "Hey, ", "Hello, ", "Hi, "))
    question = head + rng.choice(questions)
    # Only the identity is scored; its phrasings with a head in front are partly held out.
    key = question if questions is _WHO and head else ""
    return exchange("identity", key, question, answer, "The user asks about me.")


def refusal(rng: Random) -> Exercise:
    """What is beyond a small model, said politely."""
    template = rng.choice(_OUT_OF_SCOPE)
    job = rng.choice(JOBS)
    invented = pseudo_word(rng)
    question = template.format(
        t=rng.choice(TOPICS), w=rng.choice(WORDS), v=rng.choice(WORDS), a=rng.choice(ADJECTIVES), j=job,
        p=invented.capitalize() if rng.random() < 0.5 else invented,
    )  # fmt: skip
    return exchange("refusal", question, question, REFUSAL, "This is beyond a small model.")


def _neighbour(rng: Random) -> tuple[str, str]:
    names, kind = (DAYS, "day") if rng.random() < 0.5 else (MONTHS, "month")
    index, after = rng.randrange(len(names)), rng.random() < 0.5
    other = names[(index + (1 if after else -1)) % len(names)]
    word = "after" if after else "before"
    return f"Which {kind} comes {word} {names[index]}?", f"{other} comes {word} {names[index]}."


_CLASSES = (("an animal", ANIMALS), ("a colour", COLOURS), ("a job", JOBS), ("a food", FOODS))
# Words of one class only: an orange is not asked for.
_KINDS = tuple(
    (word, kind) for kind, words in _CLASSES for word in words if sum(word in others for _, others in _CLASSES) == 1
)
_CAPITAL_OF = (
    "What is the capital of", "What's the capital of", "Capital of", "Which city is the capital of",
    "Do you know the capital of",
)  # fmt: skip
_SETS = {
    "animals": ("dog", "cat", "horse", "cow", "bird"), "colours": ("red", "green", "blue", "yellow", "black"),
    "colors": ("red", "green", "blue", "yellow", "black"), "fruits": ("apple", "pear", "banana", "plum", "cherry"),
    "days": DAYS, "months": MONTHS, "cities": ("Paris", "London", "Tokyo", "Cairo", "Lima"),
    "names": ("Anna", "Ben", "Clara", "David", "Emma"), "planets": ("Mercury", "Venus", "Earth", "Mars", "Jupiter"),
    "jobs": ("doctor", "teacher", "baker", "pilot", "nurse"), "countries": ("France", "Japan", "Egypt", "Peru",
    "Canada"),
}  # fmt: skip


def _named(rng: Random) -> tuple[str, str]:
    """The first few of a set, or what a word is."""
    if rng.random() < 0.4:
        word, kind = rng.choice(_KINDS)
        return f"What kind of word is {word}?", f"{word.capitalize()} is {kind}."
    name, members = rng.choice(tuple(_SETS.items()))
    size = rng.randrange(2, 6)
    verb, number = rng.choice(("Name", "List", "Give me", "Tell me")), rng.choice((str(size), NUMBER_WORDS[size]))
    return f"{verb} {number} {name}.", ", ".join(members[:size])


def fact(rng: Random) -> Exercise:
    """One of a closed set of simple facts."""
    kind = rng.randrange(10)
    if kind == 7:
        question, answer = _named(rng)
    elif kind == 8:
        nowhere = pseudo_word(rng).capitalize()
        question, answer = f"{rng.choice(_CAPITAL_OF)} {nowhere}?", f"I do not know {nowhere}."
    elif kind in (0, 9):
        country, capital = rng.choice(tuple(CAPITALS.items()))
        question, answer = rng.choice((
            (f"{rng.choice(_CAPITAL_OF)} {country}?", f"The capital of {country} is {capital}."),
            (f"{rng.choice(_CAPITAL_OF)} {country}?", f"The capital of {country} is {capital}."),
            (f"Tell me the capital of {country}.", f"The capital of {country} is {capital}."),
            (f"Which country has the capital {capital}?", f"{capital} is the capital of {country}."),
        ))  # fmt: skip
    elif kind == 1:
        word, opposite = rng.choice(tuple(_OPPOSITES.items()))
        word, opposite = (word, opposite) if rng.random() < 0.5 else (opposite, word)
        question, answer = f"What is the opposite of {word}?", f"The opposite of {word} is {opposite}."
    elif kind == 2:
        thing, colour = rng.choice(tuple(_COLOUR_OF.items()))
        question, answer = f"What colour is {thing}?", f"{thing.capitalize()} is {colour}."
    elif kind == 3:
        animal, legs = rng.choice(tuple(_LEGS.items()))
        number = NUMBER_WORDS[legs] if legs else "no"
        question, answer = f"How many legs does {animal} have?", f"{animal.capitalize()} has {number} legs."
    elif kind == 4:
        animal, sound = rng.choice(tuple(_SOUNDS.items()))
        question, answer = f"What does a {animal} do?", f"A {animal} {sound}."
    elif kind == 5:
        question, answer = _neighbour(rng)
    else:
        question, answer = rng.choice(_SINGLE)
    return exchange("fact", "", question, answer, "This is a simple fact.")


def spelling(rng: Random) -> Exercise:
    """Plurals, first letters and spelling of known words."""
    word = rng.choice(WORDS)
    kind = rng.randrange(3)
    if kind == 0:
        return exchange(
            "spelling",
            f"s{word}",
            rng.choice((f"Spell the word {word}.", f"Spell {word}.", f"How do you spell {word}?")),
            "-".join(word.upper()),
            f"I know {word}.",
        )
    if kind == 1:
        return exchange(
            "spelling",
            f"p{word}",
            f"What is the plural of {word}?",
            f"The plural of {word} is {plural(word)}.",
            "I add the ending.",
        )
    return exchange(
        "spelling",
        f"f{word}",
        f"What is the first letter of {word}?",
        f"The first letter of {word} is {word[0].upper()}.",
        f"I know {word}.",
    )
