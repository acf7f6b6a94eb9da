"""Numbers in a text: digits of other scripts, grouped thousands, powers of ten, and the words behind them.

``million`` changes a number's value and ``am`` its meaning; a unit can be another one than the truth's.
"""

import re
import unicodedata
from decimal import Decimal, localcontext

LONGEST = 100
"""Characters of a number, and tens in a power, that are written out or multiplied."""
OTHER_DIGIT = re.compile(r"(?![0-9])\d")
SIGNS = str.maketrans(
    "\uff1a\uff0e\uff0c\uff05\uff1d\uff08\uff09\uff0b\uff0d\uff0f\u2212\u066b\u066c\u066a\u00a0\u2007\u2009\u200a\u202f\u3000",
    ":.,%=()+-/-.,%      ",
)
"""Full-width and Arabic signs, the typographic minus, and blanks that do not break."""
SUPERSCRIPTS = str.maketrans("\u207a\u207b\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079", "+-0123456789")

DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]{1,3}(?: [0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
POWER = (
    r"(?:[eE](?P<e>[+-]?[0-9]{1,3})(?![0-9A-Za-z])"
    r"|\s?(?:\\times|\\cdot|[\u00d7\u00b7*x])\s?10"
    r"(?:\s?(?:\^|\*\*)\s?(?:\{\s?(?P<braced>[+-]?[0-9]{1,3})\s?\}|(?P<bare>[+-]?[0-9]{1,3}))"
    r"|(?P<raised>[\u207a\u207b]?[\u2070\u00b9\u00b2\u00b3\u2074-\u2079]{1,3})))?"
)
NUMBER = rf"(?P<digits>{DIGITS}){POWER}"
CURRENCY = r"(?:\\?[$\u20ac\u00a3\u00a5\u20b9])?"
# a minus behind a word or a bracket is a difference or a range, not a sign
IN_TEXT = re.compile(rf"(?P<sign>(?<![\w)\]}}])-)?{CURRENCY}{NUMBER}")
QUANTITY = re.compile(
    rf"{CURRENCY}(?P<sign>-)?{CURRENCY}{NUMBER}"
    r"\s*(?:(?P<percent>\\?%)|[$\u20ac\u00a3\u00a5\u20b9\u00b0]|(?<=\s)(?P<words>[A-Za-z]{2}[A-Za-z .]*|[AaPp]\.[Mm]\.?|[mgshlL](?![A-Za-z])))?\.?"
)

MAGNITUDES = {
    "dozen": 12, "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12,
}  # fmt: skip
KEPT = frozenset({"am", "pm", "pi"})
PERCENT = frozenset({"percent", "percentage", "pct"})
MEASURES = {
    "metre": "metres meter meters m", "km": "kms kilometre kilometres kilometer kilometers kph kmh",
    "cm": "cms centimetre centimetres centimeter centimeters", "mm": "mms millimetre millimetres millimeter millimeters",
    "inch": "inches", "foot": "feet ft", "yard": "yards yd yds", "mile": "miles mi mph",
    "gram": "grams g", "kg": "kgs kilo kilos kilogram kilograms", "mg": "milligram milligrams", "ton": "tons tonne tonnes",
    "pound": "pounds lb lbs", "ounce": "ounces oz",
    "litre": "litres liter liters l", "ml": "millilitre millilitres milliliter milliliters",
    "gallon": "gallons gal", "quart": "quarts qt", "pint": "pints pt", "hectare": "hectares ha", "acre": "acres",
    "second": "seconds sec secs s", "minute": "minutes min mins", "hour": "hours hr hrs h", "day": "days", "week": "weeks",
    "month": "months", "year": "years yr yrs", "ms": "millisecond milliseconds",
    "dollar": "dollars usd", "cent": "cents", "euro": "euros eur", "yen": "jpy", "rupee": "rupees inr", "yuan": "cny",
    "percent": "percentage", "degree": "degrees deg", "radian": "radians rad",
    "byte": "bytes", "kb": "kilobyte kilobytes", "mb": "megabyte megabytes", "gb": "gigabyte gigabytes",
    "tb": "terabyte terabytes", "hz": "hertz", "khz": "kilohertz", "mhz": "megahertz", "ghz": "gigahertz",
    "watt": "watts w", "kw": "kilowatt kilowatts", "joule": "joules j", "kj": "kilojoule kilojoules", "volt": "volts v",
}  # fmt: skip
UNITS = {word: unit for unit, words in MEASURES.items() for word in (unit, *words.split())}
CURRENCIES = {"$": "dollar", "€": "euro", "£": "pound", "₹": "rupee"}
POWERS = {"square": "2", "sq": "2", "squared": "2", "cubic": "3", "cu": "3", "cubed": "3"}
COUNTED = frozenset({*UNITS, *MAGNITUDES, *PERCENT, *POWERS, *KEPT})
"""Words that change a number, or measure it."""
WRAPPED = re.compile(r"\\(?:text(?:bf|it|rm|normal)?|math(?:rm|bf|it)|mbox)\s*\{([^{}]*)\}")
BLANKS = re.compile(r"\\[,;:! ]|~")
BEHIND = re.compile(r"(?<=[0-9})])\s*(?P<words>[A-Za-z][A-Za-z .]*)(?:\^\s*\{?\s*(?P<power>[23])\s*\}?)?\s*$")


def simplified(text: str) -> str:
    """A text of the same length with the digits and signs of ASCII."""
    if text.isascii():
        return text
    return OTHER_DIGIT.sub(lambda digit: str(unicodedata.decimal(digit[0])), text.translate(SIGNS))


def plain_number(number: re.Match[str]) -> str:
    """``-1,005.50`` as ``-1005.5`` and ``1e3`` as ``1000``: one way to write a number, so that equal numbers are equal strings."""
    digits, power = re.sub("[ ,]", "", number["digits"]), power_of(number)
    written = len(digits) <= LONGEST and abs(power) <= LONGEST
    if power and written:
        with localcontext(prec=3 * LONGEST):
            digits = f"{Decimal(digits).scaleb(power):f}"
    whole, _, fraction = digits.partition(".")
    whole, fraction = whole.lstrip("0") or "0", fraction.rstrip("0")
    value = f"{whole}.{fraction}" if fraction else whole
    value = value if written or not power else rf"{value}\times10^{{{power}}}"
    return f"-{value}" if number["sign"] and value != "0" else value


def power_of(number: re.Match[str]) -> int:
    found = next((number[name] for name in ("e", "braced", "bare", "raised") if number[name]), "0")
    return int(found.translate(SUPERSCRIPTS))


def unwrapped(text: str) -> str:
    r"""``5\,\text{cm}`` as ``5 cm``."""
    text = BLANKS.sub(" ", text)
    for _ in range(3):  # one in the other
        text, found = WRAPPED.subn(r" \1 ", text)
        if not found:
            break
    return text.strip()


def counted(number: str, words: str) -> str:
    """``3`` and ``million people`` as ``3000000``; words that say what is counted, or measured in which unit, are left out."""
    names = words.casefold().replace(".", "").split()
    while names and names[0] in MAGNITUDES and len(number) <= LONGEST:
        number = multiplied(number, MAGNITUDES[names.pop(0)])
    if names and names[0] in PERCENT:
        return f"{number}%"
    if names == ["pi"]:
        return rf"{number}\pi"
    return f"{number} {' '.join(names)}" if names and names[0] in KEPT else number


def multiplied(number: str, factor: int) -> str:
    with localcontext(prec=2 * LONGEST):
        value = f"{Decimal(number) * factor:f}"
    return value.rstrip("0").rstrip(".") if "." in value else value


def unit_of(text: str) -> str:
    """The unit behind a number in one spelling, with its power, or the currency before it; empty where none is known."""
    found = BEHIND.search(unwrapped(text)[-LONGEST:])
    names = found["words"].casefold().replace(".", "").split() if found else []
    power = found["power"] or "" if found else ""
    if names and names[0] in POWERS:
        power = POWERS[names.pop(0)]
    elif len(names) > 1 and names[1] in POWERS:
        power = POWERS[names[1]]
    unit = UNITS.get(names[0]) if names else None
    return f"{unit}{power}" if unit else CURRENCIES.get(text.strip().lstrip("\\")[:1], "")


def other_unit(answer: str, truth: str) -> bool:
    """True if both name a unit, and not the same."""
    given, wanted = unit_of(answer), unit_of(truth)
    return bool(given and wanted) and given != wanted
