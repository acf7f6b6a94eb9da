"""Words behind a number: magnitudes and constants change its value, units may be left out, other words count things."""

import re
from decimal import Decimal, localcontext

LONGEST = 100
"""Characters of a number that a magnitude may multiply."""
MAGNITUDES = {
    "dozen": 12, "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12,
}  # fmt: skip
# part of the answer as they stand
MARKS = frozenset({
    "am", "pm", "bc", "bce", "ad", "ce", "half", "halves", "third", "thirds", "squared", "cubed", "factorial",
    "base", "mod", "north", "south", "east", "west", "january", "february", "march", "april", "may", "june",
    "july", "august", "september", "october", "november", "december",
})  # fmt: skip
OPERATORS = frozenset({"and", "or", "plus", "minus", "over"})
LINKS = {"per": "per", "square": "square", "sq": "square", "cubic": "cubic", "cu": "cubic"}
POWERS = {"squared": "square", "cubed": "cubic"}
MEASURES = {
    "metre": "metres meter meters", "km": "kms kilometre kilometres kilometer kilometers",
    "cm": "cms centimetre centimetres centimeter centimeters", "mm": "mms millimetre millimetres millimeter millimeters",
    "inch": "inches", "foot": "feet ft", "yard": "yards yd yds", "mile": "miles mi",
    "gram": "grams", "kg": "kgs kilo kilos kilogram kilograms", "mg": "milligram milligrams", "ton": "tons tonne tonnes",
    "pound": "pounds lb lbs", "ounce": "ounces oz",
    "litre": "litres liter liters", "ml": "millilitre millilitres milliliter milliliters",
    "gallon": "gallons gal", "quart": "quarts qt", "pint": "pints pt", "hectare": "hectares ha", "acre": "acres",
    "second": "seconds sec secs", "minute": "minutes min mins", "hour": "hours hr hrs", "day": "days", "week": "weeks",
    "month": "months", "year": "years yr yrs", "ms": "millisecond milliseconds",
    "dollar": "dollars usd", "cent": "cents", "euro": "euros eur", "yen": "jpy", "rupee": "rupees inr", "yuan": "cny",
    "percent": "percentage", "degree": "degrees deg", "radian": "radians rad", "celsius": "", "fahrenheit": "",
    "kelvin": "kelvins", "watt": "watts", "kw": "kilowatt kilowatts", "volt": "volts", "joule": "joules",
    "newton": "newtons", "hz": "hertz", "mole": "moles mol",
}  # fmt: skip
UNITS = {word: unit for unit, words in MEASURES.items() for word in (unit, *words.split())}
FACTORS = frozenset({*MAGNITUDES, "pi"})
TAIL = frozenset({*UNITS, *LINKS, *MARKS, "in"})
KNOWN = FACTORS | TAIL
NUMBER_END = re.compile(r"(?:[0-9})]|\\pi)$")
COMPOUND = {"mph": "mile per hour", "kph": "km per hour", "kmh": "km per hour"}
LETTERS = {"m": "metre", "g": "gram", "s": "second", "h": "hour", "l": "litre", "L": "litre"}
"""Variables, unless the other answer has a unit."""
EXPONENT = re.compile(r"\b([A-Za-z]{2,})\s*\^\s*(?:\{\s*([23])\s*\}|([23]))$")
DEGREES = {"c": "celsius", "f": "fahrenheit"}
WRAPPED = re.compile(r"\\(?:text(?:bf|it|rm|normal)?|math(?:rm|bf|it)|mbox)\s*\{([^{}]*)\}")
BLANKS = re.compile(r"\\[,;:! ]|~")


def unwrapped(text: str) -> str:
    r"""``5\,\text{cm}`` as ``5 cm``."""
    for _ in range(3):  # one in the other
        text, found = WRAPPED.subn(r" \1 ", text)
        if not found:
            return text
    return text


def spaced(text: str) -> str:
    """Without commands for fonts and blanks; ``cm^2`` as ``cm squared``."""
    return EXPONENT.sub(in_words, unwrapped(BLANKS.sub(" ", text)).strip())


def in_words(power: re.Match[str]) -> str:
    name = "squared" if "2" in (power[2], power[3]) else "cubed"
    return f"{power[1]} {name}" if power[1].casefold() in UNITS else power[0]


def quantity(number: str, words: str, apart: bool) -> str | None:
    """A number with its words: their magnitude multiplied, their unit in one spelling, counted things left out.

    None where they are mathematics. ``apart``: a blank stands between number and words.
    """
    names = named(words)
    if (not apart and not KNOWN.issuperset(names)) or any(len(name) < 2 and name != "a" for name in names):
        return None
    while names and names[0] in MAGNITUDES:
        if len(number) > LONGEST:
            return None
        number = multiplied(number, MAGNITUDES[names.pop(0)])
    if names[:1] == ["pi"]:
        number, names = rf"{number}\pi", names[1:]
    if (names and names[0] in OPERATORS) or not FACTORS.isdisjoint(names):
        return None
    unit = unit_of(names)
    return f"{number} {unit}" if unit else number


def named(words: str) -> list[str]:
    """Words in small letters without full stops, abbreviations written out."""
    names: list[str] = []
    for word in words.casefold().replace("per cent", "percent").split():
        name = word.replace(".", "")
        if names and UNITS.get(names[-1]) == "degree":
            name = DEGREES.get(name, name)
        names += COMPOUND.get(name, name).split()
    return [name for name in names if name]


def multiplied(number: str, factor: int) -> str:
    with localcontext(prec=2 * LONGEST):
        value = f"{Decimal(number) * factor:f}"
    return value.rstrip("0").rstrip(".") if "." in value else value


def unit_of(names: list[str]) -> str:
    """The unit in one spelling, or the marks; empty where the words only say what is counted."""
    found: list[str] = []
    for at, name in enumerate(names):
        if name in POWERS and found and found[-1] in MEASURES:
            found.insert(-1, POWERS[name])
        elif name in UNITS:
            found.append(UNITS[name])
        elif name in LINKS or name in MARKS:
            found.append(LINKS.get(name, name))
        elif name == "in" and at == len(names) - 1:
            found.append("inch")
    return " ".join(found) if not (MARKS | MEASURES.keys()).isdisjoint(found) else ""


def split_unit(text: str) -> tuple[str, str]:
    """An answer without its unit, and the unit in one spelling."""
    tokens, names = spaced(text).split(), []
    while tokens and (name := tokens[-1].casefold().replace(".", "")) in TAIL:
        names.append(name)
        tokens.pop()
    unit = unit_of(names[::-1])
    return (" ".join(tokens), unit) if unit and tokens and NUMBER_END.search(tokens[-1]) else (text, "")


def letter_unit(text: str) -> str:
    """The unit that a single letter behind a number stands for; empty without."""
    tokens = spaced(text).split()[-2:]
    return LETTERS.get(tokens[-1], "") if len(tokens) == 2 and NUMBER_END.search(tokens[0]) else ""


def units_agree(unit: str, other: str) -> bool:
    """True for one unit in both answers, or where one leaves it out. Marks cannot be left out."""
    if unit == other or {unit, other} in ({"degree", "degree celsius"}, {"degree", "degree fahrenheit"}):
        return True
    return not (unit and other) and MARKS.isdisjoint(f"{unit} {other}".split())
