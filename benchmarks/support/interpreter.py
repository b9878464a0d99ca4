"""Faster launches of kernels in Triton's interpreter."""

import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any


def adapt_language_once() -> None:
    """Let the interpreter replace the functions of `triton.language` once per process.

    By default it searches the whole module at each launch and each function call of a kernel, half of the time of a
    small launch, and tabulates NumPy's dtypes at each operation. Afterwards this process cannot compile kernels. The
    function does nothing without Triton.
    """
    if importlib.util.find_spec("triton") is None:
        return
    import triton.language as tl
    from triton.runtime import interpreter

    if not (hasattr(interpreter, "_LangPatchScope") and hasattr(interpreter, "_get_np_dtype")):
        return  # another version
    adapt: Callable[[Any], Any] = interpreter._patch_lang
    adapted: set[int] = set()

    @cache
    def adapt_once(program: Any) -> Any:
        modules = {id(value) for value in program.__globals__.values() if value is tl or value is tl.core}
        if not modules <= adapted:
            adapt(program)
            adapted.update(modules)
        return interpreter._LangPatchScope()

    find: Callable[[Any], Any] = interpreter._get_np_dtype
    found: dict[str, Any] = {}

    def find_once(kind: Any) -> Any:
        if kind.name not in found:
            found[kind.name] = find(kind)
        return found[kind.name]

    interpreter._patch_lang, interpreter._get_np_dtype = adapt_once, find_once
