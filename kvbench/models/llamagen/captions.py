"""Cleaning of captions as in LlamaGen's training: lower case, without links, markup and file names."""

import html
import re
from html.parser import HTMLParser
from urllib.parse import unquote_plus

DOMAIN = r"[a-z0-9.\-]+[.](?:com|co|ru|net|org|edu|gov|it)[\w/-]*\b/?(?!@)"
IDEOGRAPHS = "\u31c0-\u31ef\u31f0-\u31ff\u3200-\u32ff\u3300-\u33ff\u3400-\u4dbf\u4dc0-\u4dff\u4e00-\u9fff"
DASHES = (
    "\\-\u058a\u05be\u1400\u1806\u2010-\u2015\u2e17\u2e1a\u2e3a\u2e3b\u2e40\u301c\u3030\u30a0"
    "\ufe31\ufe32\ufe58\ufe63\uff0d"
)
FILES = "(?:png|jpg|jpeg|bmp|webp|eps|pdf|apk|mp4)"
Rules = tuple[tuple[str, str], ...]
"""Regular expressions and their replacements, applied in order."""

BEFORE_MARKUP: Rules = (
    ("<person>", "person"),
    (rf"\b(?:https?:(?:/{{1,3}}|[a-z0-9%])|{DOMAIN})", ""),
    (rf"\b(?:www:(?:/{{1,3}}|[a-z0-9%])|{DOMAIN})", ""),
)
BEFORE_REPAIR: Rules = (
    (r"@\w+\b", ""),
    (f"[{IDEOGRAPHS}]+", ""),
    (f"[{DASHES}]+", "-"),
    ("[`\u00b4\u00ab\u00bb\u201c\u201d\u00a8]", '"'),
    ("[\u2018\u2019]", "'"),
    ("&quot;?", ""),
    ("&amp", ""),
    (r"\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}", " "),  # addresses
    (r"\d:\d\d\s+$", ""),
    (r"\\n", " "),
    (r"#\d{1,3}\b", ""),
    (r"#\d{5,}\b", ""),
    (r"\b\d{6,}\b", ""),
    (rf"\S+\.{FILES}", ""),
    (r"[\"']{2,}", '"'),
    (r"\.{2,}", " "),
    ("[#\u00ae\u2022\u00a9\u2122&@\u00b7\u00ba\u00bd\u00be\u00bf\u00a1\u00a7~)(\\]\\[}{|\\\\/*]+", " "),
    (r"\s+\.\s+", " "),
)
AFTER_REPAIR: Rules = (
    (r"\b[a-zA-Z]{1,3}\d{3,15}\b", ""),  # article numbers
    (r"\b[a-zA-Z]+\d+[a-zA-Z]+\b", ""),
    (r"\b\d+[a-zA-Z]+\d+\b", ""),
    (r"(?:worldwide\s+)?(?:free\s+)?shipping", ""),
    (r"(?:free\s)?download(?:\sfree)?", ""),
    (r"\bclick\b\s(?:for|on)\s\w+", ""),
    (rf"\b{FILES}(?:\simages?)?", ""),
    (r"\bpage\s+\d+\b", ""),
    (r"\b\d*[a-zA-Z]+\d+[a-zA-Z]+\d+[a-zA-Z\d]*\b", " "),
    ("\\b\\d+\\.?\\d*[x\u0445\u00d7]\\d+\\.?\\d*\\b", ""),  # sizes
    (r"\b\s+:\s+", ": "),
    (r"(\D[,./])\b", r"\1 "),
    (r"\s+", " "),
    (r"\A\s+|\s+\Z", ""),
    (r"\A[\"']([\w\W]+)[\"']\Z", r"\1"),
    (r"\A['_,\-:;]", ""),
    (r"['_,\-:+]\Z", ""),
    (r"\A\.\S+\Z", ""),
)


def clean_caption(caption: str) -> str:
    """Return a caption cleaned twice, as the official code encodes it.

    Differs from the official code in: markup is parsed by Python's `html.parser`.

    >>> clean_caption("A  cat,dog &amp; <b>bird</b>: see www.example.com")
    'a cat, dog bird: see'

    Raises:
        ImportError: the `text` extra is not installed.
    """
    return clean_once(clean_once(caption))


def clean_once(caption: str) -> str:
    """Return a caption cleaned once; the result may need cleaning again.

    Raises:
        ImportError: the `text` extra is not installed.
    """
    import ftfy

    text = _replace(unquote_plus(caption).strip().lower(), BEFORE_MARKUP)
    text = _replace(_drop_markup(text), BEFORE_REPAIR)
    if len(re.findall("[-_]", text)) > 3:  # words of a file name
        text = re.sub("[-_]", " ", text)
    text = html.unescape(html.unescape(ftfy.fix_text(text))).strip()
    return _replace(text, AFTER_REPAIR).strip()


def _replace(text: str, rules: Rules) -> str:
    for pattern, replacement in rules:
        text = re.sub(pattern, replacement, text)
    return text


def _drop_markup(text: str) -> str:
    parts: list[str] = []
    reader = HTMLParser()
    reader.handle_data = lambda data: parts.append(data)  # type: ignore[method-assign]
    reader.feed(text)
    reader.close()
    return "".join(parts)
