"""Infinity's official `positive prompt` option, a suffix for prompts that mention people."""

import re

PEOPLE_PATTERN = (
    "man|woman|men|women|boy|girl|child|person|human|adult|teenager|employee|employer|worker|mother|father|sister|"
    "brother|grandmother|grandfather|son|daughter"
)
FACES_SUFFIX = ". very smooth faces, good looking faces, face to the camera, perfect facial features"


def add_positive_prompt(prompt: str) -> str:
    """Append `FACES_SUFFIX` to a prompt in which `PEOPLE_PATTERN` matches, also inside a word."""
    return prompt + FACES_SUFFIX if re.search(PEOPLE_PATTERN, prompt) else prompt
