"""Places that visitors ask about: countries, well-known cities, and names that nobody has heard of."""

import hashlib
from random import Random

from world import VILLAGE

COUNTRIES = (
    "France", "Germany", "Japan", "Brazil", "Kenya", "Spain", "Canada", "India", "China", "Italy", "Norway", "Egypt",
    "Peru", "Poland", "Mexico", "Greece", "Turkey", "Chile", "England", "Australia", "America", "Europe", "Paris",
    "London", "Berlin", "Tokyo", "New York", "Sweden", "Finland", "Denmark", "Portugal", "Ireland", "Scotland",
    "Austria", "Switzerland", "Belgium", "Vietnam", "Thailand", "Morocco", "Nigeria", "Argentina", "Colombia",
)  # fmt: skip
CITIES = (
    "Aarhus", "Abidjan", "Abuja", "Accra", "Adelaide", "Addis Ababa", "Algiers", "Almaty", "Amman", "Amsterdam",
    "Ankara", "Antwerp", "Asunción", "Athens", "Atlanta", "Auckland", "Austin", "Baghdad", "Baku", "Bali", "Baltimore",
    "Bangalore", "Bangkok", "Barcelona", "Basel", "Beijing", "Beirut", "Belfast", "Belgrade", "Bergen", "Bern",
    "Bilbao", "Birmingham", "Bogotá", "Bologna", "Bordeaux", "Boston", "Brasília", "Bratislava", "Bremen", "Brisbane",
    "Bristol", "Bruges", "Brussels", "Bucharest", "Budapest", "Buenos Aires", "Buffalo", "Busan", "Cairo", "Calgary",
    "Cambridge", "Canberra", "Cancún", "Cape Town", "Caracas", "Cardiff", "Casablanca", "Chennai", "Chicago",
    "Cincinnati", "Cleveland", "Cologne", "Colombo", "Copenhagen", "Cork", "Córdoba", "Cusco", "Dakar", "Dallas",
    "Damascus", "Dar es Salaam", "Delhi", "Denver", "Detroit", "Dhaka", "Doha", "Dresden", "Dubai", "Dublin",
    "Dubrovnik", "Durban", "Düsseldorf", "Edinburgh", "Edmonton", "Eindhoven", "Florence", "Frankfurt", "Fukuoka",
    "Galway", "Gdańsk", "Geneva", "Genoa", "Ghent", "Glasgow", "Gothenburg", "Graz", "Grenoble", "Guadalajara",
    "Guangzhou", "Guatemala City", "Hamburg", "Hanoi", "Hanover", "Harare", "Havana", "Heidelberg", "Helsinki",
    "Hiroshima", "Ho Chi Minh City", "Hobart", "Hong Kong", "Honolulu", "Houston", "Hyderabad", "Innsbruck",
    "Istanbul", "Izmir", "Jaipur", "Jakarta", "Jerusalem", "Johannesburg", "Kabul", "Kampala", "Kansas City",
    "Karachi", "Kathmandu", "Kigali", "Kingston", "Kinshasa", "Kolkata", "Kraków", "Kuala Lumpur", "Kuwait City",
    "Kyiv", "Kyoto", "La Paz", "Lagos", "Lahore", "Las Vegas", "Lausanne", "Leeds", "Leipzig", "Lille", "Lima",
    "Lisbon", "Liverpool", "Ljubljana", "Los Angeles", "Luanda", "Lusaka", "Luxembourg", "Lyon", "Madrid", "Málaga",
    "Malmö", "Manchester", "Manila", "Maputo", "Marrakesh", "Marseille", "Mecca", "Medellín", "Melbourne", "Memphis",
    "Miami", "Milan", "Minneapolis", "Minsk", "Mombasa", "Monaco", "Monterrey", "Montevideo", "Montreal", "Moscow",
    "Mumbai", "Munich", "Nagoya", "Nairobi", "Naples", "Nashville", "New Orleans", "Nice", "Nuremberg", "Nuuk",
    "Oakland", "Odesa", "Oslo", "Ottawa", "Oxford", "Palermo", "Panama City", "Perth", "Philadelphia", "Phnom Penh",
    "Phoenix", "Pittsburgh", "Podgorica", "Port Moresby", "Portland", "Porto", "Poznań", "Prague", "Pretoria",
    "Quebec", "Quito", "Rabat", "Reykjavík", "Riga", "Rio de Janeiro", "Riyadh", "Rome", "Rosario", "Rotterdam",
    "Salvador", "Salzburg", "San Antonio", "San Diego", "San Francisco", "San José", "Santiago", "Santo Domingo",
    "São Paulo", "Sapporo", "Sarajevo", "Seattle", "Seoul", "Seville", "Shanghai", "Sheffield", "Shenzhen",
    "Singapore", "Skopje", "Sofia", "Split", "Stavanger", "Stockholm", "Strasbourg", "Stuttgart", "Surabaya", "Suva",
    "Sydney", "Taipei", "Tallinn", "Tampa", "Tampere", "Tashkent", "Tbilisi", "Tehran", "Tel Aviv", "The Hague",
    "Tijuana", "Timbuktu", "Tirana", "Toronto", "Toulouse", "Trieste", "Tripoli", "Tromsø", "Trondheim", "Tunis",
    "Turin", "Turku", "Ulaanbaatar", "Uppsala", "Utrecht", "Valencia", "Vancouver", "Venice", "Verona", "Vienna",
    "Vilnius", "Warsaw", "Washington", "Wellington", "Windhoek", "Wrocław", "Wuhan", "Yangon", "Yerevan", "Yokohama",
    "York", "Zagreb", "Zanzibar", "Zürich",
)  # fmt: skip
HELD_OUT_SHARE = 5
"""One in this many cities is held out of training, so that the examination shows names that are copied, not known."""

