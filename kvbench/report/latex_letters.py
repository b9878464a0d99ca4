"""Letters in LaTeX: escapes of special ones, and a command for those that pdflatex does not have."""

import unicodedata

GREEK = (
    "alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu", "nu", "xi",
    "pi", "rho", "sigma", "tau", "upsilon", "phi", "chi", "psi", "omega", "varsigma", "Gamma", "Delta", "Theta",
    "Lambda", "Xi", "Pi", "Sigma", "Upsilon", "Phi", "Psi", "Omega",
)  # fmt: skip
"""Commands of Greek letters; the others have none."""
SPECIAL = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "[": "{[}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "<": r"$<$", ">": r"$>$",
    "|": "$|$", "†": r"$^\dagger$", "↑": r"$\uparrow$", "↓": r"$\downarrow$", "→": r"$\rightarrow$", "≤": r"$\leq$",
    "≥": r"$\geq$", "≈": r"$\approx$", "\u2212": r"$-$", "\u00d7": r"$\times$", "∞": r"$\infty$",
    **{letter: rf"$\{name}$" for letter, name in zip("αβγδεζηθικλμνξπρστυφχψωςΓΔΘΛΞΠΣΥΦΨΩ", GREEK, strict=True)},
}  # fmt: skip
"""LaTeX by letter. LaTeX reads a bracket after `\\\\` as the argument of that line break."""
KNOWN = frozenset("¡¢£¥¦§¨©ª¬®¯°²³µ¶·¹º¼½¾¿Æßæ÷øØıŁłŒœ\u2010\u2011\u2012\u2013—\u2018\u2019“”‡•…‰€™")
"""Letters of article's default encoding besides ASCII and letters with accents."""
ACCENTS = frozenset("\u0300\u0301\u0302\u0303\u0304\u0306\u0307\u0308\u030a\u030b\u030c\u0327")
"""Combining accents of that encoding."""
LATIN_END = "\u0180"
"""First letter after those with accents that LaTeX declares."""
LETTER = r"\unicodeletter"
"""Command for any other letter: its code and itself."""
DEFINITION = (
    f"% {LETTER}{{code}}{{letter}} prints the code with pdflatex. For the letter, compile with lualatex or xelatex\n"
    "% and a font that has it, such as \\usepackage{fontspec} \\setmainfont{Noto Serif CJK SC}\n"
    f"\\providecommand{{{LETTER}}}[2]{{\\ifdefined\\Umathchar#2\\else{{\\tiny #1}}\\fi}}\n"
)
"""Its definition for all engines; pdfTeX alone lacks `Umathchar`."""


def escape(text: str) -> str:
    """Return text for one line of LaTeX: special letters escaped, control characters and line ends as spaces."""
    return "".join(map(_write, text))


def _write(letter: str) -> str:
    if letter in SPECIAL:
        return SPECIAL[letter]
    if letter.isspace() or unicodedata.category(letter) == "Cc":
        return " "
    if letter.isascii() or letter in KNOWN or _has_accent(letter):
        return letter
    return f"{LETTER}{{{ord(letter):04X}}}{{{letter}}}"


def _has_accent(letter: str) -> bool:
    """Return whether LaTeX composes a letter from one of ASCII and an accent."""
    parts = unicodedata.normalize("NFD", letter)
    return letter < LATIN_END and len(parts) == 2 and parts[0].isascii() and parts[1] in ACCENTS
