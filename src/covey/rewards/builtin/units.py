"""Units of measure and nouns after a number: which words leave its value as it is."""

import re
from collections.abc import Collection


def words(text: str) -> frozenset[str]:
    """The words of a list that is written with spaces."""
    return frozenset(text.split())


_UNITS = words(
    "mm cm dm m km in inch ft foot feet yd yard mi mile meter metre millimeter centimeter kilometer mg g kg gram "
    "kilogram oz ounce lb pound ton tonne ml cl l liter litre gallon quart pint cup s sec second min minute h hr "
    "hour day week month year ms rpm unit units square cubic sq cu per dollar euro cent rupee yuan "
    "degree radian rad person people student point a an the of hertz hz khz w kw watt volt v amp ampere ohm n "
    "newton j kj joule pa kpa pascal mol mole k c f celsius fahrenheit kelvin acre hectare ha am pm usd eur "
    "year-old % ° °c °f $ € £ ¥ ¢ 年 月 日 天 个 元 人 岁 米 厘米 千米 公里 克 千克 公斤 小时 分钟 秒 度 次 本 只 支 名 位 条 张 块 棵 页 册 件 辆 台 箱 盒 袋 瓶 平方米 升"
)
_ALONE = frozenset({"a", "an", "the", "of", "per", "square", "cubic", "sq", "cu"})
"""Words of units that are none by themselves."""
_SAME = {"dollar": "$", "usd": "$", "cent": "¢", "euro": "€", "eur": "€", "degree": "°", "percent": "%", "centimeter": "cm", "millimeter": "mm", "kilometer": "km", "meter": "m", "metre": "m", "kilogram": "kg", "gram": "g", "hour": "h", "hr": "h", "hrs": "h", "mph": "mi/h", "kph": "km/h", "kmh": "km/h", "mile": "mi", "inch": "in", "inche": "in", "second": "s", "sec": "s", "minute": "min", "foot": "ft", "feet": "ft", "liter": "l", "litre": "l", "元": "yuan"}  # fmt: skip
_NUMERALS = words(
    "hundred thousand million billion trillion dozen score half quarter third fifth percent percentage pct times "
    "squared cubed factorial negative minus plus not nor and or none never wrong false least most more less than "
    "about approximately tens hundreds thousands millions billions dozens halves quarters thirds th st nd rd root "
    "roots power"
)
"""Words that change the number before them; never a noun of the question."""


def unit_name(text: str) -> str:
    """One spelling of a unit: lower case, singular, short where a short form is usual."""
    text = re.sub(r" ?(?:\bper\b|/) ?", " / ", text.casefold().replace("^", ""))
    words = [_singular(word) for word in re.split(r"[ *.]+", text.strip()) if word not in ("", "the", "a", "of")]
    name = " ".join(_SAME.get(word, word) for word in words)
    return re.sub(r"\b(square|sq|cubic|cu) (\w+)", _power, name).replace(" / ", "/")


def _power(named: re.Match[str]) -> str:
    return named[2] + ("2" if named[1].startswith("s") else "3")


def is_unit(name: str, context: Collection[str] = ()) -> bool:
    """True for a unit of measure, also in powers and quotients, or for a noun of the question.

    >>> is_unit("km/h"), is_unit("cm2"), is_unit("egg"), is_unit("egg", {"eggs"}), is_unit("million", {"million"})
    (True, True, False, True, False)
    """
    words = [word for word in re.split(r"[ /]+", re.sub(r"[23](?=$|[ /])", "", name)) if word]
    if not words or not _NUMERALS.isdisjoint(words):
        return False
    if all(word in _UNITS for word in words):
        return not _ALONE.issuperset(words)
    noun = words[0]
    return len(words) == 1 and len(noun) >= 3 and not {noun, noun + "s", noun + "es"}.isdisjoint(context)


def words_of(*texts: str) -> frozenset[str]:
    """The words of a question and its solution, in lower case: nouns that may stand after a number."""
    return frozenset(word.casefold() for text in texts for word in re.findall(r"[^\W\d_]{3,40}", text[:20_000]))


def _singular(word: str) -> str:
    if len(word) > 4 and word.endswith(("ches", "xes", "sses")):
        return word[:-2]
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word