OPENINGS = (
    "b", "br", "c", "ch", "d", "f", "g", "gr", "h", "k", "kr", "l", "m", "n", "p", "r", "s", "sh", "st", "t", "tr", "v",
    "w", "z", "", "",
)  # fmt: skip
VOWELS = ("a", "e", "i", "o", "u", "a", "e", "i", "o", "ou", "ai", "ei", "á", "ö", "y")
CLOSINGS = ("", "", "", "", "n", "r", "l", "s", "m", "t", "ck", "nd", "ng", "x")
ENDINGS = (
    "", "", "", "", "", "burg", "ville", "ton", "stad", "ford", "field", "abad", "grad", "ovo", "mouth", "holm", "berg",
    "dam", "port", "ia", "ina", "heim", "wick", "by", "polis",
)  # fmt: skip
PREFIXES = ("San ", "Port ", "New ", "Saint ", "El ", "Los ", "Bad ", "Fort ", "Lake ", "North ", "Santa ")
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def is_held_out(city: str) -> bool:
    """Return whether a city stays out of training; a pure function of its name."""
    return hashlib.sha256(city.encode()).digest()[0] % HELD_OUT_SHARE == 0


TRAINED_CITIES = tuple(city for city in CITIES if not is_held_out(city))
HELD_OUT_CITIES = tuple(city for city in CITIES if is_held_out(city))


def draw_place(rng: Random) -> str:
    """Return the name of a place as training shows them: never a city that is held out."""
    name = _drawn(rng, cities=TRAINED_CITIES, weights=(18, 40, 3, 29, 10))
    return draw_place(rng) if name.partition(",")[0] in HELD_OUT_CITIES else name


def draw_asked_place(rng: Random) -> str:
    """Return the name of a place as visitors ask for them: mostly of cities that are held out of training."""
    return _drawn(rng, cities=HELD_OUT_CITIES, weights=(20, 55, 3, 14, 8))


def invented_place(rng: Random) -> str:
    """Return a name that sounds like a place's, such as Trovenburg or Port Kasil."""
    syllables = (
        rng.choice(OPENINGS) + rng.choice(VOWELS) + rng.choice(CLOSINGS) for _ in range(rng.choice((1, 1, 2, 2, 2, 3)))
    )
    prefix = rng.choice(PREFIXES) if rng.random() < 0.15 else ""
    return prefix + ("".join(syllables) + rng.choice(ENDINGS)).capitalize()


def gibberish(rng: Random) -> str:
    """Return one to three words of random letters."""
    words = ("".join(rng.choices(LETTERS, k=rng.randint(3, 9))) for _ in range(rng.choice((1, 1, 2, 3))))
    return " ".join(words)


def _drawn(rng: Random, *, cities: tuple[str, ...], weights: tuple[int, ...]) -> str:
    """Return a name; `weights` are of a country, a city, the village, an invented name and one of random letters."""
    makers = (
        lambda: rng.choice(COUNTRIES),
        lambda: rng.choice(cities),
        lambda: VILLAGE,
        lambda: invented_place(rng),
        lambda: gibberish(rng).title(),
    )
    name = rng.choices(makers, weights)[0]()
    return f"{name}, {rng.choice(COUNTRIES)}" if rng.random() < 0.08 else name
