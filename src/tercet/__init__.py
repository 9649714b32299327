"""Tercet: programmable orchestration for LLM serving.

An engine offers three verbs, ``prep_recv``, ``remote_send`` and ``start_generate``; a program of a few lines
composes them into a serving pattern. Start with :mod:`tercet.protocol` for the words, :mod:`tercet.programs` for
the patterns.
"""

from pkgutil import extend_path

# `tercet.lab` is in the distribution tercet-lab, which an editable install has in another folder.
__path__ = extend_path(__path__, __name__)
__version__ = "0.3.0"
