"""The suffix of Infinity's official `positive prompt` option."""

import re

PEOPLE = (
    "man|woman|men|women|boy|girl|child|person|human|adult|teenager|employee|employer|worker|mother|father|sister|"
    "brother|grandmother|grandfather|son|daughter"
)
FACES = ". very smooth faces, good looking faces, face to the camera, perfect facial features"


def add_faces(prompt: str) -> str:
    """Append the suffix of the official `positive prompt` option to prompts that mention people (as a substring)."""
    return prompt + FACES if re.search(PEOPLE, prompt) else prompt
