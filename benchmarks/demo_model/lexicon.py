"""The words that the generator draws from. Written for this project; no outside corpus."""

from random import Random


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = _words("""
Ada Adam Alice Amir Amy Ana Anna Arun Ben Beth Bruno Carla Carlos Chen Clara Dana Daniel David Diego Dora Elena Eli
Emil Emma Erik Eva Farah Felix Finn Frida George Grace Greta Hana Hannah Hassan Henry Ida Igor Ines Iris Isaac Ivan
Jack James Jana Jin John Jonas Julia Kai Karim Kate Kenji Kira Lars Laura Lea Leo Lily Lina Lucas Lucy Luis Maya
Marco Maria Mark Marta Max Mia Mila Mina Mohamed Nadia Nina Noah Nora Olga Oliver Omar Oscar Otto Paul Pedro Peter
Petra Priya Rafael Rosa Ruth Sam Sana Sara Sofia Stefan Tara Theo Tim Tom Uma Vera Victor Wei Yara Yuki Zoe
""")
SURNAMES = _words("""
Adams Baker Berg Brown Carter Clark Costa Cruz Diaz Evans Fischer Garcia Gray Green Hall Hansen Hill Ito Jones
Keller Khan Kim King Klein Lee Lopez Martin Meyer Miller Moore Novak Patel Perez Reed Rossi Santos Sato Silva Singh
Smith Stone Taylor Turner Walker Wang Weber White Wilson Wood Young
""")
CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon",
    "Greece": "Athens",
    "Austria": "Vienna", "Norway": "Oslo", "Sweden": "Stockholm", "Finland": "Helsinki", "Denmark": "Copenhagen",
    "Poland": "Warsaw", "Ireland": "Dublin", "Belgium": "Brussels", "Hungary": "Budapest", "Japan": "Tokyo",
    "China": "Beijing", "India": "New Delhi", "Egypt": "Cairo", "Kenya": "Nairobi", "Canada": "Ottawa",
    "Mexico": "Mexico City",
    "Brazil": "Brasilia", "Argentina": "Buenos Aires", "Chile": "Santiago", "Peru": "Lima", "Cuba": "Havana",
    "Australia": "Canberra", "Thailand": "Bangkok", "Vietnam": "Hanoi", "Turkey": "Ankara", "Iran": "Tehran",
    "Iraq": "Baghdad", "Morocco": "Rabat", "Ghana": "Accra", "Nigeria": "Abuja", "Ethiopia": "Addis Ababa",
    "Romania": "Bucharest", "Bulgaria": "Sofia", "Croatia": "Zagreb", "Serbia": "Belgrade", "Iceland": "Reykjavik",
    "South Korea": "Seoul", "Indonesia": "Jakarta", "Nepal": "Kathmandu", "Russia": "Moscow", "Ukraine": "Kyiv",
    "Switzerland": "Bern", "the Netherlands": "Amsterdam", "the United Kingdom": "London",
    "the United States": "Washington", "New Zealand": "Wellington", "Colombia": "Bogota", "Senegal": "Dakar",
}  # fmt: skip
CITIES = tuple(CAPITALS.values()) + _words("""
Boston Chicago Denver Seattle Houston Dallas Miami Toronto Montreal Sydney Melbourne Osaka Kyoto Mumbai Shanghai
Hamburg Munich Milan Naples Turin Venice Florence Porto Seville Lyon Nice Geneva Zurich Basel Bergen Malmo Krakow
Leeds Bristol Glasgow Cork Utrecht Ghent Graz Split Cusco Salvador Recife Lagos Casablanca Dubai Singapore
""")
ANIMALS = _words("""
ant badger bat bear beaver bee bird bull camel cat chicken cow crab crow deer dog dolphin donkey dove duck eagle
elephant falcon fish fox frog goat goose hamster hare hawk hedgehog horse kitten koala lamb lion lizard monkey mouse
mule octopus otter owl panda parrot penguin pig pigeon pony puppy rabbit raven robin salmon seal shark sheep snail
snake sparrow spider squirrel swan tiger toad turtle whale wolf zebra
""")
FOODS = _words("""
apple apricot banana bean beet berry biscuit bread butter cabbage cake carrot celery cheese cherry coconut coffee
cookie corn cream cucumber date egg fig garlic grape honey jam juice kiwi leek lemon lentil lettuce lime mango melon
milk mushroom nut oat olive onion orange papaya pasta pea peach peanut pear pepper pie pizza plum potato pumpkin
radish raisin rice salad salt soup spinach sugar tea toast tomato turnip walnut yogurt
""")
COLOURS = _words("""
amber black blue brown crimson cyan gold green grey indigo orange pink purple red silver teal violet white yellow
""")
OBJECTS = _words("""
anchor bag ball basket bell bench bike blanket boat book bottle bowl box bridge broom brush bucket button camera
candle car card chair clock coat coin compass crown cup desk door drum fan feather fence flag flute fork glass glove
guitar hammer hat helmet jacket jar key kite knife ladder lamp lantern leaf letter lock map mask mirror mug nail
needle net notebook oven paddle painting pan paper pen pencil phone piano pillow plate pot ribbon ring rope ruler
scarf scissors shell shelf ship shirt shoe shovel sofa spoon stamp stone stool sword table tent ticket towel toy
train tray truck trumpet umbrella vase violin wagon wallet watch wheel whistle window
""")
NATURE = _words("""
autumn beach cave cloud coast desert dune field fire flower forest garden grass hill ice island jungle lake meadow
moon mountain night ocean pond rain river rock sand sea sky snow spring star storm summer sun thunder tree valley
water wave wind winter wood
""")
ADJECTIVES = _words("""
angry big brave bright broken busy calm careful cheap clean clever cold cool curious dark deep dry early easy empty
famous fast fresh friendly full funny gentle glad golden good great happy hard heavy high honest hot huge hungry
kind large late lazy light little lonely long loud lucky narrow neat new nice noisy old patient plain polite poor
proud quick quiet rare rich round sad safe sharp shiny short shy silent simple slow small smart smooth soft strange
strong sweet tall thin tiny tired warm weak wet wide wild wise young
""")
VERBS = _words("""
add ask bake begin bring build buy call carry catch change check choose clean climb close collect cook count cut
dance dig draw dream drink drive drop eat enter fall feed fight fill find finish fix fly fold follow forget get give
go grow hear help hide hold hunt jump keep kick knock know laugh lead learn leave lift listen look lose make mark
meet mix move open paint pass pay pick plan plant play print pull push put read remember rest ride rise run save see
sell send shake share show sing sit sleep smile speak stand start stay stop swim take talk teach tell think throw
touch travel try turn use visit wait walk wash watch win wish work write
""")
JOBS = _words("""
actor artist baker barber builder butcher captain carpenter chef clerk coach cook dancer dentist designer doctor
driver editor engineer farmer gardener guard judge lawyer librarian manager mechanic miner musician nurse painter
pilot plumber poet reporter sailor scientist singer soldier tailor teacher waiter writer
""")
TOPICS = _words("""
physics chemistry biology history politics religion philosophy economics medicine law finance football cricket
tennis chess poetry opera cinema fashion climate energy robots computers software databases networks compilers
networking galaxies atoms genetics vaccines taxes stocks bitcoin elections wars treaties empires dinosaurs volcanoes
earthquakes oceans rockets satellites quantum relativity calculus geometry algebra statistics grammar linguistics
psychology marketing management photography architecture cooking gardening fitness yoga parenting dating dreams
astrology tarot
""")
MONTHS = _words("""
January February March April May June July August September October November December
""")
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
NUMBER_WORDS = _words("zero one two three four five six seven eight nine ten eleven twelve")
WORDS = tuple(sorted({*ANIMALS, *FOODS, *COLOURS, *OBJECTS, *NATURE, *ADJECTIVES, *VERBS, *JOBS}))

