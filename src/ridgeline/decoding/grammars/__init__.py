"""Grammars that outputs must follow, over llguidance. No torch in here."""

from ridgeline.decoding.grammars.compiler import GrammarCompiler

__all__ = ["GrammarCompiler"]
