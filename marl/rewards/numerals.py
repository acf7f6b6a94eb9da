"""Notations of a number: digits of other scripts, grouped thousands, powers of ten."""

import re
import unicodedata
from decimal import Decimal, localcontext

LONGEST = 100
"""Characters of a number, and tens in a power, that are written out."""
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