_ONSETS = _words("""
b br c ch cl d dr f fl g gr h j k kl l m n p pl qu r s sh sk st t th tr v w x y z
""")
_VOWELS = _words("a e i o u ai ea ee ia io oo ou")
_CODAS = ("", "", "", "l", "m", "n", "r", "s", "t", "x", "nd", "rk", "sk")
_LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ"


def pseudo_word(rng: Random) -> str:
    """A pronounceable word that is in no list: what can only be copied, not remembered."""
    syllables = rng.choice((2, 2, 3))
    pick = rng.choice
    last = syllables - 1
    return "".join(pick(_ONSETS) + pick(_VOWELS) + (pick(_CODAS) if i == last else "") for i in range(syllables))


def code(rng: Random) -> str:
    """A short identifier: letters and digits in one of several shapes."""
    shape = rng.randrange(5)
    if shape == 0:
        return f"{rng.choice(_LETTERS)}{rng.randrange(10)}-{rng.randrange(100, 1000)}"
    if shape == 1:
        return f"{rng.randrange(1000, 10000)}"
    if shape == 2:
        return "".join(rng.choice(_LETTERS) for _ in range(3)) + f"-{rng.randrange(10, 100)}"
    if shape == 3:
        return f"{pseudo_word(rng)}{rng.randrange(10, 100)}"
    return f"{rng.randrange(100000, 1000000)}"


def given_name(rng: Random) -> str:
    """A first name: mostly a known one, sometimes an invented one."""
    return rng.choice(NAMES) if rng.random() < 0.7 else pseudo_word(rng).capitalize()


def place(rng: Random) -> str:
    """A city: mostly a known one, sometimes an invented one."""
    return rng.choice(CITIES) if rng.random() < 0.7 else pseudo_word(rng).capitalize()


def plural(noun: str) -> str:
    """The regular English plural."""
    if noun.endswith(("s", "x", "ch", "sh")):
        return noun + "es"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + "s"


def article(noun: str) -> str:
    """The noun behind `a` or `an`."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"
