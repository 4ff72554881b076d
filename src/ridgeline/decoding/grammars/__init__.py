"""Grammars that outputs must follow, over llguidance. No torch in here."""

from ridgeline.decoding.grammars.compiler import GrammarCompiler
from ridgeline.decoding.grammars.constraint import GrammarConstraint
from ridgeline.decoding.grammars.vocabulary import grammar_vocabulary

__all__ = ["GrammarCompiler", "GrammarConstraint", "grammar_vocabulary"]
