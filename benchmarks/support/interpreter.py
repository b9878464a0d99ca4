"""Triton's interpreter, with less work per launch."""

import importlib.util
from collections.abc import Callable
from typing import Any


def adapt_language_once() -> None:
    """Let the interpreter replace the functions of `triton.language` once per process.

    By itself it searches the whole module at each launch and at each call of a function by a program, which is half of
    the time of a small launch. Nothing can be compiled in this process afterwards. Does nothing without Triton.
    """
    if importlib.util.find_spec("triton") is None:
        return
    import triton.language as tl
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):  # versions that keep no record of what they replace
        return
    adapt: Callable[[Any], Any] = interpreter._patch_lang
    adapted: set[int] = set()

    def adapt_once(program: Any) -> Any:
        found = {id(value) for value in program.__globals__.values() if value is tl or value is tl.core}
        if not found <= adapted:
            adapt(program)
            adapted.update(found)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = adapt_once
