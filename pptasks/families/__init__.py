"""The families of models that we know, each a small description of its own.

A new family is a module with a `Family` and an entry in FAMILIES.
"""

from pptasks.families.base import Family
from pptasks.families.gpt2 import GPT2
from pptasks.families.llama import LLAMA
from pptasks.families.mistral import MISTRAL
from pptasks.families.qwen import QWEN2, QWEN3

FAMILIES: tuple[Family, ...] = (LLAMA, MISTRAL, QWEN2, QWEN3, GPT2)
